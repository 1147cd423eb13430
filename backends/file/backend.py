"""File backend: blocks in files, verified, bounded, shared between processes."""

import asyncio
import contextlib
import errno
import logging
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvxfer import runtime
from kvxfer.backends.file.block_files import BlockFiles
from kvxfer.backends.file.block_reader import BlockReader
from kvxfer.backends.file.block_writer import BUSY, BlockWriter
from kvxfer.backends.file.config import FileConfig, require_room, require_root
from kvxfer.backends.file.folder_store import FolderStore
from kvxfer.backends.file.folders.block_tree import (
    BlockTree,
    refuse_partial_walk,
    warn_of_other_writers,
)
from kvxfer.backends.file.folders.integrity_record import IntegrityRecord
from kvxfer.backends.file.folders.ledger import Ledger
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.folders.open_folders import make_root
from kvxfer.backends.file.io.selection import open_engine, probe_direct
from kvxfer.backends.file.space import Space
from kvxfer.backends.file.store_batch import StoreBatch, medium_failure
from kvxfer.checks import require_instance
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, NamespaceMismatchError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import MAX_DETAIL_CHARS
from kvxfer.pages.maintenance import GarbageCollection
from kvxfer.pages.names import NAMESPACE_FILE, file_name
from kvxfer.pages.texts import describe_namespace
from kvxfer.runtime import CircuitBreaker, Threads, wait_despite_cancel
from kvxfer.storage.backend import DONE, PAUSED, Backend, Outcome
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.integrity import read_secret
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Gauge, Removal, Reports
from kvxfer.text import printable

STALLED_S = 30.0
"""How long a write may take before it counts as a failure of the disk."""

ROOM_BYTES = 1 << 20
"""Bytes of blocks to remove if the disk is too full to open the store."""

MIN_OPEN_FILES = 320
"""Open files that a process needs: 259 folders of a namespace stay open, and there are others."""

