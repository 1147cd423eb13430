"""Backend over Mooncake Store: each page is an object in pooled memory of a cluster's processes."""

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.configuration import Configuration
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    KVXferError,
)
from kvxfer.extras import require_extra
from kvxfer.kvcache.descriptors import Descriptors, view_memory
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, OtherIntegrityError
from kvxfer.pages.namespace_format import PART
from kvxfer.pages.object_pages import Pages
from kvxfer.runtime import CLOSE_TIMEOUT_S, Calls, CircuitBreaker, Threads
from kvxfer.settings import shown
from kvxfer.storage.backend import DONE, MISSING, NO_ROOM_REASON, Outcome, Status, TellsKept
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Gauge, Removal, Reports
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES, StagedBlocks, StagingMemory
from kvxfer.units import ByteSize

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

PREFIX = "kvxfer/"
"""Beginning of all objects' names, which other users of the cluster do not use."""

NUM_THREADS = 2
"""Threads that copy and verify runs, while bytes of other runs arrive."""

NO_BUFFER = Outcome(Status.TIMED_OUT, reason="no staging buffer was free in time")

HANDSHAKE = "P2PHANDSHAKE"
"""Value of `metadata` in a cluster without a metadata service: clients ask each other."""

NONSENSE = bytes(64)

ABANDONED_AFTER_S = 60.0
"""How long Mooncake waits for a transfer before it abandons it, still under way.

Source: https://github.com/kvcache-ai/Mooncake, `mooncake-store/src/transfer_task.cpp`.
"""

Ask = Callable[["MooncakeDistributedStore"], Sequence[int]]

Slot = NDArray[np.uint8]
"""Place of one page in a staging buffer."""

logger = logging.getLogger(__name__)


class MooncakeConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `mooncake://host:port`.

    Attributes:
        address: `host:port` of the master.
        metadata: Metadata service of the cluster, such as `http://10.0.0.5:8080/metadata`; by
            default the clients ask each other.
        host: Host by which other clients reach this process; by default this machine's address
            on the way to the master.
        protocol: Transport of the bytes.
        devices: Network cards for RDMA, separated by commas; by default Mooncake chooses.
        replicas: Copies of each block, in the memory of different processes.
        integrity: `fast` stores an XXH3 checksum with every block, and verifies it before the
            engine gets the block; `off` does neither.
        staging: Bytes of registered memory for blocks on their way; at least two of the largest
            chunk.
        timeout_s: Deadline of one call of the client, which moves at most a quarter of `staging`.
            At most half of it is spent waiting for the client to be free.
        lookup_timeout_s: Deadline of a lookup, after which every block is a miss.
        retry_after_s: Pause before the next attempt, after the master has failed.
        close_timeout_s: How long closing waits for calls that still run.

    Raises:
        InvalidArgumentError: A parameter is not valid; names it and its value.
    """

    address: str
    metadata: str = HANDSHAKE
    host: str = ""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    replicas: int = 1
    integrity: Integrity = Integrity.FAST
    staging: ByteSize = ByteSize(DEFAULT_STAGING_BYTES)
    timeout_s: float = 10.0
    lookup_timeout_s: float = 2.0
    retry_after_s: float = 5.0
    close_timeout_s: float = CLOSE_TIMEOUT_S

    def __post_init__(self) -> None:
        """Check what can be checked without a connection."""
        super().__post_init__()
        self.integrity.require_keyless()
        if not self.master.port:
            raise InvalidArgumentError("address", self.address, "the host and port of the master")
        if "@" in self.metadata or not self.metadata:
            wanted = f"a URL without credentials, or {HANDSHAKE}"
            raise InvalidArgumentError("metadata", shown(self.metadata), wanted)
        self._require_positive("replicas", "timeout_s", "lookup_timeout_s", "retry_after_s")

    @property
    def master(self) -> Endpoint:
        """Endpoint of the master."""
        return Endpoint.parse("address", self.address)

    def require_answer(self) -> None:
        """Check that the master answers, within `lookup_timeout_s`; blocks.

        It is sent bytes of no protocol, on which it hangs up, unless it is frozen: then its kernel
        accepts connections, but nobody reads.

        Raises:
            BackendUnavailableError: The master does not answer.
        """
        try:
            with socket.create_connection(
                (self.master.host, self.master.port), self.lookup_timeout_s
            ) as connection:
                connection.sendall(NONSENSE)
                connection.recv(1)
        except ConnectionResetError:
            pass  # an answer, too
        except OSError as exc:
            raise BackendUnavailableError(f"mooncake://{self.address}: {exc}") from exc

    def require_mooncake(self) -> None:
        """Check that Mooncake is installed, and can be imported.

        Raises:
            MissingExtraError: It is not installed.
            BackendUnavailableError: A library that it needs is missing.
        """
        require_extra("mooncake", "mooncake", what="mooncake://")
        try:
            import mooncake.store  # noqa: F401 - only whether it can be
        except ImportError as exc:
            raise BackendUnavailableError(f"mooncake cannot be imported: {exc}") from exc

    def open_store(self) -> "MooncakeDistributedStore":
        """Connect a client of Mooncake that has no memory of its own; blocks."""
        from mooncake.store import MooncakeDistributedStore

        # `setup` holds the interpreter lock for half a minute or more if the master is silent.
        self.require_answer()
        store = MooncakeDistributedStore()
        host = self.host or _local_host(self.master)
        code = store.setup(host, self.metadata, 0, 0, self.protocol, self.devices, self.address)
        if code:
            raise BackendUnavailableError(f"cannot connect to mooncake://{self.address} ({code})")
        return store

    def replication(self) -> "ReplicateConfig":
        """Make the replication setting of stores: the number of copies, none of them pinned."""
        from mooncake.store import ReplicateConfig

        setting = ReplicateConfig()
        setting.replica_num = self.replicas
        return setting


def _local_host(master: Endpoint) -> str:
    """Find the address of this machine on the way to a master; nothing is sent."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            master.host, master.port, type=socket.SOCK_DGRAM
        )
        with runtime.open_socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise BackendUnavailableError(f"no route to {master}: {exc}") from exc


