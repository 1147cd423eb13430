"""Blocks of a GPU at a NIXL backend that reaches its memory, over the simulated one."""

import pytest
import torch

from kvxfer.backends.nixl import NixlBackend, NixlConfig, local_node
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.units import ByteSize
from tests.backends.agent_contract import words
from tests.cuda.simulated_gpu import SimulatedGpu

GPU = torch.device("cuda", 0)
SIZE = 4096
KEYS = make_keys(2)


async def test_a_processor_never_hashes_blocks_of_a_gpu(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_node, "choose_carrier", lambda *_: "cma")
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
            client.memory_kinds = frozenset({"cpu", "cuda"})
            await store_generated(client, KEYS[:1], memory.describe(0, [0]))
            blocks = Descriptors.of_pieces(words(address), [SIZE], device=GPU)
            for outcomes in (
                await client.load(KEYS[:1], blocks),
                await client.store(KEYS[1:], blocks),
            ):
                assert [each.status for each in outcomes] == [Status.FAILED]
                assert "device of hashed blocks is 'cuda:0'" in outcomes[0].reason
            assert await client.lookup(KEYS) == [True, False]
