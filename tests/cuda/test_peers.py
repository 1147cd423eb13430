"""Blocks of a GPU at a NIXL backend that reaches its memory, over the simulated one."""

import numpy as np
import pytest
import torch

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.connect import complete_namespace
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.transfer.engine import TransferEngine
from kvxfer.units import ByteSize
from tests.backends.agent_contract import words
from tests.cuda.engine_caches import EngineCaches
from tests.cuda.simulated_gpu import SimulatedGpu
from tests.cuda.test_staging import Compute, compute  # noqa: F401 - a fixture

GPU = torch.device("cuda", 0)
SIZE = 4096
KEYS = make_keys(2)


@pytest.mark.parametrize("is_looked_up", [False, True])
async def test_fenced_blocks_go_straight_from_and_to_a_gpu(
    gpu: SimulatedGpu,
    compute: Compute,  # noqa: F811 - the stream that the engine computes on
    *,
    is_looked_up: bool,
) -> None:
    caches = EngineCaches(gpu)
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


async def test_a_processor_never_hashes_blocks_of_a_gpu(gpu: SimulatedGpu) -> None:
    memory = BlockMemory([[SIZE]], num_blocks=2)
    namespace = memory.namespace()
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20))
    async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as holder:
        await holder.start()
        assert holder.server is not None
        config = NixlConfig(address=str(holder.server.endpoint), transport="nixl")
        async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as client:
            address = gpu.allocate(SIZE)
            client.attach([MemoryRegion(address, SIZE, gpu, GPU)])
            # As they are when blocks are fenced.
            client._exchange.memory_kinds = frozenset({"cpu", "cuda"})
            await store_generated(client, KEYS[:1], memory.describe(0, [0]))
            blocks = Descriptors.of_pieces(words(address), [SIZE], device=GPU)
            for outcomes in (
                await client.load(KEYS[:1], blocks),
                await client.store(KEYS[1:], blocks),
            ):
                assert [each.status for each in outcomes] == [Status.FAILED]
                assert "device of hashed blocks is 'cuda:0'" in outcomes[0].reason
            assert await client.lookup(KEYS) == [True, False]
