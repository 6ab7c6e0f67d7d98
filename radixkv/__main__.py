"""`python -m radixkv` is the `radixkv` command."""

import sys

from radixkv.service.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
