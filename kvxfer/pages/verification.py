"""Check of one block file against its name, its folder, its seal and its checksum."""

import stat
from collections.abc import Callable, Iterable, Iterator

from kvxfer import runtime
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import (
    LENGTH_BYTES,
    BlockFileError,
    BlockHeader,
    OtherIntegrityError,
    header_size_in,
)
from kvxfer.pages.page_cipher import key_id_in
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey

READ_BYTES = 1 << 20
"""Bytes read and hashed at a time, all the memory that verifying a file of any size takes."""


def check_header(
    head: bytes, digester: Digester, *, namespace: str, key: BlockKey, num_bytes: int
) -> BlockHeader:
    """Decode a header, and check its seal, and its namespace, key and size of data."""
    header = BlockHeader.verify(head, digester)
    for name, said, expected in (
        ("namespace", header.namespace, namespace),
        ("key", header.key.hex(), key.hex()),
        ("bytes", header.num_bytes, num_bytes),
    ):
        if said != expected:
            raise BlockFileError(f"{name}: the file says {said}, expected {expected}")
    return header


def require_readable(header: BlockHeader, digester: Digester) -> None:
    """Check that a digester reads blocks of a header's integrity and, if sealed, has their key.

    Raises:
        OtherIntegrityError: Only engines with another integrity, or another key, read the block.
    """
    said, ours = header.integrity, digester.integrity
    if not ours.reads(said):
        raise OtherIntegrityError(said, ours)
    if digester.cipher is not None:
        key_id = key_id_in(header.checksum)
        if not digester.cipher.knows(header.namespace, key_id):
            raise OtherIntegrityError(said, ours, key_id=key_id)


def check_data(
    header: BlockHeader,
    digester: Digester,
    data: Iterable[memoryview],
    into: memoryview | None = None,
) -> None:
    """Compare the data of a file, in pieces, with the checksum in its verified header.

    Reads no data if integrity is off. Sealed data is decrypted in place, or `into` other memory.

    Raises:
        OtherIntegrityError: See `require_readable`.
        BlockFileError: A byte changed.
    """
    require_readable(header, digester)
    if digester.cipher is not None:
        bound = header.frame(digester).bound(header.key)
        sealed = header.namespace, header.key, bound, header.checksum
        if not digester.cipher.decrypt(*sealed, data, into):
            raise BlockFileError("the data does not match its tag")
    elif digester.integrity is not Integrity.OFF:
        found = digester.checksum(data)
        if found != header.checksum:
            raise BlockFileError(f"checksum of the data is {found}, stored {header.checksum}")


def read_header(fd: int) -> tuple[bytes, int]:
    """Read the header of an open file, and count the bytes after it; errors as `cut_header`."""
    found = runtime.disk().fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BlockFileError("not a block file: not a regular file")
    return cut_header(found.st_size, lambda stop: b"".join(map(bytes, read_data(fd, 0, stop))))


def cut_header(file_size_bytes: int, read: Callable[[int], bytes]) -> tuple[bytes, int]:
    """Read the header with `read`, which returns leading bytes; count the bytes that follow it.

    A `BlockFileError` if the file cannot be a block file.
    """
    size = header_size_in(read(LENGTH_BYTES))
    if file_size_bytes <= size:
        raise BlockFileError(f"not a block file: {file_size_bytes} bytes are too few")
    return read(size), file_size_bytes - size


def read_data(fd: int, offset: int, stop: int = 1 << 62) -> Iterator[memoryview]:
    """Read the bytes from `offset` to `stop`, piece by piece; a piece is valid until the next."""
    memory, disk = memoryview(bytearray(min(READ_BYTES, stop - offset))), runtime.disk()
    while offset < stop and (num_read := disk.preadv(fd, [memory[: stop - offset]], offset)):
        yield memory[:num_read]
        offset += num_read
