"""What holds of every backend whose servers hang, end and come back."""

import asyncio
import itertools
import time

from kvxfer.storage.backend import Backend
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

SLACK_S = 2.0
"""Time that a busy machine may take in addition to a limit."""
BACK_S = 60.0

_numbers = itertools.count(10**6, 4)


async def require_back(backend: Backend, memory: BlockMemory) -> None:
    """Wait until blocks come and go again."""
    keys = make_keys(4, first=next(_numbers))
    stop = time.monotonic() + BACK_S
    blocks, target = memory.describe(0, range(4)), memory.describe(0, range(4, 8))
    payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in keys]
    write_payloads(blocks, payloads)
    for move, moved in ((backend.store, blocks), (backend.load, target)):
        while not all(outcome.done for outcome in await move(keys, moved)):
            assert time.monotonic() < stop
            await asyncio.sleep(0.2)
    assert read_payloads(target) == payloads
    assert await backend.lookup(keys) == [True] * 4
