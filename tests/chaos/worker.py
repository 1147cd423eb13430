"""Worker process of a chaos run: opens engines over tiers drawn from its seed, and uses them."""

import asyncio
import faulthandler
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import kvxfer
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import BackendUnavailableError, CapacityError
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction
from tests.chaos.faults import Kind, begin_log, logger, report, report_counts, report_hang
from tests.chaos.memory import SHAPES, CheckedMemory, Chunk, Shape

import_nixl(otherwise="run without peers")  # processes are forked from one that has

TIERS = (
    ("host",),
    ("file",),
    ("nixl",),
    ("host", "file"),
    ("host", "nixl"),
    ("file", "nixl"),
    ("host", "file", "nixl"),
    ("host", "nixl", "file"),
)
OPERATIONS = {"store": 40, "load": 45, "lookup": 10, "delete": 2}

HANG_S = 30.0
"""Seconds that a call may take beyond its deadline. Processes are stopped for a few seconds at
most, and the machine may be busy."""

TIMEOUT_S = 10.0
COUNTS_EVERY_S = 1.0
NUM_TASKS = 3
NUM_SWEEPS = 50
SWEPT_WITHIN_S = 20.0

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """Orders for a worker: its seed, the URLs of `file://`, and the holders of each shape."""

    seed: int
    folders: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...]


def main(plan: Plan) -> int:
    """Use one engine after the other until told to end."""
    begin_log()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    rng, counts = random.Random(plan.seed), Counter[str]()
    while not stopping.is_set():
        shape = rng.choice(SHAPES)
        memory = CheckedMemory(shape, rng, counts)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        engine = open_engine(plan, shape, memory, rng)
        if engine is None:
            counts["engine not opened"] += 1
            stopping.wait(0.2)
            continue
        counts["engine opened"] += 1
        user = User(engine, memory, shape, rng, counts, cancels=True)
        asyncio.run(user.run(stopping, time.monotonic() + rng.uniform(1, 10)))
        memory.check()
        report_counts(counts)
    return 0


def open_engine(
    plan: Plan, shape: Shape, memory: CheckedMemory, rng: random.Random
) -> TransferEngine | None:
    """Open an engine over random tiers; None when one of them is unavailable now."""
    urls = [draw_url(tier, plan, shape, rng) for tier in rng.choice(TIERS)]
    memory.tiers = " ".join(urls)
    try:
        return connect(
            urls,
            memory,
            shape,
            max_bytes_in_flight=rng.choice((512 << 10, 4 << 20, 256 << 20)),
            timeout_s=rng.choice((3.0, TIMEOUT_S)),
        )
    except (BackendUnavailableError, CapacityError) as exc:
        logger.info("not opened: %r", exc)
        return None
    except Exception as exc:  # noqa: BLE001 - is what is looked for
        report(Kind.EXCEPTION, f"connect({urls}): {exc!r}", exc=exc)
        return None


def connect(
    urls: str | list[str], memory: CheckedMemory, shape: Shape, **options: Any
) -> TransferEngine:
    size = shape.blocks_per_chunk
    return kvxfer.connect(
        urls, memory.caches, namespace=shape.namespace, blocks_per_chunk=size, **options
    )


def draw_url(tier: str, plan: Plan, shape: Shape, rng: random.Random) -> str:
    if tier == "host":
        return f"host://?capacity={rng.choice((3, 8))}MiB&eviction={rng.choice(('lru', 'arc'))}"
    if tier == "file":
        options = {
            "eviction": rng.choice(("lru", "arc")),
            "engine": rng.choice(("auto", "auto", "posix")),
            "direct": rng.choice(("auto", "off")),
            "durability": rng.choice(("none", "none", "fsync")),
        }
        chosen = "&".join(f"{name}={value}" for name, value in options.items())
        return f"{rng.choice(plan.folders)}&{chosen}"
    peers = plan.holders[shape.number]
    replicas = rng.randint(1, len(peers))
    transport = rng.choice(("auto", "socket"))
    return (
        f"nixl://{','.join(peers)}?transport={transport}&replicas={replicas}"
        "&timeout_s=2&lease_s=2&heartbeat_s=0.5"
    )


