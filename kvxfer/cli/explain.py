"""Command `kvxfer explain`: why a request missed, block by block."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.cli.command_line import CommandLine, exit_statuses, show, wrap
from kvxfer.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvxfer.explain import Report, Run


def main(argv: Sequence[str]) -> int:
    """Explain a request, or blocks by their keys; return 0."""
    parser = CommandLine(
        prog="kvxfer explain",
        description="Say for every block of a request, or for every key, where it came from or why "
        "it was missed, according to the journal of engines with KVXFER_JOURNAL=FOLDER.",
        epilog=exit_statuses("when it is done"),
    )
    add = parser.add_argument
    what = "a request by the engine's id or a part of it, or keys of blocks in hexadecimal digits"
    add("what", nargs="+", metavar="REQUEST_ID | KEY", help=what)
    journal = "folder of the journal; default: KVXFER_JOURNAL"
    add("--journal", default="", metavar="FOLDER", help=journal)
    add("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args(argv)

    from kvxfer.explain import explain
    from kvxfer.telemetry.journal import VARIABLE, journal_folder

    folder = arguments.journal or journal_folder()
    if not folder:
        expected = f"the folder of the journal, or {VARIABLE}=FOLDER"
        raise InvalidArgumentError("journal", folder, expected)
    reports = explain(arguments.what, Path(folder))
    show(reports, lambda found: "\n\n".join(map(_format, found)), as_json=arguments.json)
    return 0


def _format(report: "Report") -> str:
    lines = wrap(_summary(report), "")
    groups = {run.group for run in report.runs}
    labels = [_label(run, with_group=len(groups) > 1) for run in report.runs]
    width = max(map(len, labels), default=0) + 2
    for label, run in zip(labels, report.runs, strict=True):
        lines += wrap(run.text, label.ljust(width))
    for note in report.notes:
        lines += wrap(note, "note: ")
    return "\n".join(lines)


def _summary(report: "Report") -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.at_s))
    what = f"request {report.request}, scheduled {when}" if report.request else "keys"
    parts = [f"{what}: {report.num_blocks} block{'' if report.num_blocks == 1 else 's'}"]
    num_found, num_missed = sum(report.found.values()), sum(report.missed.values())
    parts.append(f"{num_found} found{_counts(report.found)}")
    parts.append(f"{num_missed} missed{_counts(report.missed)}")
    if report.not_looked_up:
        parts.append(f"{report.not_looked_up} not looked up")
    return ", ".join(parts)


def _counts(counts: Mapping[str, int]) -> str:
    each = ", ".join(f"{name} {number}" for name, number in counts.items())
    return f" ({each})" if each else ""


def _label(run: "Run", *, with_group: bool) -> str:
    group = f"group {run.group} " if with_group else ""
    if run.first == run.last:
        return f"{group}block {run.first}"
    return f"{group}blocks {run.first}-{run.last}"
