"""Work of processes that store blocks in one folder."""

import asyncio
import itertools
import json
import random
from pathlib import Path

from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.backends.file_store import hashed_keys, load_verified, open_store, sealed, store

BATCH = 4


def crash_memory() -> BlockMemory:
    """Caches whose blocks take some system calls to write."""
    return BlockMemory([[64 << 10, 1000]], num_blocks=16)


def shared_memory() -> BlockMemory:
    """Caches for processes that share a folder."""
    return BlockMemory([[12 << 10]], num_blocks=16)


def write_on(root: Path, first: int, *secrets: str) -> None:
    """Store new blocks until killed, sealed if there are secrets."""

    async def write() -> None:
        memory = crash_memory()
        fields = sealed(root, *secrets) if secrets else {}
        async with open_store(root, memory.namespace(), write_threads=2, **fields) as backend:
            for batch in itertools.count():
                keys = hashed_keys(BATCH, first=first + BATCH * batch)
                await store(backend, keys, memory.describe(0, range(BATCH)))

    asyncio.run(write())


def hammer(root: Path, capacity: int, num_keys: int, num_turns: int, report: Path) -> None:
    """Store, load and sometimes delete the same keys as others; report what was done."""
    counts = {"stored": 0, "loaded": 0, "missed": 0, "failed": 0}

    async def move() -> None:
        memory, keys, rng = shared_memory(), hashed_keys(num_keys), random.Random(report.name)
        async with open_store(root, memory.namespace(), capacity=ByteSize(capacity)) as backend:
            for _ in range(num_turns):
                chosen = rng.sample(keys, BATCH)
                if rng.random() < 0.5:
                    for outcome in await store(backend, chosen, memory.describe(0, range(BATCH))):
                        waited = outcome.reason == "another process is storing this block"
                        assert outcome.done or waited, outcome
                        counts["stored" if outcome.done else "failed"] += 1
                else:
                    target = memory.describe(0, range(8, 8 + BATCH))
                    for status in await load_verified(backend, chosen, target):
                        assert status in {Status.DONE, Status.MISSING}, status
                        counts["loaded" if status is Status.DONE else "missed"] += 1
                if rng.random() < 0.02:
                    await backend.delete(chosen)

    asyncio.run(move())
    report.write_text(json.dumps(counts))