class Code(enum.IntEnum):
    """Results of calls that are not counts of bytes.

    Source: https://github.com/kvcache-ai/Mooncake, `mooncake-store/include/types.h`.
    """

    OK = 0
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    REPLICA_IS_GONE = -712
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901


SILENT = frozenset({Code.RPC_FAIL, Code.RPC_TIMEOUT})
"""Results of calls that the master did not answer."""

GONE = frozenset({Code.OBJECT_NOT_FOUND, Code.REPLICA_IS_NOT_READY, Code.REPLICA_IS_GONE})


class CallFailedError(KVXferError):
    """Error of a call that failed as a whole; if `is_late`, it runs on and may touch the memory."""

    def __init__(
        self, reason: str, status: Status = Status.FAILED, *, is_late: bool = False
    ) -> None:
        self.outcome = Outcome(status, reason=reason)
        self.is_late = is_late
        super().__init__(reason)


class StoreClient:
    """Client of Mooncake Store on a thread of its own; belongs to one event loop.

    Calls block, and nothing interrupts them: about 4 s if the master is dead, 30 s if the master,
    or the process that has the bytes, is frozen. So one thread makes them, one at a time. A call
    that misses its deadline goes on; until it returns, every other call fails at once, as all calls
    do for `retry_after_s` after a call was late, was not answered, or raised an error.

    The first call connects, and registers the memory, which is kept as long as a call may touch it.
    If the client had to be closed, the next call connects again. Mooncake holds the interpreter
    lock for a tenth of a second while it connects, and for up to a second while it closes. Closing
    it during a call is a segmentation fault, so the thread closes it after the call.
    """

    def __init__(self, config: MooncakeConfig, memory: MemoryRegion) -> None:
        self._place = f"mooncake://{config.address}"
        self._config = config
        self._memory = memory
        self._store: MooncakeDistributedStore | None = None  # used only on the thread
        self._breaker = CircuitBreaker(
            f"calls of {self._place}", max_errors=1, pause_s=config.retry_after_s
        )
        self._threads = Threads("kvxfer-mooncake", 1)
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[Sequence[int]] | None = None
        self._calls = Calls()
        self._is_late = False
        self._closed = False
        self._probe = 0
        self.num_calls = 0

    @property
    def is_available(self) -> bool:
        """Whether calls are made; False while they fail at once after a late or failed call."""
        return self._breaker.closed

    async def ask(self, what: str, ask: Ask, timeout_s: float) -> Sequence[int]:
        """Make a call on the thread in its turn, which must come within half of `timeout_s`.

        The call may touch no memory but the registered one.

        Raises:
            CallFailedError: It failed, is late, or was not made.
            asyncio.CancelledError: The caller was cancelled; the call may go on, and is late from
                its own deadline on.
            ClosedError: The client was closed.
        """
        ends_at = runtime.monotonic() + timeout_s
        self._require_idle(what)
        try:
            async with asyncio.timeout(timeout_s / 2):
                await self._turn.acquire()
        except TimeoutError:
            raise CallFailedError(f"{what}: busy with earlier calls", Status.TIMED_OUT) from None
        try:
            running = self._begin(what, ask)
        except BaseException:
            self._turn.release()
            raise

        def note_late() -> None:
            if not running.done():
                self._is_late = True
                self._breaker.trip(f"{what} was not answered in time")

        left_s, ending = ends_at - runtime.monotonic(), asyncio.wait([running])
        with contextlib.suppress(TimeoutError):
            await self._calls.wait_for(left_s, ending, note_late=note_late, outlives_caller=True)
        if not running.done():
            raise CallFailedError(f"{what}: no answer in time", Status.TIMED_OUT, is_late=True)
        try:
            codes = running.result()
        except Exception as exc:
            raise CallFailedError(f"{what}: {exc}") from exc
        if SILENT & set(codes):
            raise CallFailedError(f"{what}: no answer from {self._place}")
        return codes

    async def drain(self) -> None:
        """Wait for the end of the call that runs now, after which it touches no memory."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running])

    async def aclose(self, timeout_s: float) -> int:
        """Close the client once its call has ended; return how many calls run after `timeout_s`.

        A call that still runs keeps its memory, and Mooncake is closed when it ends.
        """
        self._closed = True
        self._calls.cancel()
        self._threads.start(self._close_store)
        return await self._threads.aclose(timeout_s)

    def _require_idle(self, what: str) -> None:
        if self._closed:
            raise ClosedError("mooncake backend")
        if self._is_late:
            raise CallFailedError(f"{what}: paused, since a call to {self._place} is late")

    def _begin(self, what: str, ask: Ask) -> "asyncio.Future[Sequence[int]]":
        self._require_idle(what)
        if not self._breaker.allows():
            raise CallFailedError(f"{what}: paused, since {self._place} does not answer")
        self._probe = self._breaker.probe
        self.num_calls += 1
        self._running = asyncio.ensure_future(self._threads.ask(self._call, ask))
        self._running.add_done_callback(self._end)
        return self._running

    def _call(self, ask: Ask) -> Sequence[int]:
        """Make a call, on the thread, unless closed meanwhile: the call would connect again."""
        self._require_idle("a call")
        if self._store is None:
            self._store = self._config.open_store()
            if code := self._store.register_buffer(self._memory.address, self._memory.num_bytes):
                self._close_store()
                raise BackendUnavailableError(f"Mooncake cannot register memory ({code})")
        began_at = runtime.monotonic()
        codes = ask(self._store)
        if Code.TRANSFER_FAIL in codes and runtime.monotonic() - began_at >= ABANDONED_AFTER_S:
            self._close_store()  # or the transfer that Mooncake abandoned may write to the memory
        return codes

    def _close_store(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            store.close()

    def _end(self, call: "asyncio.Future[Sequence[int]]") -> None:
        """Note the end of a call, which may have no waiter left."""
        self._is_late = False
        self._turn.release()
        if call.cancelled():
            self._breaker.abandon(self._probe)
        elif error := call.exception():
            self._breaker.record(str(error))
        else:
            self._breaker.record("the master is silent" if SILENT & set(call.result()) else "")


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks that pass through a staging buffer together, with a slot for the page of each."""

    keys: Sequence[BlockKey]
    names: Sequence[str]
    blocks: Descriptors
    slots: Sequence[Slot]

    def block(self, index: int) -> Descriptors:
        return self.blocks.select(index, index + 1)


