"""Command `kvxfer ls`: lists the namespaces of a store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvxfer import runtime
from kvxfer.cli.block_stores import STORE, open_store
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.text import printable
from kvxfer.units import format_duration, format_size

if TYPE_CHECKING:
    from kvxfer.pages.maintenance import BlockStore, NamespaceUsage

COLUMNS = (
    "NAMESPACE",
    "MODEL",
    "DTYPE",
    "INTEGRITY",
    "BLOCKS",
    "SIZE",
    "OLDEST USE",
    "NEWEST USE",
    "BAD",
)


def main(argv: Sequence[str]) -> int:
    """List the namespaces of a store, or its blocks; return 0."""
    parser = CommandLine(
        prog="kvxfer ls",
        description="List the namespaces of a store, or the keys of its blocks.",
        epilog=exit_statuses("when it is done"),
    )
    parser.add_argument("path", help=STORE)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects")
    form.add_argument(
        "--keys",
        action="store_true",
        help="print a line for each block that is found by lookups: its namespace and its key",
    )
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import measure_usage

    with open_store(arguments.path) as store:
        if arguments.keys:
            _print_keys(store)
            return 0
        usages = measure_usage(store)
    if arguments.json:
        print(msgspec.json.encode(usages).decode())
    else:
        print(_format_table(usages))
    return 0


def _print_keys(store: "BlockStore") -> None:
    """Print a line for each block, namespace by namespace, as a walk through the store finds it."""
    store.require()
    for fingerprint in store.fingerprints():
        for block in store.blocks(fingerprint):
            if not (block.quarantined or block.misplaced):
                print(fingerprint, block.key.hex())


def _format_table(usages: "Sequence[NamespaceUsage]") -> str:
    """Format namespaces as a table, with a total below."""
    now = runtime.wall_time()
    rows = [COLUMNS, *(_row(usage, now) for usage in usages), _total(usages, now)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines
    )


def _row(usage: "NamespaceUsage", now: float) -> tuple[str, ...]:
    known = usage.namespace
    return (
        usage.fingerprint,
        printable(known.model) if known else "?",
        printable(known.dtype) if known else "?",
        ",".join(kind.value for kind in usage.integrity) or "?",
        *_numbers([usage], now),
    )


def _total(usages: "Sequence[NamespaceUsage]", now: float) -> tuple[str, ...]:
    return (f"total: {len(usages)}", "", "", "", *_numbers(usages, now))


def _numbers(usages: "Sequence[NamespaceUsage]", now: float) -> tuple[str, ...]:
    oldest = [usage.oldest_use for usage in usages if usage.oldest_use is not None]
    newest = [usage.newest_use for usage in usages if usage.newest_use is not None]
    return (
        str(sum(usage.num_blocks for usage in usages)),
        format_size(sum(usage.num_bytes for usage in usages)),
        f"{format_duration(now - min(oldest))} ago" if oldest else "-",
        f"{format_duration(now - max(newest))} ago" if newest else "-",
        str(sum(usage.num_quarantined for usage in usages)),
    )
