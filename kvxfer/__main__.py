"""`python -m kvxfer`: the command `kvxfer`, for when its script is not on the PATH."""

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