Move = Callable[[_Run], Awaitable[list[Outcome]]]


class MooncakeBackend(TellsKept):
    """Backend that keeps each block in an object of Mooncake Store, which evicts.

    It shares `Pages` with the object backend, but not the moves: a call of Mooncake moves many
    objects through registered memory; a bucket has a request, a deadline and retries for each.

    Bytes pass through memory that is registered with Mooncake once. A buffer that a late call may
    still touch is not reused before the call returns. While the master is gone, every block is a
    miss and every store fails: at first within the deadline of a call, soon after at once. From
    time to time, one call tries again.

    Raises:
        InvalidArgumentError: The namespace has no groups.
        MissingExtraError: Mooncake is not installed.
        BackendUnavailableError: Mooncake cannot be imported.
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
        """See `Backend.lookup`; without an answer in time, all blocks count as missing.

        The master keeps a block that was found for some time, 10 s by default.
        """
        self._guard.check_batch(keys)
        names = [self._pages.name(key) for key in keys]
        try:
            codes = await self._client.ask(
                "lookup", lambda store: store.batch_is_exist(names), self._config.lookup_timeout_s
            )
        except CallFailedError as exc:
            logger.debug("%d blocks count as missing: %s", len(keys), exc)
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
        corrupt = _find_corrupt(outcomes)
        if corrupt:
            # A block that was removed and stored again during the read has bytes of both.
            chosen = [keys[i] for i in corrupt]
            again = await self._in_runs(self._load_run, chosen, blocks.take(corrupt))
            for i, outcome in zip(corrupt, again, strict=True):
                outcomes[i] = outcome
            corrupt = _find_corrupt(outcomes)
            for i in corrupt:
                name, reason = self._pages.name(keys[i]), outcomes[i].reason
                logger.warning("removing corrupt block %s: %s", name, reason)
            if corrupt:
                await self._remove([keys[i] for i in corrupt], Removal.CORRUPT)
        return outcomes

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`; removes blocks in use, too, and their readers notice."""
        self._guard.check_batch(keys)
        return await self._remove(keys, Removal.DELETED)

    async def aclose(self) -> None:
        """See `Backend.aclose`; blocks stay in the memory of other processes."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        self._staging.withdraw()
        timeout_s = self._config.close_timeout_s
        closing = self._threads.aclose(timeout_s), self._client.aclose(timeout_s)
        if not any(await asyncio.gather(*closing)):
            await self._staging.aclose()
            self._pages.close()

    async def _in_runs(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move blocks in runs that fit a buffer; one is copied while another is on its way."""
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
        """Hold a buffer; None if none came back in time and calls are not answered.

        While calls are answered, buffers come back, however long a large batch waits for its last.
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
        """Find the blocks whose stored pages lack some of their bytes.

        Sets the outcome of a block whose page cannot be read.
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
        """Make pages in their slots and store them; if it `replaces`, in place of stored pages."""
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
        """Verify a page that has arrived in its slot, and copy it to its block."""
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
            # By force: a lease protects blocks that were looked up or read a short time ago.
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


def _find_corrupt(outcomes: Sequence[Outcome]) -> list[int]:
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
    return Outcome(Status.FAILED, reason=f"{what}: Mooncake error {code}")
