"""Fault-injecting backend: a wrapper that injects the same faults for the same seed."""

import asyncio
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

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


class Fault(enum.Enum):
    """Kind of fault, in the order in which they are drawn.

    `DELAY`, `HANG`, `STUCK`, `LATE` and `ERROR` hit a whole call, `FAILURE` and `FLIP` a block.
    """

    DELAY = "delay"
    HANG = "hang"
    STUCK = "stuck"
    LATE = "late"
    ERROR = "error"
    FAILURE = "failure"
    FLIP = "flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Rates of faults: the probability of each kind, from 0 to 1.

    Attributes:
        delay: A call begins `delay_s` late.
        hang: A call does not begin before `release`, unless it is cancelled.
        stuck: A call does not end before `release` even when cancelled, like a thread in a
            system call; only then does it touch the described memory.
        late: A store or load does not begin before `release`, and does so even if it was cancelled
            and raised at once, like hardware that cannot be stopped. `drain` waits for it.
        error: A call raises `BackendUnavailableError`; nothing was moved.
        failure: A block is `FAILED`; it was not moved.
        flip: One bit of a block differs: of the stored bytes, or of the loaded memory after the
            inner backend has verified it. The block is reported `DONE`.
        delay_s: Delay of a `DELAY` fault in seconds.
        operations: The operations that are hit.
    """

    delay: float = 0.0
    hang: float = 0.0
    stuck: float = 0.0
    late: float = 0.0
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


class FaultyBackend(WrappingBackend):
    """Wrapper of a backend that injects faults.

    The faults of a key depend on the seed, the operation and the number of times that the key was
    used in it, not on the order in which tasks run. Closing the wrapper releases held calls and
    closes the inner backend.

    Args:
        inner: The backend that does the work.
        seed: Seed of the faults.
        rates: Rates of the faults.

    Attributes:
        rates: As given; may be replaced at any time.
        injected: The faults injected so far, in order.
        late: Memory of calls hit by `LATE`, which they touch after `release`.
    """

    def __init__(self, inner: Backend, *, seed: int, rates: FaultRates) -> None:
        super().__init__(inner)
        self.rates = rates
        self.injected: list[InjectedFault] = []
        self.late: list[Descriptors] = []
        self._late_moves: set[asyncio.Future[list[Outcome]]] = set()
        self._seed = seed
        self._attempts: Counter[tuple[Operation, BlockKey]] = Counter()
        # Engines run backends on a loop of their own, and tests release them from another thread.
        self._lock = runtime.lock()
        self._released = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._someone_waits = runtime.event()

    @property
    def waiting(self) -> int:
        """Number of calls that hang or are stuck now."""
        return len(self._waiters)

    def release(self) -> None:
        """Release every call that hangs or is stuck, for good; thread-safe."""
        with self._lock:
            self._released = True
            for waiter in self._waiters:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def until_waiting(self) -> None:
        """Wait until a call hangs or is stuck, on any event loop.

        Raises:
            TimeoutError: No call did within ten seconds.
        """
        waiting = partial(self._someone_waits.wait, UNTIL_WAITING_TIMEOUT_S)
        if not await asyncio.wrap_future(begin_aside("kvxfer-testing", waiting)):
            raise TimeoutError("no call hangs")

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        if await self._begin(Operation.LOOKUP, keys, self._tickets(Operation.LOOKUP, keys)):
            raise asyncio.CancelledError
        return await self.inner.lookup(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self._move(Operation.STORE, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self._move(Operation.LOAD, keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        if await self._begin(Operation.DELETE, keys, self._tickets(Operation.DELETE, keys)):
            raise asyncio.CancelledError
        return await self.inner.delete(keys)

    async def drain(self) -> None:
        """See `Backend.drain`."""
        while self._late_moves:
            await asyncio.wait(self._late_moves)
        await self.inner.drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self.release()
        await self.drain()
        await self.inner.aclose()

    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        tickets = self._tickets(operation, keys)
        cancelled = await self._begin(operation, keys, tickets)
        if keys and self._hit(Fault.LATE, self.rates.late, operation, keys[0], tickets[0]):
            self.late.append(blocks)
            late = asyncio.ensure_future(self._move_late(operation, keys, blocks, tickets))
            self._late_moves.add(late)
            late.add_done_callback(self._late_moves.discard)
            return await outlive_caller(late)
        outcomes = await self._move_now(operation, keys, blocks, tickets)
        if cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def _move_late(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        tickets: Sequence[bytes],
    ) -> list[Outcome]:
        await self._wait_for_release()
        return await self._move_now(operation, keys, blocks, tickets)

    async def _move_now(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        tickets: Sequence[bytes],
    ) -> list[Outcome]:
        move = self._store if operation is Operation.STORE else self._load
        if not keys or len(keys) != blocks.num_blocks:
            return await move(keys, blocks, [])  # misuse, which the inner backend refuses
        outcomes = [Outcome(Status.FAILED, reason="injected failure") for _ in keys]
        moved = [
            index
            for index, (key, ticket) in enumerate(zip(keys, tickets, strict=True))
            if not self._hit(Fault.FAILURE, self.rates.failure, operation, key, ticket)
        ]
        if moved:
            chosen = blocks.take(np.array(moved)) if len(moved) < len(keys) else blocks
            done = await move([keys[i] for i in moved], chosen, [tickets[i] for i in moved])
            for index, outcome in zip(moved, done, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _store(
        self, keys: Sequence[BlockKey], blocks: Descriptors, tickets: Sequence[bytes]
    ) -> list[Outcome]:
        flipped = [
            index
            for index, ticket in enumerate(tickets)
            if self._hit(Fault.FLIP, self.rates.flip, Operation.STORE, keys[index], ticket)
        ]
        if flipped:
            blocks = copy_blocks(blocks)  # the caller's memory stays unchanged
            for index in flipped:
                flip_bit(blocks, index, xxhash.xxh3_64_intdigest(tickets[index]))
        return await self.inner.store(keys, blocks)

    async def _load(
        self, keys: Sequence[BlockKey], blocks: Descriptors, tickets: Sequence[bytes]
    ) -> list[Outcome]:
        outcomes = await self.inner.load(keys, blocks)
        for index, (key, ticket) in enumerate(zip(keys, tickets, strict=True)):
            done = outcomes[index].done
            if done and self._hit(Fault.FLIP, self.rates.flip, Operation.LOAD, key, ticket):
                flip_bit(blocks, index, xxhash.xxh3_64_intdigest(ticket))
        return outcomes

    async def _begin(
        self, operation: Operation, keys: Sequence[BlockKey], tickets: Sequence[bytes]
    ) -> bool:
        """Inject faults of the whole call; return whether it was cancelled while stuck."""
        if not keys:
            return False
        key, ticket, rates = keys[0], tickets[0], self.rates
        cancelled = False
        if self._hit(Fault.DELAY, rates.delay, operation, key, ticket):
            await asyncio.sleep(rates.delay_s)
        if self._hit(Fault.HANG, rates.hang, operation, key, ticket):
            await self._wait_for_release()
        if self._hit(Fault.STUCK, rates.stuck, operation, key, ticket):
            try:
                await wait_despite_cancel(self._wait_for_release())
            except asyncio.CancelledError:
                cancelled = True
        if self._hit(Fault.ERROR, rates.error, operation, key, ticket):
            raise BackendUnavailableError("injected error")
        return cancelled

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

    def _tickets(self, operation: Operation, keys: Sequence[BlockKey]) -> list[bytes]:
        """Make one ticket per key, which determines its faults independently of the batch."""
        tickets = []
        for key in keys:
            self._attempts[operation, key] += 1
            attempt = self._attempts[operation, key]
            tickets.append(f"{self._seed}/{operation.value}/{attempt}/".encode() + key)
        return tickets

    def _hit(
        self, fault: Fault, rate: float, operation: Operation, key: BlockKey, ticket: bytes
    ) -> bool:
        drawn = xxhash.xxh3_64_intdigest(fault.value.encode() + ticket) / 2**64
        if operation not in self.rates.operations or drawn >= rate:
            return False
        self.injected.append(InjectedFault(fault, operation, key))
        return True


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
