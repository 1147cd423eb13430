"""Command `kvxfer inspect`: shows the header and the integrity of one block file."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvxfer.cli.block_stores import open_file
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.text import printable
from kvxfer.units import format_size

if TYPE_CHECKING:
    from kvxfer.pages.maintenance import Inspection
    from kvxfer.storage.keys import Namespace


def main(argv: Sequence[str]) -> int:
    """Show the content of a block file.

    Returns:
        1 when it is not a block file, or a seal or a checksum does not hold; 0 otherwise.
    """
    parser = CommandLine(
        prog="kvxfer inspect",
        description="Show the content of a block file, and whether it is intact.",
        epilog=exit_statuses(
            "when it is intact", "when it is no block file, or its seal or checksum does not hold"
        ),
    )
    parser.add_argument("file", help="block file, or the URL of an object in a bucket")
    parser.add_argument("--secret-file", default="", help="secret that the block is sealed with")
    parser.add_argument("--tenant", default="", help="whose block it is, with integrity=sealed")
    arguments = parser.parse_args(argv)

    from kvxfer.pages.header import BlockFileError
    from kvxfer.pages.maintenance import BlockCheck, inspect_file
    from kvxfer.storage.integrity import read_secret

    check = BlockCheck(read_secret(arguments.secret_file), arguments.tenant)
    try:
        with open_file(arguments.file) as (store, path):
            found = inspect_file(store, path, check)
    except BlockFileError as exc:
        sys.stderr.write(f"kvxfer inspect: {printable(f'{arguments.file}: {exc}')}\n")
        return 1
    for name, value in _lines(found):
        print(f"{name:<14}{printable(value)}")
    return 1 if found.bad else 0


def _lines(found: "Inspection") -> Iterator[tuple[str, str]]:
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
        yield from _describe(found.namespace)


def _verdict(found: "Inspection", error: str, *, is_checked: bool) -> str:
    if error:
        return f"does not hold: {error}"
    kind = found.header.integrity.value
    return "holds" if is_checked else f"not verified: {kind}, see --secret-file and --tenant"


def _describe(namespace: "Namespace") -> Iterator[tuple[str, str]]:
    yield "model", namespace.model
    for name in ("revision", "dtype", "quantization", "layout", "instruction_set"):
        value: str = getattr(namespace, name)
        if value:
            yield name.replace("_", " "), value
    yield "groups", str(len(namespace.groups))
    yield "chunk", f"{namespace.blocks_per_chunk} blocks"
    if namespace.parallel:
        yield "parallel", ", ".join(f"{name}={n}" for name, n in namespace.parallel.items())
