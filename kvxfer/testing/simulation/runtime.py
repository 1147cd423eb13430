"""Runtime of a simulation: virtual time, seeded threads, locks, loops and random numbers."""

# ruff: noqa: D102 - the methods are those of `kvxfer.runtime.Runtime`

import asyncio
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from random import Random
from typing import Any, TypeVar, cast

from kvxfer.runtime import Disk, Runtime
from kvxfer.testing.simulation.disk import SimulatedDisk
from kvxfer.testing.simulation.event_loop import SimulatedLoop
from kvxfer.testing.simulation.network import Network
from kvxfer.testing.simulation.primitives import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedLock,
    SimulatedQueue,
)
from kvxfer.testing.simulation.scheduler import Scheduler, SimulatedThread

FIRST_WALL_TIME_S = 1_700_000_000.0
NUM_CORES = 2

FutureT = TypeVar("FutureT", bound=Future[Any])


class SimulatedRuntime(Runtime):
    """Runtime in which one seed decides everything that arguments leave open."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(Random(f"{seed}/order"))
        self.scheduler.describe_waiting = self._describe_tasks
        self.network = Network(self.scheduler, Random(f"{seed}/network"))
        self.loops: list[SimulatedLoop] = []
        self._random = Random(f"{seed}/random")
        self.files = SimulatedDisk(self.scheduler, Random(f"{seed}/disk"))

    def monotonic(self) -> float:
        return self.scheduler.now

    def wall_time(self) -> float:
        return FIRST_WALL_TIME_S + self.scheduler.now

    def sleep(self, seconds: float) -> None:
        self.scheduler.sleep(seconds)

    def token_bytes(self, num_bytes: int) -> bytes:
        return self._random.randbytes(num_bytes)

    def random(self) -> Random:
        return self._random

    def num_cores(self) -> int:
        """See `Runtime.num_cores`; constant, so that a seed does the same on every machine."""
        return NUM_CORES

    def start_thread(
        self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
    ) -> threading.Thread:
        thread: SimulatedThread = self.scheduler.start(lambda: target(*args), name)
        return cast("threading.Thread", thread)

    def lock(self) -> threading.Lock:
        return cast("threading.Lock", SimulatedLock(self.scheduler))

    def condition(self) -> threading.Condition:
        return cast("threading.Condition", SimulatedCondition(self.scheduler))

    def event(self) -> threading.Event:
        return cast("threading.Event", SimulatedEvent(self.scheduler))

    def queue(self) -> "SimpleQueue[Any]":
        return cast("SimpleQueue[Any]", SimulatedQueue(self.scheduler))

    def wait_futures(
        self, futures: Collection[FutureT], timeout_s: float | None = None
    ) -> tuple[list[FutureT], list[FutureT]]:
        turn = object()
        for future in futures:
            future.add_done_callback(lambda _: self.scheduler.wake(turn))
        self.scheduler.wait_until(lambda: all(each.done() for each in futures), turn, timeout_s)
        done = [each for each in futures if each.done()]
        return done, [each for each in futures if not each.done()]

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = SimulatedLoop(self.scheduler, self.network)
        self.loops.append(loop)
        return loop

    def disk(self) -> Disk:
        return cast("Disk", self.files)

    def open_socket(self, family: int, kind: int) -> socket.socket:
        return cast("socket.socket", self.network.open(family, kind))

    def listen(self, address: tuple[Any, ...], *, family: int, backlog: int) -> socket.socket:
        listening = self.network.open(family, socket.SOCK_STREAM)
        listening.bind(address)
        listening.listen(backlog)
        return cast("socket.socket", listening)

    def _describe_tasks(self) -> str:
        return "\n".join(loop.describe_tasks() for loop in self.loops if not loop.is_closed())