BUSY_ATTEMPTS = 50
BUSY_PAUSE_S = 0.02
"""Attempts, and the pause between them, to find a block that another process is storing: a second
in all, after which computing the block again is faster. Every tenth attempt also tries to store
our block, because the other process may have failed, or its block may be gone."""

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class FileBackend(Backend):
    """Backend that keeps blocks in files below a folder, and evicts those beyond its capacity.

    Lookups ask the disk, not memory: a block that another process stored is found, and one that
    another process evicted is a miss.

    Args:
        config: See `FileConfig`.
        namespace: Namespace of the blocks, which determines their sizes. It gets a folder of its
            own below the root.

    Raises:
        InvalidArgumentError: The namespace has no groups, not one block fits, a parameter is out of
            range, or the blocks in the folder are sealed with another secret.
        BackendUnavailableError: The root cannot be created or written to.
    """

    config_type = FileConfig

    def __init__(self, config: FileConfig, namespace: Namespace) -> None:
        self._guard = CallGuard("file backend", namespace)
        largest = require_room(config, namespace)
        digester = Digester(config.integrity, read_secret(config.secret_file), config.tenant)
        self._root = require_root(config)
        self._tree = BlockTree(self._root, on_error=refuse_partial_walk)
        self._files = self._open(config, namespace, digester)
        self._space = Space(
            self._tree,
            self._folder,
            self._ledger,
            config,
            num_slots=max(1, config.capacity // largest),
        )
        self._reader = BlockReader(self._files, self._space)
        self._writer = BlockWriter(self._files, self._ledger, config.durability)
        self._breaker = CircuitBreaker(f"storing to {self._root}")
        max_threads = self._files.file_io.max_threads
        self._num_readers = min(config.read_threads, max_threads)
        self._num_writers = min(config.write_threads, max_threads)
        self._readers = Threads("kvxfer-file-read", self._num_readers)
        self._writers = Threads("kvxfer-file-write", self._num_writers)
        self._lookups = Threads("kvxfer-file-lookup", 1)
        self._removers = Threads("kvxfer-file-remove", 1)
        self._syncs = Threads("kvxfer-file-sync", 1)
        self._stores = KeyLocks()
        self._deletes = KeyLocks()
        self._writing_since: list[float] = []
        self._close_timeout_s = config.close_timeout_s
        self._scans = self._space.walks
        self._scans.start(self._log_first_walk, self._space.begin_scan(), namespace)

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`."""
        self._space.observe(reports)
        reports.watch(self._gauges)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; asks the file system.

        Raises:
            BackendUnavailableError: The file system gives no answer, for example because the
                process has no descriptors or memory left.
        """
        self._check(keys)
        return await self._ask(self._lookups, self._files.have_files, keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. Blocks for which there is no room are `FAILED`."""
        self._check(keys, blocks)
        async with self._stores.acquire(keys):
            await self._deletes.wait([*keys, _EVERY_KEY])
            self._guard.check()  # the backend may have been closed meanwhile
            return await self._store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Memory of blocks that are missing is not written."""
        return await self._load(keys, blocks, self._read_and_use)

    async def load_for_copy(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `CopySource.load_for_copy`."""
        return await self._load(keys, blocks, self._reader.read)

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `Retaining.retain`; lasts until this process closes the store."""
        self._space.index.retain(keys, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """See `Retaining.retentions`."""
        return self._space.index.retentions(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`. A cancelled delete goes on, and stores of its keys wait for it.

        Raises:
            BackendUnavailableError: The file system refuses to remove files.
        """
        self._check(keys)
        return await self._remove(keys, self._space.remove, keys)

    async def purge(self, prefix: bytes = b"") -> int:
        """Remove blocks of this namespace, whichever process stored them; return how many.

        Args:
            prefix: Beginning of their keys. Blocks stored under it meanwhile may stay. Without a
                prefix, every block is removed, and stores wait.

        Raises:
            BackendUnavailableError: A file cannot be removed, or a folder cannot be listed; all
                other blocks were removed.
        """
        self._guard.check()
        require_instance("prefix", prefix, bytes)
        errors: list[OSError] = []
        if not prefix:
            listed = partial(self._list_keys, errors)
            return await self._remove([_EVERY_KEY], lambda: self._clear(errors, listed()))
        keys = await self._ask(self._removers, self._list_keys, errors, prefix)
        return await self._remove(keys, self._clear, errors, keys)

    async def flush(self) -> None:
        """See `Backend.flush`: returns when every written byte has reached the disk.

        Raises:
            BackendUnavailableError: A write to the disk has failed.
        """
        await self._ask(self._syncs, self._folder.sync_file_system)

    async def wait_indexed(self) -> None:
        """Wait for the walk through the folders that began when the backend was opened."""
        await self._ask(self._scans, lambda: None)  # queued behind the walk, on its thread

    async def recently_used(self, num_blocks: int) -> list[BlockKey]:
        """List the most recently used blocks of this namespace, the latest first, once indexed."""
        recently_used, has_group = self._space.index.recently_used, self._files.has_group
        return await self._ask(self._scans, recently_used, num_blocks, has_group)

    async def aclose(self) -> None:
        """See `Backend.aclose`; ends within `close_timeout_s`.

        Calls that hang in the file system are left behind; their files are closed when they end.
        """
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        moving = self._readers, self._writers, self._lookups
        pools = *moving, self._removers, self._syncs, self._scans
        closing = (each.aclose(self._close_timeout_s) for each in pools)
        release: Callable[[], None] = self._close_files
        if sum(await asyncio.gather(*closing)):
            for each in pools:  # a chain: the end of one pool begins the wait for the one before
                release = partial(each.when_ended, release)
        release()

    def _close_files(self) -> None:
        self._files.close()
        self._ledger.close()

    async def _ask(
        self, threads: Threads, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function on a thread; it may outlive this call, and touches no caller's memory."""
        self._guard.check()  # the backend may have been closed meanwhile
        try:
            return await threads.ask(func, *args, **kwargs)
        except (OSError, MemoryError) as exc:
            reason = getattr(exc, "strerror", None) or repr(exc)
            raise BackendUnavailableError(f"{self._root}: {reason}") from exc

    async def _remove(
        self, keys: Sequence[BlockKey], func: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Remove blocks on a thread; stores of these keys wait, even if the caller is cancelled."""
        removing = partial(self._ask, self._removers, func, *args, **kwargs)
        return await self._deletes.hold_during(keys, removing)

    def _open(self, config: FileConfig, namespace: Namespace, digester: Digester) -> BlockFiles:
        """Open the folder, the ledger and the I/O engine; if the disk is full, make room once."""
        try:
            try:
                return self._open_here(config, namespace, digester)
            except OSError as exc:
                if exc.errno not in runtime.FULL_ERRORS or not _remove_oldest(self._root):
                    raise
                return self._open_here(config, namespace, digester)
        except OSError as exc:
            raise BackendUnavailableError(f"{self._root}: {exc}") from exc

    def _open_here(
        self, config: FileConfig, namespace: Namespace, digester: Digester
    ) -> BlockFiles:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= most < MIN_OPEN_FILES:
            text = f"the process may open {most} files: raise `ulimit -n` to {MIN_OPEN_FILES}"
            raise OSError(errno.EMFILE, text)
        with contextlib.ExitStack() as opened:
            make_root(self._root)
            alignment = probe_direct(self._root) if config.direct == "auto" else 0
            self._folder = NamespaceFolder(self._root, namespace.fingerprint)
            opened.callback(self._folder.close)
            self._folder.write_text(NAMESPACE_FILE, describe_namespace(namespace))
            self._ledger = Ledger(self._root, on_removed=self._folder.leave_moved)
            opened.callback(self._ledger.close)
            record = IntegrityRecord(self._folder, digester, self._tree, self._ledger)
            record.open()
            files = BlockFiles(
                self._folder,
                namespace,
                digester,
                record=record,
                file_io=open_engine(config.engine),
                alignment=alignment,
            )
            warn_of_other_writers(self._root)  # once: a full disk is opened again
            opened.pop_all()
        return files

    async def _load(
        self,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        read: Callable[[Sequence[BlockKey], Descriptors], list[Outcome]],
    ) -> list[Outcome]:
        self._check(keys, blocks)

        def read_share(start: int, stop: int) -> list[Outcome]:
            return read(keys[start:stop], blocks.select(start, stop))

        return await self._share(self._readers, self._num_readers, read_share, blocks)

    async def _store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if not self._may_write():
            covered = self._batch(keys, blocks).covered
            return [DONE if there else PAUSED for there in await self._lookups.ask(covered)]
        probe = self._breaker.probe
        try:
            written = await self._write(keys, blocks)
            kinds = {id(each): each for each in written}.values()  # few: blocks share outcomes
            if (error := medium_failure(kinds)) is not None:
                self._breaker.record(error)
        finally:
            self._breaker.abandon(probe)  # if it had no result
        if BUSY in kinds:
            await self._await_others(keys, blocks, written)
        return [outcome or DONE for outcome in written]

    async def _write(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome | None]:
        """Write the missing blocks of a batch; see `StoreBatch.write`."""
        self._guard.check()  # the backend may have been closed meanwhile
        batch, began = self._batch(keys, blocks), runtime.monotonic()
        # A close keeps the threads until the room is given back.
        with self._removers.counting(), contextlib.ExitStack() as ending:
            self._writing_since.append(began)
            ending.callback(self._writing_since.remove, began)
            try:
                return await self._share(self._writers, self._num_writers, batch.write, blocks)
            finally:
                if batch.reserved:
                    with contextlib.suppress(RuntimeError):  # the close waited as long as it may
                        await wait_despite_cancel(self._removers.start(batch.give_back))

    def _batch(self, keys: Sequence[BlockKey], blocks: Descriptors) -> StoreBatch:
        return StoreBatch(self._files, self._space, self._writer, keys, blocks)

    async def _share(
        self,
        threads: Threads,
        num_threads: int,
        move: Callable[[int, int], list[T]],
        blocks: Descriptors,
    ) -> list[T | Outcome]:
        """Move a batch in shares, each on a thread; return one result per block."""

        def move_share(start: int, stop: int) -> Sequence[T | Outcome]:
            try:
                return move(start, stop)
            except Exception as exc:
                logger.exception("%s: moving %d blocks failed", self._root, stop - start)
                return [self._files.failure(exc)] * (stop - start)

        cuts = self._files.shares(blocks, num_threads)
        async with asyncio.TaskGroup() as tasks:
            shares = [tasks.create_task(threads.run(move_share, *cut)) for cut in cuts]
        return [each for share in shares for each in share.result()]

    async def _await_others(
        self, keys: Sequence[BlockKey], blocks: Descriptors, outcomes: list[Outcome | None]
    ) -> None:
        """Wait up to a second for processes that store the same blocks; update `outcomes`.

        If they stored another part of a chunk, ours is stored after all.
        """
        busy = [index for index, outcome in enumerate(outcomes) if outcome is BUSY]
        for attempt in range(1, BUSY_ATTEMPTS + 1):
            there = [False] * len(busy)
            with contextlib.suppress(BackendUnavailableError):
                there = await self.lookup([keys[index] for index in busy])
            asked = zip(busy, there, strict=True)
            again = [index for index, is_there in asked if is_there or attempt % 10 == 0]
            if again:
                written = await self._write([keys[index] for index in again], blocks.take(again))
                for index, outcome in zip(again, written, strict=True):
                    outcomes[index] = outcome
            busy = [index for index in busy if outcomes[index] is BUSY]
            if not busy:
                return
            await asyncio.sleep(BUSY_PAUSE_S)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.BREAKER_OPEN: not self._breaker.closed}

    def _may_write(self) -> bool:
        if self._writing_since and runtime.monotonic() - min(self._writing_since) > STALLED_S:
            self._breaker.trip(f"a write takes longer than {STALLED_S:g} s")
        return self._breaker.allows()

    def _read_and_use(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = self._reader.read(keys, blocks)
        done = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.done]
        for key in self._space.index.touch(done):
            self._folder.note_use(key)
        return outcomes

    def _list_keys(self, errors: list[OSError], prefix: bytes = b"") -> list[BlockKey]:
        """List the keys of the blocks in the folder; `errors` gets those of unreadable folders."""
        found = FolderStore(self._root).blocks(self._folder.fingerprint, prefix, errors=errors)
        return [each.key for each in found if not each.quarantined]

    def _clear(self, errors: Sequence[OSError], keys: Sequence[BlockKey]) -> int:
        """Remove blocks; then raise the first error of listing them, which left some out."""
        num_removed = sum(self._space.remove(keys, reason=Removal.CLEARED))
        if errors:
            raise errors[0]
        return num_removed

    def _log_first_walk(self, walk: Future[None], namespace: Namespace) -> None:
        """Log a failure of the first walk, or the other namespaces of the store."""
        try:
            walk.result()
            self._log_other_namespaces(namespace)
        except OSError as exc:
            text = "walk through %s failed, and is repeated when room is needed: %s"
            logger.warning(text, self._root, exc)
        except Exception:
            logger.exception("walk through %s failed", self._root)

    def _log_other_namespaces(self, namespace: Namespace) -> None:
        """Log why blocks of the same model are misses: the first field that differs."""
        for theirs in self._tree.namespaces():
            try:
                if theirs.model == namespace.model:
                    namespace.require_same(theirs)
            except NamespaceMismatchError as exc:
                why = printable(exc, MAX_DETAIL_CHARS)  # it contains text from a file
                text = "blocks of the same model in namespace %s are misses here: %s"
                logger.info(text, theirs.fingerprint, why)

    def _check(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        self._guard.check_batch(keys, *blocks)
        file_name(max(keys, key=len))
        for each in blocks:
            self._files.require_whole_blocks(keys, each)


_EVERY_KEY = BlockKey(b"")
"""Stand-in for all keys: a purge locks it, and every store waits for that."""


def _remove_oldest(root: Path) -> bool:
    """Remove the least recently used blocks, `ROOM_BYTES` or more; False if none was removed."""
    store = FolderStore(root)
    with contextlib.suppress(InvalidArgumentError, OSError):  # no store, or an unreadable one
        num_bytes = sum(block.num_bytes_on_disk for block in store.blocks())
        removed = GarbageCollection(store, capacity_bytes=max(0, num_bytes - ROOM_BYTES)).run()
        text = "no room on the disk to open %s: removed the %d least recently used blocks"
        logger.warning(text, root, removed.num_excess)
        return removed.num_bytes > 0
    return False
