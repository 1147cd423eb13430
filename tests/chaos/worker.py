"""Worker process of a chaos run: opens engines over tiers drawn from its seed, and uses them."""

import asyncio
import faulthandler
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import kvxfer
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import BackendUnavailableError, CapacityError
from kvxfer.storage.backend import Outcome
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction
from tests.chaos.checked_memory import PARTS, CheckedMemory
from tests.chaos.contents import SHAPES, Shape
from tests.chaos.faults import Kind, begin_log, logger, report, report_counts
from tests.chaos.session import HANG_S, Session, User

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


NUM_SWEEPS = 50
RECOVERY_S = 20.0


@dataclass(frozen=True)
class Plan:
    """Orders of a worker.

    Attributes:
        seed: Seed of its random numbers.
        folders: Folders for its files, as URLs without the options that it draws itself.
        holders: Addresses of the peers that hold the blocks of each shape.
        without: Disturbances that it leaves out.
    """

    seed: int
    folders: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...]
    without: frozenset[str]


def main(plan: Plan) -> int:
    """Use one engine after the other until told to end."""
    begin_log()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    rng, counts = random.Random(plan.seed), Counter[str]()
    while not stopping.is_set():
        shape = rng.choice(SHAPES)
        memory = CheckedMemory(shape, rng, counts, parts=PARTS not in plan.without)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        engine = open_engine(plan, shape, memory, rng)
        if engine is None:
            counts["engine not opened"] += 1
            stopping.wait(0.2)
            continue
        counts["engine opened"] += 1
        length_s = 1e9 if "reopen" in plan.without else rng.uniform(1, 10)
        until = time.monotonic() + length_s
        session = Session(engine, memory, shape, rng, counts, stopping, until, plan.without)
        User(session).run()
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
        return kvxfer.connect(
            urls,
            memory.caches,
            namespace=shape.namespace,
            blocks_per_chunk=shape.blocks_per_chunk,
            max_bytes_in_flight=rng.choice((512 << 10, 4 << 20, 256 << 20)),
            timeout_s=rng.choice((3.0, 10.0)),
        )
    except (BackendUnavailableError, CapacityError) as exc:
        logger.info("not opened: %r", exc)
        return None
    except Exception as exc:  # noqa: BLE001 - is what is looked for
        report(Kind.EXCEPTION, f"connect({urls}): {exc!r}", exc=exc)
        return None


def draw_url(tier: str, plan: Plan, shape: Shape, rng: random.Random) -> str:
    """Draw the URL of a tier."""
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


def sweep(plan: Plan, shape: Shape) -> int:
    """Load every key from every folder and peer, and check that each stores new blocks."""
    begin_log()
    rng, counts = random.Random(plan.seed), Counter[str]()
    for url in [
        *plan.folders,
        f"nixl://{','.join(plan.holders[shape.number])}",
    ]:
        memory = CheckedMemory(shape, rng, counts, parts=PARTS not in plan.without)
        memory.tiers = url
        faulthandler.dump_traceback_later(3 * HANG_S, exit=True)
        asyncio.run(_sweep_url(url, shape, memory))
        memory.check()
    report_counts(counts)
    return 0


async def _sweep_url(url: str, shape: Shape, memory: CheckedMemory) -> None:
    """Check that a store is `DONE` within some time, without disturbances."""
    until = time.monotonic() + RECOVERY_S
    problem = ""
    while time.monotonic() < until:
        try:
            engine = kvxfer.connect(
                url,
                memory.caches,
                namespace=shape.namespace,
                blocks_per_chunk=shape.blocks_per_chunk,
                timeout_s=10.0,
            )
        except BackendUnavailableError as exc:
            problem = repr(exc)
            await asyncio.sleep(1)
            continue
        async with engine:
            for _ in range(NUM_SWEEPS):
                await _move(engine, memory, Direction.LOAD)
            for _ in range(NUM_SWEEPS):
                outcomes = await _move(engine, memory, Direction.STORE)
                if any(outcome.done for outcome in outcomes):
                    return
                problem = ", ".join({outcome.reason for outcome in outcomes}) or problem
                await asyncio.sleep(0.1)
    report(Kind.EXCEPTION, f"takes no blocks after all is over: {problem}: {url}")


async def _move(
    engine: TransferEngine, memory: CheckedMemory, direction: Direction
) -> Sequence[Outcome]:
    if (batch := memory.lend(direction)) is None:
        return []
    move = engine.store if direction is Direction.STORE else engine.load
    outcomes = await move(
        batch.keys, batch.block_ids, first_block_indices=batch.first_block_indices
    )
    if unsafe := memory.settle(batch, outcomes):
        await engine.drain()
        memory.give_back(unsafe)
    return outcomes
