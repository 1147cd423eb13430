"""Process of a simulation: an event loop on a thread of its own, to be stopped and killed."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from kvxfer.runtime import LoopThread, begin_aside
from kvxfer.testing.simulation.scenario import Simulation
from kvxfer.testing.simulation.scheduler import SimulatedProcess

FIRST_PID = 1000
LAST_S = 300.0
"""Virtual time that `ProcessRun.bury` may take."""

T = TypeVar("T")


class ProcessRun:
    """Process of a simulation, with an event loop on a thread of its own.

    After a restart, the new process has the name of the old one.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation = simulation
        simulation.num_processes += 1
        self.process = SimulatedProcess(name, FIRST_PID + simulation.num_processes)
        with self._inside():
            self.loop = LoopThread(name)

    @property
    def is_alive(self) -> bool:
        """Whether the process was not killed."""
        return not self.process.has_ended

    async def call(self, func: Callable[[], T]) -> T:
        """Call a function that may block, on a thread of the process."""
        with self._inside():
            called = begin_aside(f"{self.process.name} calls", func)
        return await asyncio.wrap_future(called)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the process."""
        return await asyncio.wrap_future(self.loop.submit(work))

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self._simulation.note(f"stop {self.process.name}")
        self.process.is_stopped = True

    def go_on(self) -> None:
        """Continue the process, as SIGCONT does, unless it was killed."""
        self.process.is_stopped = self.process.has_ended

    def kill(self, lost_for_s: float | None = None) -> None:
        """Kill the process: none of its threads runs again, and its connections end.

        Peers on other machines do not notice for `lost_for_s`.
        """
        self._simulation.note(f"kill {self.process.name}")
        self.process.has_ended = self.process.is_stopped = True
        self._simulation.runtime.network.end(self.process, lost_for_s)

    async def bury(self, end: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `end` to free what a killed process holds, after everything was checked."""
        self.process.is_stopped = False
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LAST_S):
                await self.run(end())

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Start threads and open sockets as the process, inside the block."""
        thread = self._simulation.runtime.scheduler.current
        before, thread.process = thread.process, self.process
        try:
            yield
        finally:
            thread.process = before
