"""Isolated tier: one of several backends, called so that its failures do not reach the others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from kvxfer import runtime
from kvxfer.checks import require_number, require_timeout
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.runtime import Calls, LogPause, Suspension
from kvxfer.storage.backend import (
    MISSING,
    Backend,
    CopySource,
    Outcome,
    Purgeable,
    Status,
    can_purge_all,
)
from kvxfer.storage.calls import Move, call_backend, delete_from, log_failed
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Asked, Cause, Gauge, Observable, Operation, Reports
from kvxfer.storage.staging_memory import Share, StagedBlocks, StagingMemory

CHECK_PAUSE_S = 0.1
"""How often a request that waits for its turn checks whether the tier is available."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTimeouts:
    """Deadlines of a tier below the first, in seconds.

    Attributes:
        lookup_s: For a lookup, after which every key is a miss in the tier. None for no limit.
        move_s: For moving one staging buffer of blocks, for a delete, or for a buffer to come back.
            A store or load below the first tier has this time for each buffer that its blocks would
            fill. A disk that moves 2 MB/s is still in time.
        close_s: For closing the tier, after which the call is abandoned; before that, also for the
            last copies to lower tiers, and after it for staging buffers in use to come back.
        pause_s: How long the tier is not used after it missed a deadline, as every caller would
            wait for it.

    Raises:
        InvalidArgumentError: A time is negative or not a number, or None except for `lookup_s`.
    """

    lookup_s: float | None = 2.0
    move_s: float = 10.0
    close_s: float = 30.0
    pause_s: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            require = require_timeout if field.name == "lookup_s" else require_number
            object.__setattr__(self, field.name, require(field.name, getattr(self, field.name)))


