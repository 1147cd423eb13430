"""Client of Mooncake Store on a thread of its own: deadlines for calls that have none."""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer import runtime
from kvxfer.backends.mooncake.config import MooncakeConfig
from kvxfer.errors import BackendUnavailableError, ClosedError, KVXferError
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Calls, CircuitBreaker, Threads
from kvxfer.storage.backend import Outcome, Status

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

ABANDONED_AFTER_S = 60.0
"""Time after which Mooncake gives up a transfer, and leaves it under way.

Source: https://github.com/kvcache-ai/Mooncake, `mooncake-store/src/transfer_task.cpp`.
"""

Ask = Callable[["MooncakeDistributedStore"], Sequence[int]]


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
"""Results of calls whose master is gone."""


class CallFailedError(KVXferError):
    """Call that failed as a whole.

    Attributes:
        outcome: Outcome of the blocks whose call it was.
        is_late: Whether the call goes on, and may still touch the registered memory.
    """

    def __init__(
        self, reason: str, status: Status = Status.FAILED, *, is_late: bool = False
    ) -> None:
        self.outcome = Outcome(status, reason=reason)
        self.is_late = is_late
        super().__init__(reason)


class StoreClient:
    """Client of Mooncake Store; belongs to one event loop.

    Its calls block: some 4 s where the master is dead, 30 s where it is frozen or the process that
    has the bytes is, and nothing interrupts them. So one thread makes them, one at a time. A call
    that has not returned by its deadline goes on, and until it returns every other one fails at
    once, as it does for `retry_after_s` after a master was silent.

    The client connects in its first call, registers the memory, and connects anew where it had to
    be closed. Mooncake holds the interpreter lock while it connects, a tenth of a second, and while
    it closes, up to a second. Closing it during a call ends the process by a segmentation fault:
    the thread does it after the call.

    Args:
        config: Where the master is.
        memory: Memory that bytes are moved from and to; kept as long as a call may touch it.

    Attributes:
        num_calls: Calls that were made.
    """

    def __init__(self, config: MooncakeConfig, memory: MemoryRegion) -> None:
        self._place = f"mooncake://{config.address}"
        self._config = config
        self._memory = memory
        self._store: MooncakeDistributedStore | None = None  # the thread's
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
        """Whether calls are made, and not refused because none is answered."""
        return self._breaker.closed

    async def ask(self, what: str, ask: Ask, timeout_s: float) -> Sequence[int]:
        """Make a call when its turn has come.

        Args:
            what: Name of the call in reasons.
            ask: Makes the call, on the thread; touches no memory but the registered one.
            timeout_s: Seconds for it, of which half at most for its turn.

        Returns:
            What `ask` returned.

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
            raise CallFailedError(f"{what}: others took too long", Status.TIMED_OUT) from None
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
            raise CallFailedError(f"{what}: no answer of {self._place}")
        return codes

    async def drain(self) -> None:
        """Wait for the end of a call that runs now, after which it touches no memory."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running])

    async def aclose(self, timeout_s: float) -> int:
        """Close the client when its call has ended; return how many calls still run after a time.

        One that still runs then keeps its memory, and has Mooncake closed when it ends.
        """
        self._closed = True
        self._calls.cancel()
        self._threads.start(self._shut)
        return await self._threads.aclose(timeout_s)

    def _require_idle(self, what: str) -> None:
        if self._closed:
            raise ClosedError("mooncake backend")
        if self._is_late:
            raise CallFailedError(f"{what}: paused, an earlier call of {self._place} is late")

    def _begin(self, what: str, ask: Ask) -> "asyncio.Future[Sequence[int]]":
        self._require_idle(what)
        if not self._breaker.allows():
            raise CallFailedError(f"{what}: paused, {self._place} does not answer")
        self._probe = self._breaker.probe
        self.num_calls += 1
        self._running = asyncio.ensure_future(self._threads.ask(self._call, ask))
        self._running.add_done_callback(self._end)
        return self._running

    def _call(self, ask: Ask) -> Sequence[int]:
        """Make a call, on the thread."""
        if self._store is None:
            self._store = self._config.open_store()
            code = self._store.register_buffer(self._memory.address, self._memory.num_bytes)
            if code:
                self._shut()
                raise BackendUnavailableError(f"the memory cannot be registered ({code})")
        began_at = runtime.monotonic()
        codes = ask(self._store)
        if Code.TRANSFER_FAIL in codes and runtime.monotonic() - began_at >= ABANDONED_AFTER_S:
            self._shut()  # or a transfer that was given up may write to the memory
        return codes

    def _shut(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            store.close()

    def _end(self, call: "asyncio.Future[Sequence[int]]") -> None:
        """Note the end of a call, for which perhaps nobody waits any more."""
        self._is_late = False
        self._turn.release()
        if call.cancelled():
            self._breaker.abandon(self._probe)
        elif error := call.exception():
            self._breaker.record(str(error))
        else:
            self._breaker.record("the master is silent" if SILENT & set(call.result()) else "")
