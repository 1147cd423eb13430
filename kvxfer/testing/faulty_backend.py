"""A backend in which things go wrong, the same things for the same seed."""

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvxfer.errors import BackendUnavailableError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing.payloads import copy_blocks, flip_bit


class Operation(enum.Enum):
    """What a backend is asked to do."""

    LOOKUP = "lookup"
    STORE = "store"
    LOAD = "load"
    DELETE = "delete"


class Fault(enum.Enum):
    """What can go wrong, in the order in which it is tried.

    `DELAY`, `HANG`, `STUCK` and `ERROR` befall a whole call, `FAILURE` and `FLIP` a block.
    """

    DELAY = "delay"
    HANG = "hang"
    STUCK = "stuck"
    ERROR = "error"
    FAILURE = "failure"
    FLIP = "flip"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """How often what goes wrong; probabilities from 0 to 1.

    Attributes:
        delay: A call begins `delay_s` late.
        hang: A call does not begin before `release`, unless it is cancelled.
        stuck: A call does not end before `release` even when cancelled, like a thread in a
            system call; only then does it touch the described memory.
        error: A call raises `BackendUnavailableError`; nothing was moved.
        failure: A block is `FAILED`; it was not moved.
        flip: One bit of a block differs: of the stored bytes, or of the loaded memory after the
            inner backend has verified it. The block is reported `DONE`.
        delay_s: Seconds.
        operations: The operations that are hit.
    """

    delay: float = 0.0
    hang: float = 0.0
    stuck: float = 0.0
    error: float = 0.0
    failure: float = 0.0
    flip: float = 0.0
    delay_s: float = 0.001
    operations: frozenset[Operation] = field(
        default_factory=lambda: frozenset({Operation.STORE, Operation.LOAD})
    )


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Something that went wrong.

    Attributes:
        fault: What.
        operation: In which operation.
        key: Of which block; the first one of the batch when a whole call is hit.
    """

    fault: Fault
    operation: Operation
    key: BlockKey


class FaultyBackend(Backend):
    """Wraps a backend and lets things go wrong.

    What befalls a key depends on the seed, the operation and how often that key was seen in it,
    and not on the order in which tasks run. Closing it releases it and closes the inner backend.

    Args:
        inner: The backend that does the work.
        seed: Same seed, same faults.
        rates: How often what goes wrong.

    Attributes:
        inner: As given.
        rates: As given; may be replaced at any time.
        injected: What went wrong so far, in order.
        waiting: Calls that hang or are stuck now.
    """

    def __init__(self, inner: Backend, *, seed: int, rates: FaultRates) -> None:
        self.inner = inner
        self.rates = rates
        self.injected: list[InjectedFault] = []
        self.waiting = 0
        self._seed = seed
        self._attempts: Counter[tuple[Operation, BlockKey]] = Counter()
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let go of every call that hangs or is stuck, for good."""
        self._released.set()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        if await self._begin(Operation.LOOKUP, keys, self._draw(Operation.LOOKUP, keys)):
            raise asyncio.CancelledError
        return await self.inner.lookup(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self._move(Operation.STORE, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self._move(Operation.LOAD, keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.delete`."""
        if await self._begin(Operation.DELETE, keys, self._draw(Operation.DELETE, keys)):
            raise asyncio.CancelledError
        return await self.inner.delete(keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self.release()
        await self.inner.aclose()

    async def _move(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        dice = self._draw(operation, keys)
        cancelled = await self._begin(operation, keys, dice)
        if len(keys) != blocks.num_blocks:  # misuse is for the inner backend to refuse
            return await self._call(operation, keys, blocks)
        moved = [
            index
            for index, (key, die) in enumerate(zip(keys, dice, strict=True))
            if not self._hit(Fault.FAILURE, self.rates.failure, operation, key, die)
        ]
        outcomes = [Outcome(Status.FAILED, reason="injected failure") for _ in keys]
        if moved or not keys:
            chosen = blocks.take(np.array(moved)) if len(moved) < len(keys) else blocks
            done = await self._move_flipped(
                operation, [keys[i] for i in moved], chosen, [dice[i] for i in moved]
            )
            for index, outcome in zip(moved, done, strict=True):
                outcomes[index] = outcome
        if cancelled:
            raise asyncio.CancelledError
        return outcomes

    async def _move_flipped(
        self,
        operation: Operation,
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        dice: Sequence[random.Random],
    ) -> list[Outcome]:
        if operation is Operation.LOAD:
            outcomes = await self.inner.load(keys, blocks)
            moved = [index for index, outcome in enumerate(outcomes) if outcome.done]
        else:
            outcomes, moved = [], list(range(len(keys)))
        flipped = [
            index
            for index in moved
            if self._hit(Fault.FLIP, self.rates.flip, operation, keys[index], dice[index])
        ]
        if operation is Operation.STORE and flipped:
            blocks = copy_blocks(blocks)  # the caller's memory stays as it is
        for index in flipped:
            flip_bit(blocks, index, dice[index].getrandbits(32))
        if operation is Operation.STORE:
            outcomes = await self.inner.store(keys, blocks)
        return outcomes

    async def _call(
        self, operation: Operation, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        move = self.inner.store if operation is Operation.STORE else self.inner.load
        return await move(keys, blocks)

    async def _begin(
        self, operation: Operation, keys: Sequence[BlockKey], dice: Sequence[random.Random]
    ) -> bool:
        """Let what befalls the whole call happen; return whether it was cancelled when stuck."""
        if not keys:
            return False
        key, die, rates = keys[0], dice[0], self.rates
        cancelled = False
        if self._hit(Fault.DELAY, rates.delay, operation, key, die):
            await asyncio.sleep(rates.delay_s)
        if self._hit(Fault.HANG, rates.hang, operation, key, die):
            await self._wait_for_release()
        if self._hit(Fault.STUCK, rates.stuck, operation, key, die):
            while not self._released.is_set():
                try:
                    await self._wait_for_release()
                except asyncio.CancelledError:
                    cancelled = True
        if self._hit(Fault.ERROR, rates.error, operation, key, die):
            raise BackendUnavailableError("injected error")
        return cancelled

    async def _wait_for_release(self) -> None:
        self.waiting += 1
        try:
            await self._released.wait()
        finally:
            self.waiting -= 1

    def _draw(self, operation: Operation, keys: Sequence[BlockKey]) -> list[random.Random]:
        dice = []
        for key in keys:
            self._attempts[operation, key] += 1
            seen = f"{self._seed}/{operation.value}/{self._attempts[operation, key]}/".encode()
            dice.append(random.Random(xxhash.xxh3_64_intdigest(seen + key)))
        return dice

    def _hit(
        self, fault: Fault, rate: float, operation: Operation, key: BlockKey, die: random.Random
    ) -> bool:
        drawn = die.random()  # drawn in any case: one rate must not shift what another one does
        if drawn >= rate or operation not in self.rates.operations:
            return False
        self.injected.append(InjectedFault(fault, operation, key))
        return True
