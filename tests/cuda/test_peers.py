"""Blocks of a GPU at a NIXL backend that reaches its memory, over the simulated one."""

import numpy as np
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.connect import complete_namespace
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import Namespace
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.transfer.engine import TransferEngine
from kvxfer.units import ByteSize
from tests.cuda.engine_caches import EngineCaches


@pytest.mark.parametrize("is_looked_up", [False, True])
async def test_fenced_blocks_go_straight_from_and_to_a_gpu(
    engine_caches: EngineCaches, *, is_looked_up: bool
) -> None:
    caches = engine_caches
    namespace = complete_namespace(Namespace(model="model", dtype="bfloat16"), caches.caches, 1)
    keys = make_keys(20)
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(8 << 20))
    async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as holder:
        await holder.start()
        assert holder.server is not None
        address = str(holder.server.endpoint)
        config = NixlConfig(address=address, transport="nixl", integrity="fenced")
        client = NixlBackend(config, namespace, make_agent=FakeNixlAgent)
        async with TransferEngine(caches.caches, client) as engine:
            assert engine.backend is client, "blocks pass through staging buffers"
            expected = caches.blocks.copy()
            stored = await engine.store(keys, [list(range(20))])
            assert [each.status for each in stored] == [Status.DONE] * 20
            if is_looked_up:
                assert await engine.lookup(keys) == [True] * 20
            loaded = await engine.load(keys, [list(range(30, 50))])
            assert [each.status for each in loaded] == [Status.DONE] * 20
    expected[:, 30:50] = expected[:, :20]
    assert np.array_equal(caches.blocks, expected)