class IsolatedTier:
    """Tier of a `TieredBackend`: every key is a miss while its backend fails or hangs.

    Errors of the backend are logged and not raised. The backend is not called for a while after a
    missed deadline, see `Suspension`, nor before its late calls have ended, nor while all staging
    buffers of its share have been draining for longer than `TierTimeouts.move_s`: it must not wait
    for buffers that other tiers need. Its share is `num_buffers` staging buffers, and as many
    buffers of callers as `bound_callers` says. The fastest tier has index 0.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        *,
        timeouts: TierTimeouts,
        staging: StagingMemory,
        num_buffers: int,
    ) -> None:
        self.index = index
        self.backend = backend
        self.reports = Reports()
        self._timeouts = timeouts
        self.name = f"tier {index} ({type(backend).__name__})"
        self._calls = Calls()
        self._suspension = Suspension(self.name, timeouts.pause_s)
        self._log_pause = LogPause()
        self._staging = staging
        self._share = Share(num_buffers)
        self._callers: Share | None = None  # of the buffers of callers; None if they have none
        self._requests: dict[asyncio.Future[None], Descriptors] = {}  # that may touch such a buffer
        self._settling: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._num_given_up = 0  # stores that may still add blocks until `drain`
        self._num_drained = 0

    def observe(self, reports: Reports) -> None:
        """Report moves to `reports`, and let the backend report what only it knows."""
        self.reports = reports
        if (observable := self.backend.provide(Observable)) is not None:
            observable.observe(reports)
        reports.watch(self._gauges)

    @property
    def is_available(self) -> bool:
        """Whether the backend may be called: not suspended, no late call, and no share spent."""
        is_late = self._calls.num_late or self._suspension.is_on(runtime.monotonic())
        spent_s = self._share.spent_s
        if self._callers is not None:
            spent_s = max(spent_s, self._callers.spent_s)
        is_spent = spent_s > self._timeouts.move_s  # a working tier drains buffers in a moment
        return not (is_late or is_spent)

    async def ask(self, keys: Sequence[BlockKey]) -> set[BlockKey] | None:
        """Look up which of `keys` are present; None if the backend fails or is late."""
        if not keys:
            return set()
        if not self._may_call(Operation.LOOKUP, keys):
            return None
        began, call = runtime.monotonic(), self._look_up(keys)
        there = await self._await_answer(Operation.LOOKUP, keys, self._timeouts.lookup_s, call)
        status = Status.DONE
        if there is None:
            is_late = self._suspension.is_on(runtime.monotonic())
            status = Status.TIMED_OUT if is_late else Status.FAILED
        if self.reports:
            found, seconds = [key in (there or ()) for key in keys], runtime.monotonic() - began
            self.reports.tell(Asked(self.reports.tier, keys, found, seconds, status))
        return there

    async def _look_up(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        found = await self.backend.lookup(keys)  # a wrong number of answers raises in `zip`
        return {key for key, is_there in zip(keys, found, strict=True) if is_there}

    def moving(self, operation: Operation, cause: Cause = Cause.REQUEST) -> Move:
        """Return a function that stores or loads; every block is `FAILED` if the backend fails.

        Copies between tiers, which lock keys, and requests below the first tier, whose blocks other
        tiers may have, get a deadline, after which every block is `TIMED_OUT`.
        """
        if self._callers is not None and cause is Cause.REQUEST:
            return partial(self._move_in_share, self._callers, operation)
        return partial(self._move_in_time, operation, cause)

    def bound_callers(self, num_buffers: int) -> None:
        """Limit how many buffers of callers the tier may have at one time, draining ones too."""
        self._callers = Share(num_buffers)

    async def delete(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `delete_from`; every block may stay if the backend fails or is late."""
        deleted = None
        if self._may_call(Operation.DELETE, keys):
            call = self._when_quiet(lambda: delete_from(self.backend, keys))
            timeout_s = self._timeouts.move_s
            deleted = await self._await_answer(Operation.DELETE, keys, timeout_s, call)
        return deleted or (set(), set(keys))

    async def purge(self, prefix: bytes) -> bool:
        """Delete blocks as `Purgeable.purge` does; return whether the backend did so in time."""
        purgeable = self.backend.provide(Purgeable)
        if purgeable is None or not (self.is_available and (prefix or can_purge_all(purgeable))):
            return False
        purge = partial(purgeable.purge, prefix) if prefix else purgeable.purge
        try:
            await self._calls.wait_for(self._timeouts.close_s, self._when_quiet(purge))
        except Exception as exc:
            logger.warning("%s: could not delete every block", self.name, exc_info=exc)
            return False
        return True

    async def _when_quiet(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that removes blocks, once no abandoned store can bring them back."""
        num_given_up = self._num_given_up
        if num_given_up > self._num_drained:
            await self.backend.drain()
            self._num_drained = max(self._num_drained, num_given_up)
        return await call()

    async def drain(self) -> None:
        """See `Backend.drain`; also waits for abandoned calls."""
        await self._calls.drain()
        await self.backend.drain()

    async def drain_of(self, blocks: Descriptors) -> None:
        """Wait until no request touches the caller's buffer that these blocks are in.

        Raises `BackendUnavailableError` if the tier may never stop touching it.
        """
        if self._callers is None:  # requests are not counted
            await self.drain()
        for ended, others in list(self._requests.items()):
            if overlap(blocks, others):
                await asyncio.shield(ended)

    async def wait_for_requests(self) -> None:
        """Wait until nothing in the closed tier touches a buffer of a caller."""
        if self._settling:
            await asyncio.wait(self._settling)

    async def aclose(self) -> None:
        """Close the backend; after `TierTimeouts.close_s` the call is abandoned."""
        self._calls.cancel()
        self._closing.set()
        try:
            await self._calls.wait_for(self._timeouts.close_s, self.backend.aclose())
        except TimeoutError:
            logger.warning("%s: did not close within %g s", self.name, self._timeouts.close_s)

    def hold(
        self, sizes: Sequence[int], starts: Sequence[int]
    ) -> AbstractAsyncContextManager[StagedBlocks]:
        """Hold a staging buffer for blocks on their way from or to this tier.

        Raises `TimeoutError` if no buffer came back within `TierTimeouts.move_s`.
        """
        return self._staging.hold(sizes, starts, share=self._share, timeout_s=self._timeouts.move_s)

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.SUSPENDED: not self.is_available}

    def _may_call(self, operation: Operation, keys: Sequence[BlockKey]) -> bool:
        """Return whether the backend may be called; report a call that is skipped."""
        is_available = self.is_available
        if not is_available:
            self.reports.skipped(operation, keys)
        return is_available

    def _skip(
        self, operation: Operation, keys: Sequence[BlockKey], cause: Cause
    ) -> list[Outcome] | None:
        """Return the outcomes of a move that is skipped; None if the backend may be called."""
        if self._may_call(operation, keys):
            return None
        unavailable = Outcome(Status.TIMED_OUT, reason=f"{self.name} is not available")
        # A block to be written back is there, but cannot be read: that is no miss.
        is_miss = operation is Operation.LOAD and cause is not Cause.WRITE_BACK
        return [MISSING if is_miss else unavailable] * len(keys)

    async def _await_answer(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        timeout_s: float | None,
        call: Awaitable[T],
        *,
        keeps_caller: bool = False,
    ) -> T | None:
        """Await an answer; None if the backend fails or is late.

        A lookup goes on until its deadline when its caller is cancelled, so that a hanging tier is
        noticed even if no caller waits that long. `keeps_caller` as in `Calls.wait_for`.
        """
        what, is_late = f"{operation} of {len(keys)} blocks", False

        def note_late() -> None:
            nonlocal is_late
            is_late = True
            self._suspension.note_late(runtime.monotonic(), what, timeout_s or 0.0)
            self.reports.late(operation, keys)

        try:
            return await self._calls.wait_for(
                timeout_s,
                call,
                note_late=note_late,
                outlives_caller=operation is Operation.LOOKUP,
                keeps_caller=keeps_caller,
            )
        except Exception as exc:  # noqa: BLE001 - a tier that fails has nothing
            if timeout_s is None or type(exc) is not TimeoutError:
                line = "%s: %s failed", self.name, what
                self._log_pause.log(logger, logging.WARNING, *line, error=exc)
            elif not is_late:  # the backend's own `TimeoutError`
                note_late()
        return None

    async def _move_in_share(
        self, share: Share, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move blocks of a caller's buffer, which uses the share until nothing here touches it.

        Waits for a turn while the tier is available; each move before it has a deadline.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests[ended], is_quiet = blocks, True
        turn = asyncio.ensure_future(share.acquire())
        try:
            await asyncio.wait([turn], timeout=0)
            while (skipped := self._skip(operation, keys, Cause.REQUEST)) is None:
                if turn.done():
                    is_quiet = False
                    outcomes = await self._move_in_time(operation, Cause.REQUEST, keys, blocks)
                    is_quiet = all(outcome.memory_safe for outcome in outcomes)
                    return outcomes
                await asyncio.wait([turn], timeout=CHECK_PAUSE_S)
            return skipped
        finally:
            if not is_quiet:
                task = asyncio.create_task(self._settle(share, ended))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)
            else:
                self._end_request(ended)
                if not turn.cancel():
                    share.release()

    async def _settle(self, share: Share, ended: asyncio.Future[None]) -> None:
        if await share.settle([self.drain], f"a request in {self.name}", self._closing):
            self._end_request(ended)
        else:
            ended.set_exception(BackendUnavailableError(f"{self.name} may still touch a buffer"))
            ended.exception()  # mark it as fetched: maybe no `drain_of` awaits it

    def _end_request(self, ended: asyncio.Future[None]) -> None:
        del self._requests[ended]
        ended.set_result(None)

    async def _move_in_time(
        self, operation: Operation, cause: Cause, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        call, timeout_s = self._move(operation, keys, blocks, cause), self._timeouts.move_s
        if cause is Cause.REQUEST:
            if not self.index:
                return await call
            timeout_s *= max(-(-blocks.num_bytes // self._staging.buffer_bytes), 1)
        # A cancelled caller waits, too: a load writes to its memory, and a late store may bring
        # back blocks that are deleted after it.
        is_kept = cause is Cause.REQUEST or (cause, operation) == (Cause.PROMOTION, Operation.STORE)
        outcomes = await self._await_answer(operation, keys, timeout_s, call, keeps_caller=is_kept)
        reason = f"{self.name} took longer than {timeout_s:g} s"
        late = Outcome(Status.TIMED_OUT, memory_safe=False, reason=reason)
        return [late] * len(keys) if outcomes is None else list(outcomes)

    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors, cause: Cause
    ) -> list[Outcome]:
        """Move a batch, and log its failures once; see `_skip` for an unavailable tier."""
        is_store = operation is Operation.STORE
        if (skipped := self._skip(operation, keys, cause)) is not None:
            return skipped
        name = f"{self.name}: {operation}"
        move: Move = self.backend.store if is_store else self.backend.load
        if cause is Cause.WRITE_BACK and not is_store:
            source = self.backend.provide(CopySource)
            move = self.backend.load if source is None else source.load_for_copy
        call = partial(call_backend, move, name=name)
        is_quiet = False
        try:
            outcomes = await self.reports.move(operation, keys, blocks, call, cause=cause)
            is_quiet = all(outcome.memory_safe for outcome in outcomes)
        finally:
            self._num_given_up += is_store and not is_quiet
        return log_failed(self._log_pause, name, outcomes)
