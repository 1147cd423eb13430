"""Check of one block file against its name, its folder, its seal and its checksum."""

import enum
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvxfer.backends.file.digest import Digester
from kvxfer.backends.file.folder import BlockFolder
from kvxfer.backends.file.header import (
    LENGTH_BYTES,
    BlockFileError,
    BlockHeader,
    OtherIntegrityError,
    header_size_in,
)
from kvxfer.backends.file.tree import FoundBlock
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey

READ_BYTES = 1 << 20


class Verdict(enum.Enum):
    """Verdict on a block file.

    `GOOD`: every byte is what was stored. `KEYED`: nothing is wrong that shows without the secret.
    `UNCHECKED`: nothing is wrong with the header, and no checksum of the data was stored.
    `CORRUPT`: a lookup must not find it. `OTHER`: it was stored with another integrity, and engines
    with that integrity read it. `UNREADABLE`: the operating system cannot read it. `GONE`: it was
    removed meanwhile.
    """

    GOOD = "good"
    KEYED = "not verified: keyed"
    UNCHECKED = "no checksum"
    CORRUPT = "corrupt"
    OTHER = "of another integrity"
    UNREADABLE = "unreadable"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict on one file, and its reason.

    Attributes:
        block: The file.
        verdict: The verdict.
        reason: Why the file is bad, empty when it is not.
        quarantined: Whether the file was put in quarantine.
    """

    block: FoundBlock
    verdict: Verdict
    reason: str = ""
    quarantined: bool = False

    @property
    def bad(self) -> bool:
        """Whether something is wrong."""
        return self.verdict in (Verdict.CORRUPT, Verdict.OTHER, Verdict.UNREADABLE)


class BlockCheck:
    """Check of single files, of which only the place is known; blocks; thread-safe.

    Args:
        secret: The secret of `integrity=keyed`. With one, every file must be sealed by it.
            Without, nobody can tell whether a keyed file is whole.

    Attributes:
        keyed: Makes seals with the secret; None without.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.keyed = Digester(Integrity.KEYED, secret) if secret is not None else None

    def digester(self, integrity: Integrity) -> Digester:
        """Choose the digester for a file that was sealed with `integrity`."""
        if self.keyed:
            return self.keyed
        return Digester(Integrity.OFF if integrity is Integrity.KEYED else integrity)

    def check(self, folder: BlockFolder, block: FoundBlock, *, repair: bool = False) -> Finding:
        """Read a whole file and compare it with its name, its folder, its seal and its checksum.

        Args:
            folder: Folder of the block's namespace.
            block: The block.
            repair: Put the file in quarantine when it is corrupt.

        Raises:
            OSError: The file cannot be put in quarantine.
        """
        try:
            fd = folder.open_found(block.key, block.folder)
        except FileNotFoundError:
            return Finding(block, Verdict.GONE)
        except OSError as exc:
            return Finding(block, Verdict.UNREADABLE, exc.strerror or str(exc))
        try:
            return Finding(block, self._verify(fd, block))
        except OtherIntegrityError as exc:
            return Finding(block, Verdict.OTHER, str(exc))
        except BlockFileError as exc:
            quarantined = repair and folder.quarantine(block.key, fd, found_in=block.folder)
            return Finding(block, Verdict.CORRUPT, str(exc), quarantined)
        except OSError as exc:
            return Finding(block, Verdict.UNREADABLE, exc.strerror or str(exc))
        finally:
            os.close(fd)

    def _verify(self, fd: int, block: FoundBlock) -> Verdict:
        if block.misplaced:
            raise BlockFileError(f"lookups do not find it in the folder {block.folder!r}")
        # Verify the bytes on the disk, not those in the page cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        head, num_bytes = read_header(fd)
        said = BlockHeader.decode(head)
        digester = self.digester(said.integrity)
        header = check_header(
            head, digester, namespace=block.fingerprint, key=block.key, num_bytes=num_bytes
        )
        check_data(header, digester, read_data(fd, len(head)))
        if digester.integrity is not Integrity.OFF:
            return Verdict.GOOD
        return Verdict.KEYED if header.integrity is Integrity.KEYED else Verdict.UNCHECKED


def check_header(
    head: bytes, digester: Digester, *, namespace: str, key: BlockKey, num_bytes: int
) -> BlockHeader:
    """Read a header and compare it with its seal and with where it was found.

    Args:
        head: The header.
        digester: Makes the seal.
        namespace: Fingerprint in the name of the folder.
        key: Key in the name of the file.
        num_bytes: Bytes of the file that follow the header.

    Raises:
        OtherIntegrityError: The block was stored with another integrity.
        BlockFileError: The header changed, or it is another block's.
    """
    header = BlockHeader.verify(head, digester)
    for name, said, expected in (
        ("namespace", header.namespace, namespace),
        ("key", header.key.hex(), key.hex()),
        ("bytes", header.num_bytes, num_bytes),
    ):
        if said != expected:
            raise BlockFileError(f"{name}: the file says {said}, expected {expected}")
    return header


def check_data(header: BlockHeader, digester: Digester, data: Iterable[memoryview]) -> None:
    """Compare the data of a file with its checksum; do nothing when integrity is off.

    Raises:
        BlockFileError: A byte changed.
    """
    if digester.integrity is not Integrity.OFF:
        found = digester.checksum(data)
        if found != header.checksum:
            raise BlockFileError(f"checksum of the data is {found}, stored {header.checksum}")


def read_header(fd: int) -> tuple[bytes, int]:
    """Read the header of an open file, and how many bytes follow it.

    Raises:
        BlockFileError: The file cannot be a block file.
        OSError: The file cannot be read.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BlockFileError("not a block file: not a regular file")
    size = header_size_in(os.pread(fd, LENGTH_BYTES, 0))
    if found.st_size <= size:
        raise BlockFileError(f"not a block file: {found.st_size} bytes are too few")
    return os.pread(fd, size, 0), found.st_size - size


def read_extent(fd: int) -> tuple[int, int]:
    """Read from an open file's header which bytes of its chunk it has: start and stop.

    `(0, 0)`, no bytes, when it is not a block file or was cut off.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        head, num_bytes = read_header(fd)
        header = BlockHeader.decode(head)
    except BlockFileError:
        return 0, 0
    return (header.start, header.stop) if header.num_bytes == num_bytes else (0, 0)


def read_data(fd: int, offset: int) -> Iterator[memoryview]:
    """Read the data after the header, piece by piece; a piece is valid until the next."""
    memory = memoryview(bytearray(READ_BYTES))
    while num_read := os.preadv(fd, [memory], offset):
        yield memory[:num_read]
        offset += num_read
