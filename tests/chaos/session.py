"""Session of a chaos worker: one engine from opening to closing, used by several tasks."""

import asyncio
import faulthandler
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction
from tests.chaos.checked_memory import Batch, CheckedMemory, Part
from tests.chaos.contents import Shape
from tests.chaos.faults import Kind, report, report_counts, report_hang

HANG_S = 30.0
"""Seconds that a call may take beyond its deadline. Processes are stopped for a few seconds at
most, and the machine may be busy."""

DEFAULT_TIMEOUT_S = 10.0
COUNTS_EVERY_S = 1.0
CANCEL, SHORT_TIMEOUT = "cancel", "short-timeout"
NUM_TASKS = 3
RECOVERY_S = 45.0
"""Seconds until stores succeed again: after errors, the circuit breaker pauses writes for 30."""

T = TypeVar("T")


@dataclass
class Session:
    """Session: an engine, the caches of its blocks, and its deadline.

    Attributes:
        without: Disturbances that are left out.
    """

    engine: TransferEngine
    memory: CheckedMemory
    shape: Shape
    rng: random.Random
    counts: Counter[str]
    stopping: threading.Event
    until: float
    without: frozenset[str]
    _reported: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the session goes on; tells the conductor that this process is alive."""
        now = time.monotonic()
        if now > self._reported + COUNTS_EVERY_S:
            self._reported = now
            report_counts(self.counts)
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
        return now < self.until and not self.stopping.is_set()

    def draw_operation(self) -> str:
        """Draw the next operation."""
        names, weights = ("store", "load", "lookup", "delete"), (40, 45, 10, 2)
        return self.rng.choices(names, weights)[0]

    def draw_batch(self, operation: str) -> Batch | None:
        """Lend the blocks for a store or load."""
        return self.memory.lend(Direction[operation.upper()])

    def draw_some_keys(self) -> list[BlockKey]:
        """Draw keys of any group."""
        group = self.rng.choice(self.shape.groups)
        return self.memory.draw_keys(group, self.rng.randint(1, 8))

    def draw_timeout(self) -> float | None:
        """Draw a deadline, sometimes one that is too short."""
        if SHORT_TIMEOUT not in self.without and self.rng.random() < 0.1:
            self.counts[SHORT_TIMEOUT] += 1
            return self.rng.uniform(0, 0.02)
        return self.rng.choice((None, 5.0))

    def draw_cancellation(self) -> float | None:
        """Draw the seconds after which a call is cancelled, None for never."""
        if CANCEL in self.without or self.rng.random() > 0.1:
            return None
        self.counts[CANCEL] += 1
        return self.rng.choice((0.0, self.rng.uniform(0, 0.01), self.rng.uniform(0, 0.3)))


class User:
    """User of an engine: several tasks that draw operations and await them.

    Args:
        session: Session of the engine.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._engine = session.engine
        self._calm = asyncio.Event()
        self._num_draining = 0

    def run(self) -> None:
        """Use the engine until the session ends, and close it."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._calm.set()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_TASKS):
                tasks.create_task(self._work())
        if self._session.stopping.is_set():
            await self._recover()
        await self._within("aclose", self._engine.aclose(), 0.0)

    async def _recover(self) -> None:
        """Check that the engine still stores blocks, now without disturbances."""
        until, problem = time.monotonic() + RECOVERY_S, ""
        while time.monotonic() < until:
            if (batch := self._session.draw_batch("store")) is None:
                continue
            call = self._engine.store(
                batch.keys, batch.block_ids, first_block_indices=batch.first_block_indices
            )
            outcomes = await self._within("store", call, DEFAULT_TIMEOUT_S)
            await self._settle(batch, outcomes)
            if any(outcome.done for outcome in outcomes or ()):
                return
            problem = ", ".join({outcome.reason for outcome in outcomes or ()}) or problem
            await asyncio.sleep(0.1)
        tiers = self._session.memory.tiers
        report(Kind.EXCEPTION, f"takes no blocks after all is over: {problem}: {tiers}")

    async def _work(self) -> None:
        while self._session.goes_on:
            await self._calm.wait()
            operation = self._session.draw_operation()
            if operation in {"store", "load"}:
                await self._move(operation)
            elif operation == "lookup":
                await self._look_up()
            else:
                keys = self._session.draw_some_keys()
                call = self._engine.submit_call(self._engine.backend.delete(keys))
                await self._within("delete", asyncio.wrap_future(call), DEFAULT_TIMEOUT_S)
                self._session.counts["delete"] += 1

    async def _move(self, operation: str) -> None:
        if (batch := self._session.draw_batch(operation)) is None:
            await self._drain([])
            return
        move = self._engine.store if operation == "store" else self._engine.load
        timeout_s, cancel_s = self._session.draw_timeout(), self._session.draw_cancellation()
        if operation == "load" and self._session.rng.random() < 0.5:  # as engines do
            await self._within("lookup", self._engine.lookup(batch.keys), DEFAULT_TIMEOUT_S)
        call = move(
            batch.keys,
            batch.block_ids,
            first_block_indices=batch.first_block_indices,
            timeout_s=timeout_s,
        )
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        outcomes = await self._within(operation, call, limit_s, cancel_s)
        await self._settle(batch, outcomes)

    async def _settle(self, batch: Batch, outcomes: list[Outcome] | None) -> None:
        parts = batch.parts
        if outcomes is not None:
            parts = self._session.memory.settle(batch, outcomes)
        if parts:
            await self._drain(parts)

    async def _look_up(self) -> None:
        keys = self._session.draw_some_keys()
        cancel_s = self._session.draw_cancellation()
        found = await self._within("lookup", self._engine.lookup(keys), DEFAULT_TIMEOUT_S, cancel_s)
        self._session.counts["lookup"] += 1
        if found is not None and [bool(each) for each in found] != found:
            report(Kind.EXCEPTION, f"a lookup of {len(keys)} keys gave {found}")
        if found is not None and len(found) != len(keys):
            report(Kind.EXCEPTION, f"a lookup of {len(keys)} keys gave {found}")

    async def _drain(self, parts: list[Part]) -> None:
        """Reclaim blocks of unsafe outcomes, once drained; nothing new begins meanwhile."""
        self._num_draining += 1
        self._calm.clear()
        await self._within("drain", self._engine.drain(), DEFAULT_TIMEOUT_S)
        self._num_draining -= 1
        if not self._num_draining:
            self._calm.set()
        self._session.counts["drain"] += 1
        self._session.memory.give_back(parts)

    async def _within(
        self,
        what: str,
        call: Coroutine[Any, Any, T] | asyncio.Future[T],
        limit_s: float,
        cancel_s: float | None = None,
    ) -> T | None:
        """Await a call that must end in time; None when it was cancelled or the backend is gone."""
        task = asyncio.ensure_future(call)
        if cancel_s is not None:
            asyncio.get_running_loop().call_later(cancel_s, task.cancel)
        _, late = await asyncio.wait({task}, timeout=limit_s + HANG_S)
        if late:
            loops = asyncio.get_running_loop(), self._engine._loop._loop
            report_hang(f"{what} of {self._engine.backend!r}", set(loops))
        try:
            return task.result()
        except asyncio.CancelledError as exc:
            if cancel_s is None:
                report(Kind.EXCEPTION, f"{what} was cancelled by nobody", exc=exc)
        except BackendUnavailableError:
            self._session.counts[f"{what} BackendUnavailableError"] += 1
        except Exception as exc:  # noqa: BLE001 - is what is looked for
            report(Kind.EXCEPTION, f"{what} raised {exc!r}", exc=exc)
        return None
