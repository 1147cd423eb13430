"""Benchmark of the journal: the processor time that it adds to requests."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import torch

from benchmarks.batches import bench_folder, make_caches, make_keys
from benchmarks.report import BenchRow, compare
from kvxfer.connect import connect
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import AskGauges, Event, Observer
from kvxfer.telemetry.journal import Journal
from kvxfer.transfer.engine import TransferEngine

BATCH_BYTES = 64 << 20
NAMESPACE = Namespace(model="m", revision="1")
CASES = {"host memory": 64 << 10, "host memory and files": 1 << 20}
"""Media, with the block size in bytes."""


class TimedJournal(Observer):
    """Journal that measures its own processor time, on all threads."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(str(folder))
        self._observer = self._journal.observer()
        (thread,) = [each for each in threading.enumerate() if each.name == "kvxfer-journal"]
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._seconds = 0.0

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        began = time.thread_time()
        self._observer.note(event)
        self._seconds += time.thread_time() - began

    def watch(self, tier: str, ask: AskGauges) -> None:
        """See `Observer.watch`."""
        self._observer.watch(tier, ask)

    def take_seconds(self) -> float:
        """Flush the journal; return its processor seconds so far."""
        began = time.thread_time()
        self._journal.flush()
        self._seconds += time.thread_time() - began
        return self._seconds + time.clock_gettime(self._clock)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def run(*, quick: bool) -> list[BenchRow]:
    """Measure requests: a lookup that misses, a store, a lookup that hits, and a load.

    Baseline: processor time of all threads for a request without a journal. Ours: the same plus
    the mean time that a journal, with its thread, takes for an equal request. (Two whole runs, with
    and without a journal, would differ by more than that.) The tiers are full, so each stored block
    evicts another.
    """
    rows = []
    with bench_folder("journal") as folder:
        for medium, block_bytes in CASES.items():
            rounds = 10 if quick else 60
            times = asyncio.run(_measure(folder / medium, block_bytes, rounds))
            case = f"{medium}, {BATCH_BYTES // block_bytes} blocks of {block_bytes >> 10} KiB"
            rows.append(compare(case, *times, unit="ms", goal="<= 1.01"))
    return rows


async def _measure(root: Path, block_bytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Measure the processor seconds of each round, with the journal and without."""
    num_blocks = BATCH_BYTES // block_bytes
    caches = make_caches(torch.ones((num_blocks, block_bytes), dtype=torch.int8))
    seconds: list[float] = []
    before = 0.0
    async with contextlib.AsyncExitStack() as opened:
        journal = TimedJournal(root / "journal")
        opened.callback(journal.close)
        engines = []
        for name, observers in (("noted", [journal]), ("not noted", [])):
            urls = [f"host://?capacity={BATCH_BYTES * 5 // 4}"]
            if "files" in root.name:
                urls += [f"file://{root / name}?capacity={BATCH_BYTES * 2}&min_free=1MiB"]
            engine = connect(urls, caches, namespace=NAMESPACE, observers=observers)
            engines.append(await opened.enter_async_context(engine))
        for nth in range(rounds + 2):
            keys = make_keys(num_blocks)
            if nth == 2:  # the tiers are full
                before = journal.take_seconds()
            await _request(engines[0], keys)
            began = time.process_time()
            await _request(engines[1], keys)
            seconds.append(time.process_time() - began)
        taken = (journal.take_seconds() - before) / rounds
    return [each + taken for each in seconds[2:]], seconds[2:]


async def _request(engine: TransferEngine, keys: list[BlockKey]) -> None:
    block_ids = [list(range(len(keys)))]
    await engine.lookup(keys)
    await engine.store(keys, block_ids)
    await engine.backend.flush()
    await engine.lookup(keys)
    await engine.load(keys, block_ids)
