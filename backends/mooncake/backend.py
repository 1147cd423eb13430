"""Backend over Mooncake Store: a page an object, verified after it has landed."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.mooncake.client import Ask, CallFailedError, Code, StoreClient
from kvxfer.backends.mooncake.config import MooncakeConfig
from kvxfer.kvcache.descriptors import Descriptors, view_memory
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, OtherIntegrityError
from kvxfer.pages.namespace_format import PART
from kvxfer.pages.object_pages import Pages
from kvxfer.runtime import Threads
from kvxfer.storage.backend import DONE, MISSING, NO_ROOM_REASON, Outcome, Status, TellsKept
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Gauge, Removal, Reports
from kvxfer.storage.staging_memory import StagedBlocks, StagingMemory

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

PREFIX = "kvxfer/"
"""Beginning of the names of all objects, which others of the cluster do not use."""

NUM_THREADS = 2
"""Threads that copy and verify: of one run while bytes of another one arrive."""

GONE = frozenset({Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY, Code.REPLICA_IS_GONE})

NO_BUFFER = Outcome(Status.TIMED_OUT, reason="no staging buffer came back in time")

logger = logging.getLogger(__name__)

Slot = NDArray[np.uint8]
"""Place of one page in a staging buffer."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks that pass through a staging buffer together: a slot for the page of each."""

    keys: Sequence[BlockKey]
    names: Sequence[str]
    blocks: Descriptors
    slots: Sequence[Slot]

    def block(self, index: int) -> Descriptors:
        return self.blocks.select(index, index + 1)


Move = Callable[[_Run], Awaitable[list[Outcome]]]


