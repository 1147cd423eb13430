"""Injected faults: what a caller sees of a storage that is slow, hangs or lies."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.storages.probes import KEYS, Caches
from examples.storages.storages import Storage
from kvxfer import BlockKey, Outcome, TransferEngine
from kvxfer.testing import Fault, FaultRates, FaultyBackend, Operation
from kvxfer.testing.payloads import read_payloads, write_payloads

DEADLINE_S = 1.0
PATIENCE_S = 2.0
"""How long a caller without a deadline may wait before the table says that it gets no answer."""

SEED = 3
"""Seed with which a fault rate of 0.5 hits some of the four blocks, but not all."""

OF_BLOCKS = {Fault.FAILURE, Fault.FLIP}
CALLERS = {"with a deadline": DEADLINE_S, "without, as LMCache and SGLang call theirs": None}
"""Deadlines of the callers, by the heads of their columns."""


@dataclass(frozen=True, slots=True)
class Injection:
    """Fault that is injected between a storage and its caller."""

    what: str
    rates: FaultRates

    async def run(self, storage: Storage, folder: Path, timeout_s: float | None) -> str:
        """Store blocks and load them with the fault, and load them again without.

        Returns:
            What the caller sees, in bold where it is wrong.
        """
        caches = Caches()
        backend = storage.open(folder, caches.namespace)
        faulty = FaultyBackend(backend, seed=SEED, rates=FaultRates())
        async with TransferEngine(caches.memory.caches, faulty, timeout_s=timeout_s) as engine:
            caller = Caller(caches, faulty, engine)
            loading = Operation.LOAD in self.rates.operations
            if loading:
                await caller.store()
            faulty.rates = self.rates
            first = await caller.under_fault(caller.load() if loading else caller.store())
            then = _summary(
                await caller.load(), caller.what_was_hit() if not loading else set(KEYS)
            )
            return first if first == then else f"{first}; then {then}"


class Caller:
    """Engine above a storage, which reuses the memory that was reported safe."""

    def __init__(self, caches: Caches, faulty: FaultyBackend, engine: TransferEngine) -> None:
        self._caches, self._faulty, self._engine = caches, faulty, engine
        self._outcomes: list[Outcome] = []

    async def store(self) -> list[str]:
        """Store the bytes of each key; describe the outcome of each block."""
        self._caches.write(KEYS)
        self._outcomes = await self._engine.store(KEYS, [range(len(KEYS))])
        return ["stored" if each.done else _name(each) for each in self._outcomes]

    async def load(self) -> list[str]:
        """Load all blocks; describe the result of each."""
        self._caches.write([])
        self._outcomes = await self._engine.load(KEYS, [range(len(KEYS))])
        return self._caches.compare(KEYS, self._outcomes)

    async def under_fault(self, call: Coroutine[Any, Any, list[str]]) -> str:
        """Make a call, reuse the memory that is safe, end the fault, and describe the result."""
        waiting = asyncio.ensure_future(call)
        await asyncio.wait([waiting], timeout=PATIENCE_S)
        if not waiting.done():
            self._end_fault()
            await waiting
            return "**no answer**"
        text = _summary(waiting.result(), self.what_was_hit())
        free = [index for index, outcome in enumerate(self._outcomes) if outcome.memory_safe]
        other = b"\xee" * self._caches.num_bytes
        blocks = self._caches.memory.describe(0, range(len(KEYS)))
        used = [other if at in free else each for at, each in enumerate(read_payloads(blocks))]
        write_payloads(blocks, used)
        self._end_fault()
        await self._engine.drain()
        if any(read_payloads(blocks)[index] != other for index in free):
            return f"{text}, **and memory of others is written**"
        return text if len(free) == len(KEYS) else f"{text}, its memory kept until the call ends"

    def what_was_hit(self) -> set[BlockKey]:
        """Find the blocks that were hit: some, or all of a call."""
        injected = self._faulty.injected
        return {each.key for each in injected if each.fault in OF_BLOCKS} or set(KEYS)

    def _end_fault(self) -> None:
        self._faulty.rates = FaultRates()
        self._faulty.release()


def _summary(found: Sequence[str], hit: set[BlockKey]) -> str:
    """Describe the blocks that were hit, and the others if they differ."""
    those = {each for key, each in zip(KEYS, found, strict=True) if key in hit}
    others = {each for key, each in zip(KEYS, found, strict=True) if key not in hit} - those
    text = " or ".join(sorted(those))
    return f"{text}, the others {' or '.join(sorted(others))}" if others else text


def _name(outcome: Outcome) -> str:
    return outcome.status.value.replace("_", " ")


STORES, LOADS = frozenset({Operation.STORE}), frozenset({Operation.LOAD})

INJECTIONS = (
    Injection("a load begins late", FaultRates(delay=1, delay_s=0.1, operations=LOADS)),
    Injection("a load hangs", FaultRates(hang=1, operations=LOADS)),
    Injection("a load is stuck in a system call", FaultRates(stuck=1, operations=LOADS)),
    Injection("a load writes after it was given up", FaultRates(late=1, operations=LOADS)),
    Injection("a load raises", FaultRates(error=1, operations=LOADS)),
    Injection("some blocks cannot be loaded", FaultRates(failure=0.5, operations=LOADS)),
    Injection("a bit flips in memory, after a load", FaultRates(flip=0.5, operations=LOADS)),
    Injection("a store hangs", FaultRates(hang=1, operations=STORES)),
    Injection("a store reads after it was given up", FaultRates(late=1, operations=STORES)),
    Injection("a store raises", FaultRates(error=1, operations=STORES)),
    Injection("some blocks cannot be stored", FaultRates(failure=0.5, operations=STORES)),
    Injection("a bit flips in memory, before a store", FaultRates(flip=0.5, operations=STORES)),
)
"""All injected faults, in the order of the table."""
