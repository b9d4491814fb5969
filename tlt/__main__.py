"""`python -m tlt` is the `tlt` command."""

import sys

from tlt.cli import main

if __name__ == "__main__":
    sys.exit(main())