class MooncakeBackend(TellsKept):
    """Backend that keeps each block in an object of Mooncake Store, which evicts.

    It shares `Pages` with buckets, and not their moves: one call of Mooncake moves many objects
    through registered memory, where a bucket has a request, a deadline, a repetition for each.

    Bytes pass through memory that is registered with Mooncake once; a buffer of it that a late call
    may still touch is not used before the call has returned. While the master is gone every
    block is a miss and every store fails, within the time for a call at first and at once soon
    after; from time to time a call tries again.

    Args:
        config: See `MooncakeConfig`.
        namespace: Namespace of the blocks.

    Raises:
        InvalidArgumentError: The namespace has no groups.
        MissingExtraError: Mooncake is not installed.
        BackendUnavailableError: It cannot be imported.
    """

    config_type = MooncakeConfig

    def __init__(self, config: MooncakeConfig, namespace: Namespace) -> None:
        self._guard = CallGuard("mooncake backend", namespace)
        config.require_mooncake()
        self._config = config
        self._pages = Pages(
            f"{PREFIX}{config.integrity.value}/", namespace, Digester(config.integrity)
        )
        self._staging = StagingMemory(
            config.staging,
            self._pages.largest_file_bytes,
            lambda: self._client.drain(),  # noqa: PLW0108 - the client comes after it
        )
        self._client = StoreClient(config, self._staging.region)
        self._replication = config.replication()
        self._threads = Threads("kvxfer-mooncake-copy", NUM_THREADS)
        self._stores = KeyLocks()
        self._sent_bytes = self._received_bytes = 0
        self._reports = Reports()

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`."""
        self._reports = reports
        reports.watch(self._gauges)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; blocks of which nothing is known in time are taken to be missing.

        What is there stays for some time, 10 s where the master is not told otherwise.
        """
        self._guard.check_batch(keys)
        names = [self._pages.name(key) for key in keys]
        try:
            codes = await self._client.ask(
                "lookup", lambda store: store.batch_is_exist(names), self._config.lookup_timeout_s
            )
        except CallFailedError as exc:
            logger.debug("blocks are taken to be missing: %s", exc)
            return [False] * len(keys)
        return [code == 1 for code in codes]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        self._guard.check_batch(keys, blocks)
        self._pages.require_whole_blocks(keys, blocks)
        async with self._stores.acquire(keys):
            self._guard.check()  # the backend may have been closed meanwhile
            return await self._in_runs(self._store_run, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Memory of blocks that are not `DONE` is not written."""
        self._guard.check_batch(keys, blocks)
        self._pages.require_whole_blocks(keys, blocks)
        outcomes = await self._in_runs(self._load_run, keys, blocks)
        corrupt = _corrupt(outcomes)
        if corrupt:
            # One that was removed and stored anew while it was read has bytes of both.
            chosen = [keys[i] for i in corrupt]
            again = await self._in_runs(self._load_run, chosen, blocks.take(corrupt))
            for i, outcome in zip(corrupt, again, strict=True):
                outcomes[i] = outcome
            corrupt = _corrupt(outcomes)
            for i in corrupt:
                name, reason = self._pages.name(keys[i]), outcomes[i].reason
                logger.warning("corrupt block %s: %s", name, reason)
            if corrupt:
                await self._remove([keys[i] for i in corrupt], Removal.CORRUPT)
        return outcomes

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`; a block in use goes, too, and its reader finds out."""
        self._guard.check_batch(keys)
        return await self._remove(keys, Removal.DELETED)

    async def aclose(self) -> None:
        """See `Backend.aclose`; blocks stay in the memory of other processes."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        self._staging.withdraw()
        left = await self._threads.aclose(self._config.close_timeout_s)
        if not await self._client.aclose(self._config.close_timeout_s) and not left:
            await self._staging.aclose()
            self._pages.close()

    async def _in_runs(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move blocks in runs that fit into a buffer; one is copied while another is on its way."""
        names = [self._pages.name(key) for key in keys]
        sizes = [each.file_size_bytes for each in self._pages.formats(keys)]
        outcomes: dict[int, list[Outcome]] = {}

        async def move_run(start: int, stop: int) -> list[Outcome]:
            async with contextlib.AsyncExitStack() as held:
                staged = await self._hold(held, sizes[start:stop])
                if staged is None:
                    return [NO_BUFFER] * (stop - start)
                views = view_memory(staged.blocks.addresses, staged.blocks.lengths)
                slots = [np.frombuffer(view, np.uint8) for view in views]
                part = blocks.select(start, stop)
                try:
                    return await move(_Run(keys[start:stop], names[start:stop], part, slots))
                except CallFailedError as exc:
                    if exc.is_late:
                        staged.disturb()
                    return [exc.outcome] * (stop - start)

        async def note_run(start: int, stop: int) -> None:
            try:
                outcomes[start] = await move_run(start, stop)
            except Exception as exc:
                if not self._guard.closed:
                    raise
                outcomes[start] = [Outcome(Status.FAILED, reason=str(exc))] * (stop - start)

        async with asyncio.TaskGroup() as tasks:
            for start, stop in self._staging.cut(sizes):
                tasks.create_task(note_run(start, stop))
        return [outcome for start in sorted(outcomes) for outcome in outcomes[start]]

    async def _hold(
        self, held: contextlib.AsyncExitStack, sizes: Sequence[int]
    ) -> StagedBlocks | None:
        """Hold a buffer; None when none came back within the time of a call that is late.

        While calls are answered buffers come back, however long a large batch waits for its last.
        """
        while True:
            hold = self._staging.hold(sizes, [0] * len(sizes), timeout_s=self._config.timeout_s)
            with contextlib.suppress(TimeoutError):
                return await held.enter_async_context(hold)
            if not self._client.is_available:
                return None

    async def _store_run(self, run: _Run) -> list[Outcome]:
        names, outcomes = list(run.names), [DONE] * len(run.keys)
        there = await self._ask("store", lambda store: store.batch_is_exist(names))
        formats = self._pages.formats(run.keys)
        missing = [i for i, code in enumerate(there) if code != 1]
        parts = [i for i, code in enumerate(there) if code == 1 and formats[i].has_parts]
        smaller = await self._find_smaller(run, parts, outcomes) if parts else []
        for chosen, replaces in ((missing, False), (smaller, True)):
            fit = [i for i in chosen if formats[i].can_hold(run.block(i).num_bytes)]
            for i in set(chosen).difference(fit):
                outcomes[i] = PART
            for i, code in (await self._put(run, fit, replaces=replaces)).items():
                if code != Code.OK:
                    outcomes[i] = _failure("store", code)
                    continue
                if replaces:
                    self._reports.removed([run.keys[i]], Removal.REPLACED)
                self._reports.added([run.keys[i]])
        return outcomes

    async def _load_run(self, run: _Run) -> list[Outcome]:
        codes = await self._get(run, range(len(run.keys)))
        return await self._threads.run(
            lambda: [self._read_page(run, i, code) for i, code in codes.items()]
        )

    async def _find_smaller(
        self, run: _Run, chosen: Sequence[int], outcomes: list[Outcome]
    ) -> list[int]:
        """Find the blocks of which a part is stored that lacks bytes of theirs.

        Blocks of which that cannot be found out get their outcomes.
        """
        smaller = []
        for i, code in (await self._get(run, chosen)).items():
            if code < 0:
                outcomes[i] = _failure("store", code)
                continue
            key, block = run.keys[i], run.block(i)
            head = run.slots[i].data[: self._pages.format(key).header_size_bytes]
            try:
                covers = self._pages.covers(key, head, code, block)
            except OtherIntegrityError as exc:
                outcomes[i] = exc.outcome
                continue
            if not covers and code != self._pages.format(key).file_size_bytes:
                smaller.append(i)
        return smaller

    async def _put(self, run: _Run, chosen: Sequence[int], *, replaces: bool) -> dict[int, int]:
        """Store pages, made in their slots, where there are none or in place of what is there."""
        if not chosen:
            return {}
        pages = await self._threads.run(self._write, run, chosen)
        names, sizes = [run.names[i] for i in chosen], [page.nbytes for page in pages]
        addresses = [page.ctypes.data for page in pages]

        def put(store: "MooncakeDistributedStore") -> Sequence[int]:
            move = store.batch_upsert_from if replaces else store.batch_put_from
            codes: Sequence[int] = move(names, addresses, sizes, self._replication)
            return codes

        codes = await self._ask("store", put)
        self._sent_bytes += sum(
            size for size, code in zip(sizes, codes, strict=True) if code == Code.OK
        )
        return dict(zip(chosen, codes, strict=True))

    async def _get(self, run: _Run, chosen: Sequence[int]) -> dict[int, int]:
        """Read pages into their slots; return the size of each, or the code of an error."""
        names, slots = [run.names[i] for i in chosen], [run.slots[i] for i in chosen]
        sizes, addresses = [slot.nbytes for slot in slots], [slot.ctypes.data for slot in slots]
        codes = await self._ask("load", lambda store: store.batch_get_into(names, addresses, sizes))
        self._received_bytes += sum(code for code in codes if code > 0)
        return dict(zip(chosen, codes, strict=True))

    def _write(self, run: _Run, chosen: Sequence[int]) -> list[Slot]:
        pages = []
        for i in chosen:
            size = self._pages.format(run.keys[i]).header_size_bytes + run.block(i).num_bytes
            self._pages.write(run.keys[i], run.block(i), run.slots[i][:size])
            pages.append(run.slots[i][:size])
        return pages

    def _read_page(self, run: _Run, index: int, code: int) -> Outcome:
        """Verify a page that has landed in its slot, and copy it to its block."""
        if code < 0:
            return _failure("load", code)
        page = run.slots[index][:code]
        try:
            return self._pages.decode(run.keys[index], page, run.block(index))
        except OtherIntegrityError as exc:
            return exc.outcome
        except BlockFileError as exc:
            return Outcome(Status.CORRUPT, reason=str(exc))

    async def _remove(
        self, keys: Sequence[BlockKey], why: Removal
    ) -> tuple[set[BlockKey], set[BlockKey]]:
        names = [self._pages.name(key) for key in keys]
        try:
            # By force, or what was looked up or read a short time ago could not be removed.
            codes = await self._ask("delete", lambda store: store.batch_remove(names, True))
        except CallFailedError as exc:
            logger.warning("cannot remove %d blocks: %s", len(keys), exc)
            return set(), {*keys}
        coded = list(zip(keys, codes, strict=True))
        removed = [key for key, code in coded if code == Code.OK]
        self._reports.removed(removed, why)
        absent = Code.OK, Code.OBJECT_NOT_FOUND
        return {*removed}, {key for key, code in coded if code not in absent}

    async def _ask(self, what: str, ask: Ask) -> Sequence[int]:
        return await self._client.ask(what, ask, self._config.timeout_s)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {
            Gauge.BREAKER_OPEN: not self._client.is_available,
            Gauge.REQUESTS: self._client.num_calls,
            Gauge.SENT_BYTES: self._sent_bytes,
            Gauge.RECEIVED_BYTES: self._received_bytes,
            Gauge.QUARANTINED_BYTES: self._staging.unsafe_bytes,
        }


def _corrupt(outcomes: Sequence[Outcome]) -> list[int]:
    return [i for i, outcome in enumerate(outcomes) if outcome.status is Status.CORRUPT]


def _failure(what: str, code: int) -> Outcome:
    if code in GONE and what == "load":
        return MISSING
    if code == Code.CHECKSUM_MISMATCH:
        return Outcome(Status.CORRUPT, reason="Mooncake's own checksum differs")
    if code == Code.INVALID_PARAMS and what == "load":
        return Outcome(Status.CORRUPT, reason="the object is larger than any page")
    if code == Code.NO_AVAILABLE_HANDLE:
        return Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON} in the memory of the cluster")
    return Outcome(Status.FAILED, reason=f"{what}: error {code} of Mooncake")
