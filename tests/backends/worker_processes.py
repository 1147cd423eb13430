"""Work of processes that are killed: an engine over a host pool, and a writer of a folder."""

import asyncio
import itertools
import random
from multiprocessing.connection import Connection
from pathlib import Path

from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.file_store import hashed_keys, open_store, sealed, store
from tests.cli import peers

OTHER_KEYS = [make_block_key(b"other block %04d" % number, 0) for number in range(40)]
MOST_AT_ONCE = 6
TURNS_OF_A_WORD = 20
PAUSE_S = 0.01


def move_blocks(path: Path, seed: int, told: Connection) -> None:
    """Store and load at random; every loaded byte must be the stored one."""
    asyncio.run(_move(path, random.Random(seed), told))


async def _move(path: Path, rng: random.Random, told: Connection) -> None:
    memory = BlockMemory(peers.PAGES, num_blocks=MOST_AT_ONCE)
    turn = 0
    async with PoolBackend(PoolConfig(path=str(path), timeout_s=1.0), peers.namespace()) as backend:
        while not told.poll():
            keys = rng.sample(OTHER_KEYS, rng.randint(1, MOST_AT_ONCE))
            blocks = memory.describe(0, range(len(keys)))
            payloads = [make_payload(key, peers.BLOCK_BYTES) for key in keys]
            if rng.random() < 0.5:
                write_payloads(blocks, payloads)
                await backend.store(keys, blocks)
                continue
            nothing = bytes(peers.BLOCK_BYTES)
            write_payloads(blocks, [nothing] * len(keys))
            outcomes = await backend.load(keys, blocks)
            for outcome, found, wanted in zip(
                outcomes, read_payloads(blocks), payloads, strict=True
            ):
                assert found == (wanted if outcome.done else nothing), outcome
            if not any(outcome.done for outcome in outcomes):
                await asyncio.sleep(PAUSE_S)  # without a pool there is nothing to do
                continue
            turn += 1
            if turn % TURNS_OF_A_WORD == 0:
                told.send("done")


BATCH = 4


def crash_memory() -> BlockMemory:
    """Caches whose blocks take some system calls to write."""
    return BlockMemory([[64 << 10, 1000]], num_blocks=16)


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
