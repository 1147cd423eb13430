"""Benchmarks `python -m benchmarks NAME`: each speed claim as a ratio to a baseline beside it."""

import sys

from benchmarks.command import PROGRAM, main
from kvxfer.cli.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(PROGRAM, lambda: main(sys.argv[1:])))
