"""The `kvxfer` command."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:
        argv: Arguments after the program's name; those of the process when it is None.
    """
    parser = argparse.ArgumentParser(prog="kvxfer", description="Move KV-cache blocks.")
    version = importlib.metadata.version("kvxfer")
    parser.add_argument("--version", action="version", version=f"kvxfer {version}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measure a part of kvxfer", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "bench":
        # Benchmarks import engines where they are installed: only when one is run.
        from kvxfer.bench import main as bench

        return bench(rest)
    raise AssertionError(arguments.command)


if __name__ == "__main__":
    sys.exit(main())
