"""Chaos through the asynchronous face of an engine, used by several tasks at a time."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Outcome
from tests.chaos.checked_memory import Batch, Part
from tests.chaos.faults import Kind, report, report_hang
from tests.chaos.session import DEFAULT_TIMEOUT_S, HANG_S, Session

NUM_TASKS = 3
RECOVERY_S = 45.0
"""Seconds until stores succeed again: after errors, the circuit breaker pauses writes for 30."""

T = TypeVar("T")


class AsynchronousFace:
    """Asynchronous face: draws operations and awaits them.

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
