"""Engine that stores to a host pool and loads from it until it is killed.

python -m tests.backends.pool_engine_process SOCKET SEED
"""

import asyncio
import random
import sys
from pathlib import Path

from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.cli import peers

OTHER_KEYS = [make_block_key(b"other block %04d" % number, 0) for number in range(40)]
MOST_AT_ONCE = 6
TURNS_OF_A_LINE = 20
PAUSE_S = 0.01


def say(what: str) -> None:
    """Write a line for the process that started this one."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def traffic(path: str, seed: int) -> None:
    """Store and load at random; every byte that comes back is what was stored."""
    rng = random.Random(seed)
    memory = BlockMemory(peers.PAGES, num_blocks=MOST_AT_ONCE)
    end = Path(path).with_name("end")
    turn = 0
    async with PoolBackend(PoolConfig(path=path, timeout_s=1.0), peers.namespace()) as backend:
        while not await asyncio.to_thread(end.exists):
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
            if turn % TURNS_OF_A_LINE == 0:
                say("done")


if __name__ == "__main__":
    asyncio.run(traffic(sys.argv[1], int(sys.argv[2])))
