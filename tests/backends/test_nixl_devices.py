"""Memory of GPUs at a NIXL backend: refused by name, and moved after the work of the GPU."""

import asyncio

import numpy as np
import pytest
import torch

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import read_payloads
from tests.backends.agent_contract import words
from tests.backends.nixl_pair import KEYS, MEMORY, open_pair

GPU = torch.device("cuda", 0)
SIZE = sum(MEMORY[0])


def gpu_region() -> MemoryRegion:
    """Say of some host memory that it is a GPU's."""
    memory = np.zeros(SIZE, np.uint8)
    return MemoryRegion(memory.ctypes.data, memory.nbytes, memory, GPU)


@pytest.mark.parametrize("transport", ["auto", "socket"])
async def test_memory_of_a_gpu_needs_nixl_for_every_peer_and_that_of_the_host_goes_on(
    transport: str,
) -> None:
    async with open_pair(attached=False, transport=transport) as pair:
        other = pair.open_client()
        regions = memory_regions(pair.memory.caches)
        with pytest.raises(InvalidArgumentError, match=f"cuda:0.*={transport}.*transport=nixl"):
            other.attach([*regions, gpu_region()])
        other.attach(regions)
        target = pair.memory.describe(0, [8, 9])
        assert [each.done for each in await other.load(KEYS[:2], target)] == [True] * 2
        assert read_payloads(target) == pair.payloads[:2]
        await other.aclose()


@pytest.mark.processes
async def test_a_gpu_that_nixl_cannot_use_is_named_when_the_backend_starts() -> None:
    await asyncio.to_thread(import_nixl, otherwise="skip this test")
    config = NixlConfig(address="127.0.0.1:1", transport="nixl")
    async with NixlBackend(config, BlockMemory(MEMORY, num_blocks=1).namespace()) as backend:
        backend.attach([gpu_region()])
        with pytest.raises(BackendUnavailableError, match="device cuda:0 cannot be used: NIXL"):
            await backend.start()


async def test_blocks_of_a_gpu_are_refused_by_name_unless_the_backend_reaches_it() -> None:
    blocks = Descriptors.of_pieces(words(gpu_region().address), [SIZE], device=GPU)
    async with open_pair() as pair:
        for move in (pair.client.load, pair.client.store):
            with pytest.raises(InvalidArgumentError, match="device of blocks is 'cuda:0'"):
                await move(KEYS[:1], blocks)
        pair.client._exchange.memory_kinds = frozenset({"cpu", "cuda"})
        for move in (pair.client.load, pair.client.store):
            with pytest.raises(InvalidArgumentError, match="memory of cuda:0 that was attached"):
                await move(KEYS[:1], blocks)
