"""Inspection of one block file, in a store or outside, for `kvxfer inspect`."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvxfer.backends.file.folders.names import SUFFIX, is_fingerprint
from kvxfer.backends.file.folders.namespace_file import read_namespace
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.format.header import BlockFileError, BlockHeader
from kvxfer.backends.file.format.verification import check_data, read_data, read_header
from kvxfer.backends.file.io.file_io import READ_FLAGS
from kvxfer.backends.file.maintenance.fsck import BlockCheck
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace


@dataclass(frozen=True, slots=True)
class Inspection:
    """Header of a block file, and whether the seal and the checksum hold.

    Attributes:
        header: The header.
        num_bytes: Size of the data in the file.
        seal_error: Why the seal does not hold, empty when it does.
        checksum_error: Why the checksum does not hold, empty when it does.
        is_sealed: Whether the seal could be checked.
        is_summed: Whether the checksum could be checked.
        is_named: Whether the file has the name of its key.
        namespace: Namespace from the `namespace.json` two folders above; None without one.
    """

    header: BlockHeader
    num_bytes: int
    seal_error: str
    checksum_error: str
    is_sealed: bool
    is_summed: bool
    is_named: bool
    namespace: Namespace | None

    @property
    def bad(self) -> bool:
        """Whether the seal or the checksum is wrong."""
        return bool(self.seal_error or self.checksum_error)


def inspect_file(path: Path, check: BlockCheck) -> Inspection:
    """Read a file, of its header no more than `MAX_HEADER_BYTES`; a link is not followed.

    Raises:
        BlockFileError: It is not a block file.
        OSError: It cannot be read.
    """
    fd = os.open(path, READ_FLAGS)
    try:
        head, num_bytes = read_header(fd)
        header = BlockHeader.decode(head)
        digester = check.digester(header.integrity)
        seal_error = checksum_error = ""
        try:
            BlockHeader.verify(head, digester)
        except BlockFileError as exc:
            seal_error = str(exc)
        try:
            _require_size(header, num_bytes)
            check_data(header, digester, read_data(fd, len(head)))
        except BlockFileError as exc:
            checksum_error = str(exc)
    finally:
        os.close(fd)
    is_summed = digester.integrity is not Integrity.OFF
    return Inspection(
        header=header,
        num_bytes=num_bytes,
        seal_error=seal_error,
        checksum_error=checksum_error,
        is_sealed=is_summed or header.integrity is not Integrity.KEYED,
        is_summed=is_summed,
        is_named=path.name == header.key.hex() + SUFFIX,
        namespace=_read_namespace(path),
    )


def _require_size(header: BlockHeader, num_bytes: int) -> None:
    if num_bytes != header.num_bytes:
        raise BlockFileError(f"there are {num_bytes} bytes of data, expected {header.num_bytes}")


def _read_namespace(path: Path) -> Namespace | None:
    """Read the description of the namespace, two folders above a block file."""
    folders = path.absolute().parents
    if len(folders) > 2 and is_fingerprint(folders[1].name):
        with (
            contextlib.suppress(BlockFileError, OSError),
            NamespaceFolder(folders[2], folders[1].name) as folder,
        ):
            return read_namespace(folder)
    return None
