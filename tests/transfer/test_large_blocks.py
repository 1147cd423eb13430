"""Blocks larger than the pieces in which bytes are moved, hashed or staged."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvxfer.backends.nixl import NixlBackend
from kvxfer.connect import connect
from kvxfer.storage import Namespace, Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import SENTINEL, make_keys, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.nixl_proven import endpoint_of

BLOCK_BYTES = 40 << 20
PAGES = [BLOCK_BYTES // 2, BLOCK_BYTES // 2 - 7, 7]
BACKENDS = {
    "host": ["host://?capacity=128MiB"],
    "host-unverified": ["host://?capacity=128MiB&integrity=off"],
    "file": ["file://{folder}?capacity=1GiB"],
    "tiers": ["host://?capacity=64MiB", "file://{folder}?capacity=1GiB"],
}


NAMESPACE = Namespace(model="large", revision="1", dtype="int8")


@pytest.mark.parametrize("backend", [*BACKENDS, "nixl"])
async def test_a_block_is_moved_whatever_its_size(backend: str, tmp_path: Path) -> None:
    memory = BlockMemory([PAGES], num_blocks=4)
    keys = make_keys(2)
    payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
    write_payloads(memory.describe(0, [0, 1]), payloads)
    async with AsyncExitStack() as stack:
        if backend == "nixl":
            url = "nixl://?listen=127.0.0.1:0&capacity=128MiB"
            holder = connect(url, memory.caches, namespace=NAMESPACE)
            held = (await stack.enter_async_context(holder)).backend
            assert isinstance(held, NixlBackend)
            await held.start()
            urls = [f"nixl://{endpoint_of(held)}?timeout_s=60"]
        else:
            urls = [url.format(folder=tmp_path) for url in BACKENDS[backend]]
        engine = connect(urls, memory.caches, namespace=NAMESPACE)
        await stack.enter_async_context(engine)
        assert statuses(await engine.store(keys, [[0, 1]])) == [Status.DONE] * 2
        assert await engine.flush()
        memory.fill(SENTINEL)
        assert statuses(await engine.load(keys, [[3, 2]])) == [Status.DONE] * 2
        assert statuses(await engine.load(keys[1:], [[1]])) == [Status.DONE]
    assert read_payloads(memory.describe(0, [3, 2, 1])) == [*payloads, payloads[1]]
