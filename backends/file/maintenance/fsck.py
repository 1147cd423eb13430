"""Check of every block in a store, for `kvxfer fsck`."""

import enum
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvxfer.backends.file.folders.block_tree import (
    BlockTree,
    FoundBlock,
    refuse_partial_walk,
    require_store,
)
from kvxfer.backends.file.folders.integrity_record import require_secret
from kvxfer.backends.file.folders.ledger import Ledger, recount_store
from kvxfer.backends.file.folders.namespace_file import read_namespace
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.format.digest import Digester
from kvxfer.backends.file.format.header import BlockFileError, BlockHeader, OtherIntegrityError
from kvxfer.backends.file.format.verification import (
    check_data,
    check_header,
    read_data,
    read_header,
)
from kvxfer.storage.integrity import Integrity

NUM_THREADS = 8
"""Files that are read at one time: as many as engines read by default."""

FILES_IN_LINE = 1024
"""Files that wait for a thread: an interrupted check ends when the last of these is read."""


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

    def check(self, folder: NamespaceFolder, block: FoundBlock, *, repair: bool = False) -> Finding:
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


class StoreCheck:
    """Check of every block of every namespace; can quarantine corrupt files; blocks.

    Engines may use the store meanwhile: blocks that they remove are skipped.

    Args:
        root: Root of the store.
        check: Check of one file.

    Attributes:
        found: The blocks to verify; those in quarantine are not among them.
        errors: Errors of folders that could not be opened; `found` lacks their blocks.
        num_quarantined: Files that were in quarantine already.

    Raises:
        OSError: The root cannot be read.
        InvalidArgumentError: The root is not that of a store, or the blocks of a namespace are
            sealed with another secret.
    """

    def __init__(self, root: Path, check: BlockCheck) -> None:
        self.errors: list[OSError] = []
        self._tree = BlockTree(root, on_error=self.errors.append)
        require_store(BlockTree(root))
        self._check = check
        blocks = list(self._tree.blocks())
        self.found = [block for block in blocks if not block.quarantined]
        self.num_quarantined = len(blocks) - len(self.found)
        if check.keyed:
            for fingerprint, some in self._by_fingerprint().items():
                with self._tree.folder(fingerprint) as folder:
                    require_secret(folder, check.keyed, some)

    def verify(self, *, repair: bool = False) -> Iterator[Finding]:
        """Read every block, several at a time.

        Args:
            repair: Put corrupt files in quarantine.

        Yields:
            The finding on each block, namespace by namespace.
        """
        for fingerprint, blocks in self._by_fingerprint().items():
            with self._tree.folder(fingerprint) as folder:
                check = functools.partial(self._check.check, folder, repair=repair)
                yield from _map_in_threads(check, blocks)

    def namespace_problems(self) -> Iterator[str]:
        """Report missing or damaged descriptions of namespaces; no block depends on these."""
        for fingerprint in self._tree.fingerprints():
            try:
                with self._tree.folder(fingerprint) as folder:
                    read_namespace(folder)
            except BlockFileError as exc:
                yield f"{fingerprint}: {exc}"

    def clean_up(self) -> int:
        """Remove temporary files of dead writers and correct the count of bytes.

        Returns:
            Number of files removed.

        Raises:
            OSError: The tree or the count cannot be read; the count is unchanged.
        """
        tree = BlockTree(self._tree.root, on_error=refuse_partial_walk)
        num_removed = tree.collect()
        ledger = Ledger(tree.root)
        try:
            recount_store(tree, ledger)
        finally:
            ledger.close()
        return num_removed

    def _by_fingerprint(self) -> dict[str, list[FoundBlock]]:
        by_fingerprint: dict[str, list[FoundBlock]] = defaultdict(list)
        for block in self.found:
            by_fingerprint[block.fingerprint].append(block)
        return by_fingerprint


def _map_in_threads(
    check: Callable[[FoundBlock], Finding], blocks: Sequence[FoundBlock]
) -> Iterator[Finding]:
    executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvxfer-fsck")
    try:
        for start in range(0, len(blocks), FILES_IN_LINE):
            yield from executor.map(check, blocks[start : start + FILES_IN_LINE])
    finally:
        executor.shutdown(cancel_futures=True)
