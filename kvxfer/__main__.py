"""`python -m kvxfer`: the command `kvxfer`, where its folder is not on the path."""

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
