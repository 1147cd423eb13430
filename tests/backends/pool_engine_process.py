"""Engine that is attached to a host pool, and does one thing until it is killed.

python -m tests.backends.pool_engine_process SOCKET store|reserve|pin|traffic [SEED]
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

from kvxfer.backends.pool import Attachment, PoolBackend, PoolConfig
from kvxfer.backends.pool.messages import Pin, Pinned, Reserve, Reserved
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.cli import peers

OTHER_KEYS = [make_block_key(b"other block %04d" % number, 0) for number in range(40)]
MOST_AT_ONCE = 6
TURNS_OF_A_LINE = 20
PAUSE_S = 0.01
CHILD_S = 60.0
"""Longer than a test waits."""


def say(what: str) -> None:
    """Write a line for the process that started this one."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def attach(path: str) -> Attachment:
    return Attachment(
        path, peers.namespace(), timeout_s=peers.LIMIT_S, open_copy_engine=CPUCopyEngine
    )


async def store(path: str) -> None:
    async with PoolBackend(PoolConfig(path=path), peers.namespace()) as backend:
        assert all(outcome.done for outcome in await peers.store(backend))
        say("done")
        await asyncio.Event().wait()


def reserve(path: str) -> None:
    """Reserve a slot for every block, write into them, and go no further."""
    attached = attach(path)
    num_keys = len(peers.KEYS)
    sizes = [peers.BLOCK_BYTES] * num_keys
    request = Reserve(number=1, keys=peers.KEYS, starts=[0] * num_keys, sizes=sizes)
    reserved = attached.ask(request, Reserved)
    assert len(reserved.slots) == num_keys
    blocks = BlockMemory(peers.PAGES, num_blocks=num_keys).describe(0, range(num_keys))
    attached.pool.write(reserved.slots, peers.KEYS, blocks)
    say("done")
    signal.pause()


def pin(path: str) -> None:
    """Pin every block, and leave a child behind that has inherited the connection."""
    attached = attach(path)
    assert len(attached.ask(Pin(keys=peers.KEYS, within_s=1.0), Pinned).rows) == len(peers.KEYS)
    if os.fork() == 0:
        time.sleep(CHILD_S)
        os._exit(0)
    say("done")
    signal.pause()


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
    _, socket_path, what, *rest = sys.argv
    if what == "traffic":
        asyncio.run(traffic(socket_path, int(rest[0])))
    elif what == "store":
        asyncio.run(store(socket_path))
    else:
        {"reserve": reserve, "pin": pin}[what](socket_path)
