"""Inspection of one block file, in a store or outside, for `kvxfer inspect`."""

import contextlib
from dataclasses import dataclass

from kvxfer.pages.header import BlockFileError, BlockHeader, OtherIntegrityError
from kvxfer.pages.maintenance.block_store import BlockStore
from kvxfer.pages.maintenance.fsck import BlockCheck
from kvxfer.pages.names import SUFFIX, is_fingerprint
from kvxfer.pages.texts import read_namespace
from kvxfer.pages.verification import check_data
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace


@dataclass(frozen=True, slots=True)
class Inspection:
    """Header of a block file, and whether the seal and the checksum hold.

    Attributes:
        num_bytes: Size of the data in the file.
        seal_error: Why the seal does not hold; empty if it does.
        checksum_error: Why the checksum does not hold; empty if it does.
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


def inspect_file(store: BlockStore, path: str, check: BlockCheck) -> Inspection:
    """Inspect a file, of whose header at most `MAX_HEADER_BYTES` are read; no link is followed.

    `path` begins below the root of `store`, which may be just the folder of the file.

    Raises:
        BlockFileError: It is not a block file.
        OSError: It cannot be read.
    """
    with store.open_path(path) as opened:
        head, num_bytes = opened.read_header()
        header = BlockHeader.decode(head)
        digester = check.digester(header.integrity)
        seal_error = checksum_error = ""
        is_summed = digester.integrity is not Integrity.OFF
        try:
            BlockHeader.verify(head, digester)
            check.require_secret_for(header, Integrity.KEYED)
        except BlockFileError as exc:
            seal_error = str(exc)
        try:
            _require_size(header, num_bytes)
            check_data(header, digester, opened.read_data(len(head)))
        except OtherIntegrityError:
            is_summed = False
        except BlockFileError as exc:
            checksum_error = str(exc)
    return Inspection(
        header=header,
        num_bytes=num_bytes,
        seal_error=seal_error,
        checksum_error=checksum_error,
        is_sealed=is_summed or header.integrity is not Integrity.KEYED,
        is_summed=is_summed,
        is_named=path.rpartition("/")[2] == header.key.hex() + SUFFIX,
        namespace=_read_namespace(store, path),
    )


def split_path(path: str) -> tuple[str, str]:
    """Split the path of a block file into the path of its store and the rest.

    The store of a file outside of any namespace's folder is the folder that contains the file.
    """
    parts = path.split("/")
    start = -3 if len(parts) > 2 and is_fingerprint(parts[-3]) else -1
    return "/".join(parts[:start]), "/".join(parts[start:])


def _require_size(header: BlockHeader, num_bytes: int) -> None:
    if num_bytes != header.num_bytes:
        raise BlockFileError(f"there are {num_bytes} bytes of data, expected {header.num_bytes}")


def _read_namespace(store: BlockStore, path: str) -> Namespace | None:
    """Read the description of the namespace, two folders above a block file."""
    fingerprint, *rest = path.split("/")
    if rest:
        with contextlib.suppress(BlockFileError, OSError), store.namespace(fingerprint) as stored:
            return read_namespace(stored)
    return None
