"""Check of every block in a store, for `kvxfer fsck`."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvxfer.backends.file.census import recount_store
from kvxfer.backends.file.check import BlockCheck, Finding
from kvxfer.backends.file.header import BlockFileError
from kvxfer.backends.file.integrity_record import require_secret
from kvxfer.backends.file.ledger import Ledger
from kvxfer.backends.file.namespace_file import read_namespace
from kvxfer.backends.file.root import require_store
from kvxfer.backends.file.space import refuse_partial_walk
from kvxfer.backends.file.tree import BlockTree, FoundBlock

NUM_THREADS = 8
FILES_IN_LINE = 1024


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