class User:
    """User of an engine: several tasks that draw operations and await them."""

    def __init__(
        self,
        engine: TransferEngine,
        memory: CheckedMemory,
        shape: Shape,
        rng: random.Random,
        counts: Counter[str],
        *,
        cancels: bool,
    ) -> None:
        self._engine, self._memory, self._shape = engine, memory, shape
        self._rng, self._counts, self._cancels = rng, counts, cancels
        self._calm = asyncio.Event()
        self._calm.set()
        self._num_draining = 0
        self._reported = 0.0

    async def run(self, stopping: threading.Event, until: float) -> None:
        """Use the engine until `until`, or until told to stop, and close it."""

        async def work() -> None:
            while time.monotonic() < until and not stopping.is_set():
                self._tell()
                await self._calm.wait()
                [operation] = self._rng.choices(list(OPERATIONS), list(OPERATIONS.values()))
                await self._act(operation)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_TASKS):
                tasks.create_task(work())
        await self._within("aclose", self._engine.aclose(), 0.0)

    async def move(self, direction: Direction) -> str:
        """Store or load a batch; return why some of it was not done."""
        if (batch := self._memory.lend(direction)) is None:
            await self._drain([])
            return ""
        is_load = direction is Direction.LOAD
        if is_load and self._rng.random() < 0.5:  # as engines do
            await self._within("lookup", self._engine.lookup(batch.keys))
        move = self._engine.load if is_load else self._engine.store
        call = move(batch.keys, batch.block_ids)
        outcomes = await self._within(str(direction), call, cancel_s=self._draw_s())
        unsafe = batch.chunks if outcomes is None else self._memory.settle(batch, outcomes)
        if unsafe:
            await self._drain(unsafe)
        return ", ".join({outcome.reason for outcome in outcomes or ()})

    async def _act(self, operation: str) -> None:
        if operation in {"store", "load"}:
            await self.move(Direction[operation.upper()])
            return
        group = self._rng.choice(self._shape.groups)
        keys = self._memory.draw_keys(group, self._rng.randint(1, 8))
        self._counts[operation] += 1
        if operation == "delete":
            deleting = self._engine.submit_call(self._engine.backend.delete(keys))
            await self._within("delete", asyncio.wrap_future(deleting))
            return
        found = await self._within("lookup", self._engine.lookup(keys), cancel_s=self._draw_s())
        if found is not None and (
            len(found) != len(keys) or any(type(each) is not bool for each in found)
        ):
            report(Kind.EXCEPTION, f"a lookup of {len(keys)} keys gave {found}")

    def _tell(self) -> None:
        if time.monotonic() > self._reported + COUNTS_EVERY_S:
            self._reported = time.monotonic()
            report_counts(self._counts)
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)

    def _draw_s(self) -> float | None:
        """Draw the seconds after which a call is cancelled, None for never."""
        if not self._cancels or self._rng.random() > 0.1:
            return None
        self._counts["cancel"] += 1
        return self._rng.choice((0.0, self._rng.uniform(0, 0.01), self._rng.uniform(0, 0.3)))

    async def _drain(self, chunks: list[Chunk]) -> None:
        """Reclaim blocks of unsafe outcomes, once drained; nothing new begins meanwhile."""
        self._num_draining += 1
        self._calm.clear()
        await self._within("drain", self._engine.drain())
        self._num_draining -= 1
        if not self._num_draining:
            self._calm.set()
        self._counts["drain"] += 1
        self._memory.give_back(chunks)

    async def _within(
        self,
        what: str,
        call: Coroutine[Any, Any, T] | asyncio.Future[T],
        limit_s: float = TIMEOUT_S,
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
            self._counts[f"{what} BackendUnavailableError"] += 1
        except Exception as exc:  # noqa: BLE001 - is what is looked for
            report(Kind.EXCEPTION, f"{what} raised {exc!r}", exc=exc)
        return None


def sweep(plan: Plan, shape: Shape) -> int:
    """Load every key from every folder and peer, and check that each stores new blocks."""
    begin_log()
    rng, counts = random.Random(plan.seed), Counter[str]()
    for url in [*plan.folders, f"nixl://{','.join(plan.holders[shape.number])}"]:
        memory = CheckedMemory(shape, rng, counts)
        memory.tiers = url
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
        asyncio.run(_sweep_url(url, shape, memory, rng, counts))
        memory.check()
    report_counts(counts)
    return 0


async def _sweep_url(
    url: str, shape: Shape, memory: CheckedMemory, rng: random.Random, counts: Counter[str]
) -> None:
    """Check that a store is `DONE` within some time, without disturbances."""
    until, problem = time.monotonic() + SWEPT_WITHIN_S, ""
    num_stored = counts["store DONE"]
    while time.monotonic() < until:
        try:
            engine = connect(url, memory, shape, timeout_s=TIMEOUT_S)
        except BackendUnavailableError as exc:
            problem = repr(exc)
            await asyncio.sleep(1)
            continue
        async with engine:
            user = User(engine, memory, shape, rng, counts, cancels=False)
            for _ in range(NUM_SWEEPS):
                await user.move(Direction.LOAD)
            for _ in range(NUM_SWEEPS):
                problem = await user.move(Direction.STORE) or problem
                if counts["store DONE"] > num_stored:
                    return
                await asyncio.sleep(0.1)
    report(Kind.EXCEPTION, f"takes no blocks after all is over: {problem}: {url}")
