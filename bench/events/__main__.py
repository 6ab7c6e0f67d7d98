"""Run the measurement of `bench.events.beside_callers`."""

import sys

from bench.events.beside_callers import main

if __name__ == "__main__":
    sys.exit(main())
