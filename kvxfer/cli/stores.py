"""Commands that maintain a store of block files: `kvxfer ls`, `fsck`, `inspect` and `gc`.

A store is a folder, or a bucket that a URL names.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvxfer import runtime
from kvxfer.cli.command_line import CommandLine, exit_statuses, show
from kvxfer.cli.service import stopping_between_steps
from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import shown
from kvxfer.text import align, printable
from kvxfer.units import ByteSize, Duration, format_duration, format_size

if TYPE_CHECKING:
    import argparse

    from kvxfer.pages.maintenance import (
        BlockCheck,
        BlockStore,
        Inspection,
        NamespaceUsage,
        RemovedCounts,
        StoreCheck,
    )
    from kvxfer.storage.keys import Namespace

STORE = "root of the store: a folder, or a bucket such as s3://bucket/prefix?endpoint=URL"
COLUMNS = (
    *("NAMESPACE", "MODEL", "DTYPE", "INTEGRITY"),
    *("BLOCKS", "SIZE", "OLDEST USE", "NEWEST USE", "BAD"),
)


def ls(argv: Sequence[str]) -> int:
    """List the namespaces of a store, or its blocks; return 0."""
    parser = CommandLine(
        prog="kvxfer ls",
        description="List the namespaces of a store, or the keys of its blocks.",
        epilog=exit_statuses("when it is done"),
    )
    parser.add_argument("path", help=STORE)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects")
    keys = "print a line for each block that lookups find: its namespace and its key"
    form.add_argument("--keys", action="store_true", help=keys)
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import measure_usage

    with _open_store(arguments.path) as (store, _):
        if not arguments.keys:
            show(measure_usage(store), _format_table, as_json=arguments.json)
        else:
            store.require()
            for fingerprint in store.fingerprints():
                for block in store.blocks(fingerprint):  # printed as they are found
                    if not (block.quarantined or block.misplaced):
                        print(fingerprint, block.key.hex())
        if store.num_skipped:
            text = f"files and folders that cannot be read: {store.num_skipped}; see kvxfer fsck"
            sys.stderr.write(f"kvxfer ls: {text}\n")
    return 0


def _format_table(usages: "Sequence[NamespaceUsage]") -> str:
    """Format namespaces as a table, with a total below."""
    now = runtime.wall_time()
    total = (f"total: {len(usages)}", "", "", "", *_numbers(usages, now))
    return "\n".join(align([COLUMNS, *(_row(usage, now) for usage in usages), total]))


def _row(usage: "NamespaceUsage", now: float) -> tuple[str, ...]:
    known = usage.namespace
    return (
        usage.fingerprint,
        printable(known.model) if known else "?",
        printable(known.dtype) if known else "?",
        ",".join(kind.value for kind in usage.integrity) or "?",
        *_numbers([usage], now),
    )


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


class Problem(msgspec.Struct, frozen=True):
    """Bad file of a store: its path below the root, and the reason."""

    path: str
    reason: str


class Report(msgspec.Struct, kw_only=True):
    """Result of a check, in numbers of files; `quarantined_now` are among the `bad` ones."""

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


def fsck(argv: Sequence[str]) -> int:
    """Verify every block of a store; return 1 if a file is bad, even if it was repaired, else 0."""
    parser = CommandLine(
        prog="kvxfer fsck",
        description="Verify every block of a store.",
        epilog=exit_statuses("when no file is bad", "when one is, even if repaired"),
    )
    parser.add_argument("path", help=STORE)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="put bad files in quarantine, remove temporary files, recount the bytes",
    )
    _add_secret(parser)
    parser.add_argument("--json", action="store_true", help="print an object")
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import StoreCheck

    check = _block_check(arguments)
    with _open_store(arguments.path) as (store, _):
        checked = StoreCheck(store, check)
        report = _verify(checked, repair=arguments.repair, quiet=arguments.json)
        try:
            if arguments.repair:
                report.temporary_removed = checked.clean_up()
        finally:  # a full disk may stop the repair
            show(report, _summary, as_json=arguments.json)
    return 1 if report.bad else 0


def _verify(check: "StoreCheck", *, repair: bool, quiet: bool) -> Report:
    from tqdm import tqdm

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
    for name in ("good", "keyed", "sealed", "unchecked", "gone"):
        setattr(report, name, counts[Verdict[name.upper()]])
    return report


def _summary(report: Report) -> str:
    lines = [f"note: {printable(remark)}" for remark in report.remarks]
    numbers = (
        (report.keyed, "not verified: keyed"),
        (report.sealed, "not verified: sealed"),
        (report.unchecked, "without a checksum"),
        (report.gone, "removed meanwhile"),
        (report.quarantined, "in quarantine before"),
        (report.quarantined_now, "put in quarantine"),
        (report.temporary_removed, "temporary files removed"),
    )
    checked = f"{report.good} good", f"{len(report.bad)} bad", *_nonzero(numbers)
    return "\n".join([*lines, ", ".join(checked)])


def inspect(argv: Sequence[str]) -> int:
    """Show the content of a block file; return 1 if it is no block file or not intact, else 0."""
    parser = CommandLine(
        prog="kvxfer inspect",
        description="Show the content of a block file, and whether it is intact.",
        epilog=exit_statuses(
            "when it is intact", "when it is not a block file, or its seal or checksum is wrong"
        ),
    )
    parser.add_argument("file", help="block file, or the URL of an object in a bucket")
    _add_secret(parser)
    arguments = parser.parse_args(argv)

    from kvxfer.pages.header import BlockFileError
    from kvxfer.pages.maintenance import inspect_file, split_path

    check = _block_check(arguments)
    try:
        with _open_store(arguments.file, split_path) as (store, path):
            found = inspect_file(store, path, check)
    except BlockFileError as exc:
        sys.stderr.write(f"kvxfer inspect: {printable(f'{arguments.file}: {exc}')}\n")
        return 1
    for name, value in _inspection_lines(found):
        print(f"{name:<14}{printable(value)}")
    return 1 if found.bad else 0


def _inspection_lines(found: "Inspection") -> Iterator[tuple[str, str]]:
    from kvxfer.storage.keys import GROUP_INDEX_BYTES, group_of

    header = found.header
    key, size = header.key.hex(), header.data_offset + found.num_bytes
    if len(header.key) > GROUP_INDEX_BYTES:
        key += f" (group {group_of(header.key)})"
    yield "namespace", header.namespace
    yield "key", key if found.is_named else f"{key}, which is not the name of the file"
    for tensor in header.tensors:
        yield "tensor", f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}"
    yield "in the chunk", f"bytes {header.start} to {header.stop}"
    yield "data offset", str(header.data_offset)
    yield "file size", f"{size} ({format_size(size)})"
    yield "integrity", header.integrity.value
    yield "seal", _verdict(found, found.seal_error, is_checked=found.is_sealed)
    if not header.checksum and not found.checksum_error:
        yield "checksum", "none"
    else:
        verdict = _verdict(found, found.checksum_error, is_checked=found.is_summed)
        yield "checksum", f"{header.checksum} {verdict}".lstrip()
    if found.namespace:
        yield from _namespace_lines(found.namespace)


def _verdict(found: "Inspection", error: str, *, is_checked: bool) -> str:
    if error:
        return f"does not hold: {error}"
    kind = found.header.integrity.value
    return "holds" if is_checked else f"not verified: {kind}, see --secret-file and --tenant"


def _namespace_lines(namespace: "Namespace") -> Iterator[tuple[str, str]]:
    yield "model", namespace.model
    for name in ("revision", "dtype", "quantization", "layout", "instruction_set"):
        value: str = getattr(namespace, name)
        if value:
            yield name.replace("_", " "), value
    yield "groups", str(len(namespace.groups))
    yield "chunk", f"{namespace.blocks_per_chunk} blocks"
    if namespace.parallel:
        yield "parallel", ", ".join(f"{name}={n}" for name, n in namespace.parallel.items())


def gc(argv: Sequence[str]) -> int:
    """Remove stale files and old blocks from a store; return 0."""
    parser = CommandLine(
        prog="kvxfer gc",
        description="Remove temporary files of dead writers, files in quarantine, namespaces "
        "without blocks, and blocks beyond the given bounds.",
        epilog=exit_statuses("when it is done"),
    )
    add = parser.add_argument
    add("path", help=STORE)
    add("--capacity", metavar="SIZE", help="evict old blocks down to this size, such as 20GiB")
    add("--max-age", metavar="AGE", help="remove blocks that were unused for longer, such as 30d")
    add("--dry-run", action="store_true", help="remove nothing, print what would be removed")
    arguments = parser.parse_args(argv)

    from kvxfer.pages.maintenance import GarbageCollection

    size, age = arguments.capacity, arguments.max_age
    capacity_bytes = None if size is None else ByteSize.parse(size, name="capacity")
    max_age_s = None if age is None else Duration.parse(age, name="max-age")
    with _open_store(arguments.path) as (store, _), stopping_between_steps() as check:
        collection = GarbageCollection(
            store, capacity_bytes=capacity_bytes, max_age_s=max_age_s, check=check
        )
        removed = collection.preview() if arguments.dry_run else collection.run()
    print(_removed_line(removed, "would be " if arguments.dry_run else ""))
    return 0


def _removed_line(removed: "RemovedCounts", mood: str = "") -> str:
    numbers = (
        (removed.num_temporary, "temporary"),
        (removed.num_quarantined, "in quarantine"),
        (removed.num_old, "unused for too long"),
        (removed.num_excess, "beyond the capacity"),
        (removed.num_folders, "namespaces without blocks"),
    )
    said = ", ".join(_nonzero(numbers))
    freed, left = format_size(removed.num_bytes), format_size(removed.num_bytes_left)
    return f"{mood}removed: {said or 'nothing'}; {freed} {mood}freed, {left} {mood}left"


def _nonzero(numbers: Iterable[tuple[int, str]]) -> Iterator[str]:
    return (f"{number} {what}" for number, what in numbers if number)


def _add_secret(parser: CommandLine) -> None:
    parser.add_argument("--secret-file", default="", help="file with the secret that seals blocks")
    parser.add_argument("--tenant", default="", help="tenant of sealed blocks")


def _block_check(arguments: "argparse.Namespace") -> "BlockCheck":
    from kvxfer.pages.maintenance import BlockCheck
    from kvxfer.storage.integrity import read_secret

    return BlockCheck(read_secret(arguments.secret_file), arguments.tenant)


@contextlib.contextmanager
def _open_store(
    argument: str, split: Callable[[str], tuple[str, str]] | None = None
) -> "Iterator[tuple[BlockStore, str]]":
    """Open a store, or with `split` that of a block file; also yield the file's path below it."""
    kind, is_url, _ = argument.partition("://")
    if not argument or (is_url and kind.lower() not in ("s3", "gs", "az")):
        place = "file" if split else "folder"
        raise InvalidArgumentError("path", shown(argument), f"a {place}, or s3://, gs:// or az://")
    if not is_url:
        from kvxfer.backends.file.folder_store import FolderStore

        root, path = split(str(Path(argument).absolute())) if split else (argument, "")
        yield FolderStore(Path(root or "/")), path
        return
    from kvxfer.backends.object import BucketStore, ObjectConfig
    from kvxfer.connect import parse_backend

    _, config = parse_backend(argument)
    assert isinstance(config, ObjectConfig)
    root, path = split(config.path) if split else (config.path, "")
    with contextlib.closing(BucketStore(msgspec.structs.replace(config, path=root))) as store:
        yield store, path
