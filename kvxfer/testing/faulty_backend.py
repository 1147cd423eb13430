"""Wrapper of a backend that injects the same faults for the same seed."""

import asyncio
import enum
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import xxhash

from kvxfer import runtime
from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import begin_aside, outlive_caller, wait_despite_cancel
from kvxfer.storage.backend import Backend, Outcome, Status, WrappingBackend
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Operation
from kvxfer.testing.payloads import copy_blocks, flip_bit

UNTIL_WAITING_TIMEOUT_S = 10.0

T = TypeVar("T")
Ask: TypeAlias = Callable[[Sequence[BlockKey]], Awaitable[list[bool]]]


class Fault(enum.Enum):
    """Kind of fault; `FAILURE` and `FLIP` hit a block, the others a whole call."""

    DELAY = "delay"
    HANG = "hang"
    STUCK = "stuck"
    LATE = "late"
    UNSAFE = "unsafe"
    ERROR = "error"
    FAILURE = "failure"
    FLIP = "flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Rates of faults: the probability of each kind, from 0 to 1.

    Attributes:
        delay: A call begins `delay_s` late.
        hang: A call begins only after `release`; it can be cancelled before.
        stuck: A call begins only after `release`, even if it was cancelled, like a thread in a
            system call. It touches the described memory no earlier.
        late: A store or load begins only after `release`, even if it was cancelled and has
            raised, like hardware that cannot be stopped. `drain` waits for it.
        unsafe: Like `late`, but the call returns at once: `FAILED`, with `memory_safe=False`.
        error: A call raises `BackendUnavailableError`; nothing was moved.
        failure: A block is `FAILED`; it was not moved.
        flip: One bit of a block is flipped: in the stored bytes, or in the loaded memory after
            the inner backend has verified it. The block is reported `DONE`.
        delay_s: Delay of a `DELAY` fault in seconds.
        operations: The operations that may be hit.
    """

    delay: float = 0.0
    hang: float = 0.0
    stuck: float = 0.0
    late: float = 0.0
    unsafe: float = 0.0
    error: float = 0.0
    failure: float = 0.0
    flip: float = 0.0
    delay_s: float = 0.001
    operations: frozenset[Operation] = field(
        default_factory=lambda: frozenset({Operation.STORE, Operation.LOAD})
    )


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Fault that was injected.

    Attributes:
        fault: Kind of the fault.
        operation: Operation that was hit.
        key: Key of the block that was hit; the first one of the batch when a whole call was hit.
    """

    fault: Fault
    operation: Operation
    key: BlockKey


@dataclass(frozen=True, slots=True)
class _Call:
    """Call of a backend. The ticket of a key alone decides the faults of that key."""

    operation: Operation
    keys: Sequence[BlockKey]
    tickets: Sequence[bytes]


class FaultInjector(WrappingBackend):
    """Base of wrappers that inject faults, which a subclass does in `_ask` and `_move`."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._going_on: dict[asyncio.Future[Any], None] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        return await self._ask(Operation.LOOKUP, keys, self.inner.lookup)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self._move(Operation.STORE, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self._move(Operation.LOAD, keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        return await self._ask(Operation.DELETE, keys, self.inner.delete)

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await self.require_quiet()
        await self.inner.drain()

    async def require_quiet(self) -> None:
        """Wait until all work begun by `go_on` has ended."""
        while self._going_on:
            await asyncio.wait(list(self._going_on))

    def go_on(self, work: Awaitable[T]) -> "asyncio.Future[T]":
        """Begin work that outlives its caller; `drain` waits for it."""
        future = asyncio.ensure_future(work)
        self._going_on[future] = None
        future.add_done_callback(lambda _: self._going_on.pop(future, None))
        return future

    @abstractmethod
    async def _ask(self, operation: Operation, keys: Sequence[BlockKey], ask: Ask) -> list[bool]:
        """Ask the inner backend about keys, or inject a fault."""

    @abstractmethod
    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Let the inner backend move blocks, or inject a fault."""


