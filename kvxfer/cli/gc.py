"""Command `kvxfer gc`: removes stale files and old blocks from a store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer.cli.block_stores import STORE, open_store
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.cli.service import stopping_between_steps
from kvxfer.units import ByteSize, Duration, format_size

if TYPE_CHECKING:
    from kvxfer.pages.maintenance import RemovedCounts


def main(argv: Sequence[str]) -> int:
    """Remove stale files and old blocks from a store; return 0."""
    parser = CommandLine(
        prog="kvxfer gc",
        description="Remove temporary files of dead writers, files in quarantine, namespaces "
        "without blocks, and blocks beyond the given bounds.",
        epilog=exit_statuses("when it is done"),
    )
    parser.add_argument("path", help=STORE)
    parser.add_argument(
        "--capacity", metavar="SIZE", help="evict old blocks down to this size, such as 20GiB"
    )
    parser.add_argument(
        "--max-age", metavar="AGE", help="remove blocks that were unused for longer, such as 30d"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, only print what would be removed"
    )
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import GarbageCollection

    capacity_bytes = max_age_s = None
    if arguments.capacity:
        capacity_bytes = ByteSize.parse(arguments.capacity, name="capacity")
    if arguments.max_age:
        max_age_s = Duration.parse(arguments.max_age, name="max-age")
    with open_store(arguments.path) as store, stopping_between_steps() as check:
        collection = GarbageCollection(
            store, capacity_bytes=capacity_bytes, max_age_s=max_age_s, check=check
        )
        removed = collection.preview() if arguments.dry_run else collection.run()
    print(_describe(removed, "would be " if arguments.dry_run else ""))
    return 0


def _describe(removed: "RemovedCounts", mood: str = "") -> str:
    numbers = (
        (removed.num_temporary, "temporary"),
        (removed.num_quarantined, "in quarantine"),
        (removed.num_old, "unused for too long"),
        (removed.num_excess, "beyond the capacity"),
        (removed.num_folders, "namespaces without blocks"),
    )
    said = ", ".join(f"{number} {what}" for number, what in numbers if number)
    freed, left = format_size(removed.num_bytes), format_size(removed.num_bytes_left)
    return f"{mood}removed: {said or 'nothing'}; {freed} {mood}freed, {left} {mood}left"
