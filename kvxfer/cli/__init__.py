"""Command `kvxfer`, which imports and runs one subcommand."""

import argparse
import pkgutil
from collections.abc import Sequence

from kvxfer.cli.command_line import CommandLine, exit_statuses, run_command
from kvxfer.extras import installed_version

_COMMANDS = {
    "bench": ("kvxfer.cli.bench:main", "measure the speed of a backend"),
    "fsck": ("kvxfer.cli.stores:fsck", "verify every block of a store"),
    "ls": ("kvxfer.cli.stores:ls", "list the namespaces of a store"),
    "inspect": ("kvxfer.cli.stores:inspect", "show what a block file holds"),
    "serve": ("kvxfer.cli.serve:main", "hold blocks for other processes"),
    "doctor": ("kvxfer.cli.doctor:main", "find what silently costs hits or speed"),
    "explain": ("kvxfer.cli.explain:main", "say why a request missed"),
    "replay": ("kvxfer.cli.replay:main", "plan caches with a trace of requests"),
    "vllm-args": ("kvxfer.cli.vllm_args:main", "print vLLM's configuration for tiers"),
    "gc": ("kvxfer.cli.stores:gc", "remove stale files and old blocks from a store"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; an error is printed as one line."""
    parser = CommandLine(
        prog="kvxfer",
        description="Move KV-cache blocks.",
        epilog=exit_statuses("when all is well", "when a command found a bad block"),
    )
    version = f"kvxfer {installed_version('kvxfer')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, purpose) in _COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return run_command("kvxfer", lambda: _run(*parser.parse_known_args(argv)))


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    # Import only the command that runs: torch is slow to import, and some commands need extras.
    name, (target, _) = arguments.command, _COMMANDS[arguments.command]
    return run_command(f"kvxfer {name}", lambda: pkgutil.resolve_name(target)(rest))
