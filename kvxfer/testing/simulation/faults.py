"""Faults of a backend in windows of virtual time, within what the contract of backends allows."""

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Purgeable, Status
from kvxfer.storage.calls import Move
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Operation
from kvxfer.testing.faulty_backend import Ask, FaultInjector
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.testing.simulation.scenario import Simulation
from kvxfer.testing.simulation.scheduler import FaultWindows

MAX_LATENCY_S = 0.02
CALLS = ("lookup", "store", "load", "delete", "purge", "drain")

T = TypeVar("T")


class TierFault(enum.StrEnum):
    """Fault of the backend calls that begin in a window of time.

    Attributes:
        SLOW: Calls begin later.
        HANG: Calls begin at the end of the window; they can be cancelled before.
        STUCK: Calls begin at the end of the window; a cancelled call ends no earlier.
        LATE: Cancelled calls end, but touch their memory later; `drain` waits for that.
        ERROR: Calls raise one of several errors. A `drain` that raises has waited for nothing.
        FOREIGN_CANCEL: Calls raise `CancelledError` although no caller cancelled them, and may
            touch their memory until `drain` returns.
        FAILED: Some blocks are `FAILED`.
        UNSAFE: Some blocks are `FAILED`, and their memory is touched until `drain` returns.
    """

    SLOW = "slow"
    HANG = "hang"
    STUCK = "stuck"
    LATE = "late"
    ERROR = "error"
    FOREIGN_CANCEL = "foreign_cancel"
    FAILED = "failed"
    UNSAFE = "unsafe"


class FaultyTier(FaultInjector):
    """Wrapper that delays each call a little, and injects faults in windows of time.

    Attributes:
        name: Name of the tier; it selects the random numbers of the tier.
        has_refused_drain: Whether a `drain` raised: an engine that closes may not free all memory.
        on_close: Awaited before the inner backend is closed.
    """

    has_refused_drain = False
    on_close: Callable[[], Awaitable[object]] | None = None

    def __init__(self, inner: Backend, simulation: Simulation, name: str) -> None:
        super().__init__(inner)
        self.name = name
        self._simulation = simulation
        self._num_calls: Counter[tuple[str, ...]] = Counter()
        self._windows = FaultWindows[TierFault]()

    def begin_fault(
        self, fault: TierFault, for_s: float, share: float, calls: Collection[str] = CALLS
    ) -> None:
        """Inject a fault into a share of the given calls that begin within `for_s` from now."""
        self._windows.begin(fault, self._simulation.now + for_s, share, calls)

    async def purge(self, prefix: bytes = b"") -> None:
        """See `Purgeable.purge`."""
        if (purgeable := self.inner.provide(Purgeable)) is not None:
            await self._call("purge", [], partial(purgeable.purge, prefix))
            return
        raise BackendUnavailableError(f"{self.name} cannot purge")

    async def drain(self) -> None:
        """See `Backend.drain`."""
        random, fault, _ = self._draw("drain", [])
        if fault is TierFault.ERROR:
            self.has_refused_drain = True
            _raise(fault, random)
        await super().drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await _latency(self._draw("aclose", [])[0])
        await self.require_quiet()
        if self.on_close is not None:
            await self.on_close()
        await self.inner.aclose()

    def _draw(self, name: str, keys: Sequence[BlockKey]) -> tuple[Random, TierFault | None, float]:
        """Draw the fault of a call, and the time at which it ends.

        The call's random numbers stay the same when other steps are cut.
        """
        call = (name, *(key.hex() for key in keys))
        self._num_calls[call] += 1
        random = self._simulation.random(f"{self.name} {call} {self._num_calls[call]}")
        return random, *next(self._windows.draw(self._simulation.now, name, random), (None, 0.0))

    async def _begin(
        self, name: str, keys: Sequence[BlockKey]
    ) -> tuple[Random, TierFault | None, float, bool]:
        """Draw a call, and delay it; also return whether it was cancelled and went on waiting."""
        random, fault, ends_at = self._draw(name, keys)
        await _latency(random)
        left_s, was_cancelled = ends_at - self._simulation.now, False
        if fault is TierFault.SLOW:
            await asyncio.sleep(random.random() * left_s)
        elif fault is TierFault.HANG:
            await asyncio.sleep(left_s)
        elif fault is TierFault.STUCK:
            was_cancelled = await _sleep_despite_cancel(ends_at, self._simulation)
        return random, fault, ends_at, was_cancelled

    async def _ask(self, operation: Operation, keys: Sequence[BlockKey], ask: Ask) -> list[bool]:
        return await self._call(operation.value, keys, partial(ask, keys))

    async def _call(
        self, name: str, keys: Sequence[BlockKey], call: Callable[[], Awaitable[T]]
    ) -> T:
        random, fault, _, was_cancelled = await self._begin(name, keys)
        _raise(fault, random)
        given = await call()
        await _latency(random)
        if was_cancelled:
            raise asyncio.CancelledError
        return given

    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        name, is_load = operation.value, operation is Operation.LOAD
        move: Move = self.inner.load if is_load else self.inner.store
        random, fault, ends_at, was_cancelled = await self._begin(name, keys)
        touch = partial(self._touch_until, ends_at, random, is_load=is_load)

        async def move_late() -> Sequence[Outcome]:
            await touch(blocks)
            return await move(keys, blocks)

        if fault is TierFault.FOREIGN_CANCEL:
            self.go_on(touch(blocks))
        _raise(fault, random)
        if fault is TierFault.LATE:
            return list(await asyncio.shield(self.go_on(move_late())))
        if fault in (TierFault.FAILED, TierFault.UNSAFE):
            kept = [at for at in range(len(keys)) if random.random() < 0.5]
            failed = [at for at in range(len(keys)) if at not in kept]
            is_safe = fault is TierFault.FAILED
            outcomes = [Outcome(Status.FAILED, memory_safe=is_safe, reason="injected")] * len(keys)
            if failed and not is_safe:
                self.go_on(touch(blocks.take(failed)))
            if kept:
                given = await move([keys[at] for at in kept], blocks.take(kept))
                for at, each in zip(kept, given, strict=True):
                    outcomes[at] = each
            return outcomes
        outcomes = list(await move(keys, blocks))
        await _latency(random)
        if was_cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def _touch_until(
        self, ends_at: float, random: Random, blocks: Descriptors, *, is_load: bool
    ) -> None:
        """Touch memory until `ends_at`: a load may write anything before it ends."""
        while self._simulation.now < ends_at:
            await asyncio.sleep(0.1 + (ends_at - self._simulation.now) / 3)
            if is_load:
                made = [random.randbytes(len(each)) for each in read_payloads(blocks)]
                write_payloads(blocks, made)


async def _latency(random: Random) -> None:
    drawn = random.random()
    if drawn > 0.35:
        await asyncio.sleep(0 if drawn < 0.5 else random.random() * MAX_LATENCY_S)


def _raise(fault: TierFault | None, random: Random) -> None:
    if fault is TierFault.FOREIGN_CANCEL:
        raise asyncio.CancelledError
    if fault is TierFault.ERROR:
        errors = (
            BackendUnavailableError("injected"),
            OSError(5, "injected"),
            RuntimeError("injected"),
            TimeoutError("injected"),
        )
        raise random.choice(errors)


async def _sleep_despite_cancel(ends_at: float, simulation: Simulation) -> bool:
    was_cancelled = False
    while simulation.now < ends_at:
        try:
            await asyncio.sleep(ends_at - simulation.now)
        except asyncio.CancelledError:
            was_cancelled = True
    return was_cancelled
