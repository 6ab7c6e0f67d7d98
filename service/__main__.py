"""`python -m radixkv.service` is the `radixkv` command."""

import sys

from radixkv.service.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
