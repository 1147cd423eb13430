"""Command `kvxfer gc`: removes stale files and old blocks from a file store."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.cli.exit_statuses import exit_statuses
from kvxfer.units import ByteSize, Duration, format_size

if TYPE_CHECKING:
    from kvxfer.backends.file.maintenance import RemovedCounts


def main(argv: Sequence[str]) -> int:
    """Remove stale files and old blocks from a store; return 0."""
    parser = argparse.ArgumentParser(
        prog="kvxfer gc",
        description="Remove temporary files of dead writers, files in quarantine, namespaces "
        "without blocks, and blocks beyond the given bounds.",
        epilog=exit_statuses("when it is done"),
    )
    parser.add_argument("path", type=Path, help="root of the store")
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

    from kvxfer.backends.file import BlockTree, refuse_partial_walk
    from kvxfer.backends.file.maintenance import GarbageCollection

    collection = GarbageCollection(
        BlockTree(arguments.path, on_error=refuse_partial_walk),
        capacity_bytes=ByteSize.parse(arguments.capacity) if arguments.capacity else None,
        max_age_s=Duration.parse(arguments.max_age) if arguments.max_age else None,
    )
    if arguments.dry_run:
        print(_describe(collection.preview(), "would be "))
    else:
        print(_describe(collection.run()))
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