class FaultyBackend(FaultInjector):
    """Wrapper that injects faults into the calls of a backend.

    The faults of a key depend on the seed, the operation and how often the operation was given the
    key, not on the order in which tasks run. Closing the wrapper releases waiting calls and closes
    the inner backend.

    Attributes:
        rates: Rates of the faults; may be replaced at any time.
        injected: The faults injected so far, in order.
        late: Memory of the calls hit by `LATE` or `UNSAFE`; they touch it after `release`.
    """

    def __init__(self, inner: Backend, *, seed: int, rates: FaultRates) -> None:
        super().__init__(inner)
        self.rates = rates
        self.injected: list[InjectedFault] = []
        self.late: list[Descriptors] = []
        self._seed = seed
        self._attempts: Counter[tuple[Operation, BlockKey]] = Counter()
        # Engines run backends on a loop of their own; tests release calls from another thread.
        self._lock = runtime.lock()
        self._released = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._someone_waits = runtime.event()

    @property
    def waiting(self) -> int:
        """Number of calls that are waiting for `release`."""
        return len(self._waiters)

    def release(self) -> None:
        """Release all waiting calls, and let no later call wait; thread-safe."""
        with self._lock:
            self._released = True
            for waiter in self._waiters:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def until_waiting(self) -> None:
        """Wait until a call, on any event loop, is waiting for `release`.

        Raises:
            TimeoutError: No call did within ten seconds.
        """
        await until_set(self._someone_waits)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self.release()
        await self.drain()
        await self.inner.aclose()

    async def _ask(self, operation: Operation, keys: Sequence[BlockKey], ask: Ask) -> list[bool]:
        if await self._begin(self._call(operation, keys)):
            raise asyncio.CancelledError
        return await ask(keys)

    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        call = self._call(operation, keys)
        was_cancelled = await self._begin(call)
        is_unsafe = bool(keys) and self._hit(Fault.UNSAFE, call)
        if is_unsafe or (keys and self._hit(Fault.LATE, call)):
            self.late.append(blocks)
            late = self.go_on(self._move_late(call, blocks))
            if was_cancelled:
                raise asyncio.CancelledError
            unsafe = Outcome(Status.FAILED, memory_safe=False, reason="injected late move")
            return [unsafe] * len(keys) if is_unsafe else await outlive_caller(late)
        outcomes = await self._move_now(call, blocks)
        if was_cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def _move_late(self, call: _Call, blocks: Descriptors) -> list[Outcome]:
        await self._wait_for_release()
        return await self._move_now(call, blocks)

    async def _move_now(self, call: _Call, blocks: Descriptors) -> list[Outcome]:
        is_store, move = call.operation is Operation.STORE, getattr(self.inner, call.operation)
        if not call.keys or len(call.keys) != blocks.num_blocks:
            return list(await move(call.keys, blocks))  # misuse, which the inner backend refuses
        outcomes = [Outcome(Status.FAILED, reason="injected failure") for _ in call.keys]
        moved = [at for at, _ in enumerate(call.keys) if not self._hit(Fault.FAILURE, call, at)]
        if is_store and self.rates.flip:
            blocks = copy_blocks(blocks)  # the caller's memory stays unchanged
            self._flip(call, blocks, moved)
        if moved:
            chosen = blocks.take(np.array(moved)) if len(moved) < len(call.keys) else blocks
            ended = await move([call.keys[at] for at in moved], chosen)
            for at, outcome in zip(moved, ended, strict=True):
                outcomes[at] = outcome
        if not is_store:
            self._flip(call, blocks, [at for at in moved if outcomes[at].done])
        return outcomes

    def _flip(self, call: _Call, blocks: Descriptors, chosen: Sequence[int]) -> None:
        for at in chosen:
            if self._hit(Fault.FLIP, call, at):
                flip_bit(blocks, at, xxhash.xxh3_64_intdigest(call.tickets[at]))

    async def _begin(self, call: _Call) -> bool:
        """Inject faults of the whole call; return whether it was cancelled while stuck."""
        was_cancelled = False
        if not call.keys:
            return was_cancelled
        if self._hit(Fault.DELAY, call):
            await asyncio.sleep(self.rates.delay_s)
        if self._hit(Fault.HANG, call):
            await self._wait_for_release()
        if self._hit(Fault.STUCK, call):
            try:
                await wait_despite_cancel(self._wait_for_release())
            except asyncio.CancelledError:
                was_cancelled = True
        if self._hit(Fault.ERROR, call):
            raise BackendUnavailableError("injected error")
        return was_cancelled

    async def _wait_for_release(self) -> None:
        with self._lock:
            if self._released:
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            self._someone_waits.set()
        try:
            await waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                if not self._waiters:
                    self._someone_waits.clear()

    def _call(self, operation: Operation, keys: Sequence[BlockKey]) -> _Call:
        tickets = []
        for key in keys:
            self._attempts[operation, key] += 1
            attempt = self._attempts[operation, key]
            tickets.append(f"{self._seed}/{operation.value}/{attempt}/".encode() + key)
        return _Call(operation, keys, tickets)

    def _hit(self, fault: Fault, call: _Call, at: int = 0) -> bool:
        drawn = xxhash.xxh3_64_intdigest(fault.value.encode() + call.tickets[at]) / 2**64
        rate: float = getattr(self.rates, fault.value)
        if call.operation not in self.rates.operations or drawn >= rate:
            return False
        self.injected.append(InjectedFault(fault, call.operation, call.keys[at]))
        return True


async def until_set(event: threading.Event) -> None:
    """Wait until any thread sets an event, for at most ten seconds."""
    waiting = partial(event.wait, UNTIL_WAITING_TIMEOUT_S)
    if not await asyncio.wrap_future(begin_aside("kvxfer-testing", waiting)):
        raise TimeoutError(f"no call was held within {UNTIL_WAITING_TIMEOUT_S:g} s")


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
