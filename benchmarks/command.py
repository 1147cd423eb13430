"""Command `python -m benchmarks`: runs one benchmark and prints its rows."""

import importlib
import os
import sys
from collections.abc import Sequence

import msgspec

from benchmarks.report import BenchRow
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.cli.service import ending_by_signals
from kvxfer.extras import require_extra

PROGRAM = "python -m benchmarks"
BENCHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layout", "copy", "mapping", "engine-loop", "nixl", "pool", "journal"), ()),
    "calls": (),
    "s3": ("obstore",),
    "mooncake": ("mooncake",),
    **dict.fromkeys(("describe", "file"), ("vllm",)),
    **dict.fromkeys(("vllm", "pd"), ("vllm", "transformers")),
    "transformers": ("transformers",),
}
"""Benchmarks, with the packages that each needs, of the extra `bench` or (Mooncake) its own."""
COLUMNS = BenchRow.__struct_fields__


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and print its rows; return 1 if `--check` finds a missed goal, else 0."""
    parser = CommandLine(
        prog=PROGRAM,
        description="Measure a part of kvxfer and compare it with a baseline of the same run.",
        epilog=exit_statuses("when it is done", "when a ratio misses its goal, with --check"),
    )
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--check", action="store_true", help="fail when a ratio misses its goal")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less memory")
    arguments = parser.parse_args(argv)
    if arguments.name != "vllm":  # engines run with the same threads as a user's
        # Otherwise torch's threads spin after a call, and take a core from the next one. OpenMP
        # reads this once, when the benchmark imports torch.
        os.environ["OMP_WAIT_POLICY"] = "passive"
    for package in BENCHES[arguments.name]:
        extra = package if package == "mooncake" else "bench"
        require_extra(extra, package, what=f"{PROGRAM} {arguments.name}")
    bench = importlib.import_module(f"benchmarks.{arguments.name.replace('-', '_')}")
    with ending_by_signals():  # so that the servers and engines of the benchmark end, too
        rows: list[BenchRow] = bench.run(quick=arguments.quick)
    shown = msgspec.json.encode(rows).decode() if arguments.json else format_table(rows)
    sys.stdout.write(f"{shown}\n")
    missed = [row for row in rows if not row.meets_goal]
    for row in missed:
        sys.stderr.write(f"missed: {row.case}: ratio {row.ratio:.3f}, goal {row.goal}\n")
    return 1 if arguments.check and missed else 0


def format_table(rows: Sequence[BenchRow]) -> str:
    """Format rows as a Markdown table."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for row in rows:
        cells = (getattr(row, column) for column in COLUMNS)
        lines.append([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
