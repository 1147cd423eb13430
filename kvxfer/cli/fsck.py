"""Command `kvxfer fsck`: verifies every block of a store."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from tqdm import tqdm

from kvxfer.cli.block_stores import STORE, open_store
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.text import printable

if TYPE_CHECKING:
    from kvxfer.pages.maintenance import StoreCheck


class Problem(msgspec.Struct, frozen=True):
    """Bad file of a store: its path below the root, and the reason."""

    path: str
    reason: str


class Report(msgspec.Struct, kw_only=True):
    """Result of a check, in numbers of files; those in `bad` are in no other number."""

    good: int = 0
    keyed: int = 0
    sealed: int = 0
    unchecked: int = 0
    gone: int = 0
    quarantined: int
    quarantined_now: int = 0
    temporary_removed: int = 0
    bad: list[Problem] = []
    remarks: list[str] = []


def main(argv: Sequence[str]) -> int:
    """Verify every block of a store.

    Returns:
        1 when a file is bad, also when it was repaired; 0 otherwise.
    """
    parser = CommandLine(
        prog="kvxfer fsck",
        description="Verify every block of a store.",
        epilog=exit_statuses("when no file is bad", "when one is, also when it was repaired"),
    )
    parser.add_argument("path", help=STORE)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="put bad files in quarantine, remove temporary files, recount the bytes",
    )
    parser.add_argument("--secret-file", default="", help="secret that every block is sealed with")
    parser.add_argument("--tenant", default="", help="whose blocks of integrity=sealed to verify")
    parser.add_argument("--json", action="store_true", help="print an object")
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import BlockCheck, StoreCheck
    from kvxfer.storage.integrity import read_secret

    check = BlockCheck(read_secret(arguments.secret_file), arguments.tenant)
    with open_store(arguments.path) as store:
        checked = StoreCheck(store, check)
        report = _verify(checked, repair=arguments.repair, quiet=arguments.json)
        if arguments.repair:
            report.temporary_removed = checked.clean_up()
    print(msgspec.json.encode(report).decode() if arguments.json else _summary(report))
    return 1 if report.bad else 0


def _verify(check: "StoreCheck", *, repair: bool, quiet: bool) -> Report:
    from kvxfer.pages.maintenance import Verdict

    report = Report(quarantined=check.num_quarantined, remarks=list(check.namespace_problems()))
    counts: Counter[Verdict] = Counter()
    total = check.num_bytes
    # `disable=None`: no progress bar unless the output is a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:

        def note(problem: Problem) -> None:
            report.bad.append(problem)
            if not quiet:
                bar.write(f"bad: {printable(problem.path)}: {printable(problem.reason)}")

        for error in check.errors:
            note(Problem(str(error.filename), f"cannot be opened: {error.strerror}"))
        for finding in check.verify(repair=repair):
            counts[finding.verdict] += 1
            report.quarantined_now += finding.quarantined
            if finding.bad:
                note(Problem(finding.block.path, finding.reason))
            bar.update(finding.block.num_bytes)
    report.good = counts[Verdict.GOOD]
    report.keyed = counts[Verdict.KEYED]
    report.sealed = counts[Verdict.SEALED]
    report.unchecked = counts[Verdict.UNCHECKED]
    report.gone = counts[Verdict.GONE]
    return report


def _summary(report: Report) -> str:
    lines = [f"note: {printable(remark)}" for remark in report.remarks]
    parts = [f"{report.good} good", f"{len(report.bad)} bad"]
    for number, what in (
        (report.keyed, "not verified: keyed"),
        (report.sealed, "not verified: sealed"),
        (report.unchecked, "without a checksum"),
        (report.gone, "removed meanwhile"),
        (report.quarantined, "in quarantine before"),
        (report.quarantined_now, "put in quarantine"),
        (report.temporary_removed, "temporary files removed"),
    ):
        if number:
            parts.append(f"{number} {what}")
    return "\n".join([*lines, ", ".join(parts)])
