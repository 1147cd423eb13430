"""Contract of transfer agents for memory of GPUs, as tests that the real and the fake one pass."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents import Fragments, TransferAgent
from kvxfer.backends.nixl.wire.regions import AgentMetadata
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from tests.backends.agent_contract import random_bytes, read
from tests.cuda.gpu import Gpu

NUM_BYTES = 1 << 20
FRAGMENT_BYTES = 4099
GPU = torch.device("cuda", 0)
WAYS = {
    "to host": [(HOST, GPU)],
    "from host": [(GPU, HOST)],
    "on GPU": [(GPU, GPU)],
    "of every kind": [(HOST, GPU), (GPU, HOST), (GPU, GPU), (HOST, HOST)],
}
"""Devices that fragments of a read go to, and devices that they come from."""


class DeviceMemory:
    """Host memory and memory of a GPU, `NUM_BYTES` of each.

    Attributes:
        addresses: Address of the first byte on each device.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8)
        self.addresses = {HOST: self._host.ctypes.data, GPU: gpu.allocate(NUM_BYTES)}

    def regions(self) -> list[MemoryRegion]:
        places = self.addresses.items()
        return [MemoryRegion(address, NUM_BYTES, self, device) for device, address in places]

    def fill(self, seed: int) -> None:
        self._host[:] = pattern(HOST, seed)
        written = pattern(GPU, seed).tobytes()
        self._gpu.write(self.addresses[GPU], written)
        assert self._gpu.read(self.addresses[GPU], NUM_BYTES) == written  # the write has ended

    def content(self, device: torch.device) -> NDArray[np.uint8]:
        if device == HOST:
            return self._host.copy()
        return np.frombuffer(self._gpu.read(self.addresses[GPU], NUM_BYTES), np.uint8).copy()


class DevicePeer(Protocol):
    """Peer: an agent with a `DeviceMemory`, in this process or another one."""

    metadata: bytes
    addresses: dict[torch.device, int]

    async def fill(self, seed: int) -> None:
        """Fill the peer's memory as `DeviceMemory.fill` does."""


class LocalDevicePeer:
    def __init__(self, agent: TransferAgent, gpu: Gpu) -> None:
        self.agent = agent
        self._memory = DeviceMemory(gpu)
        agent.register(self._memory.regions())
        self.metadata, self.addresses = agent.metadata, self._memory.addresses

    async def fill(self, seed: int) -> None:
        self._memory.fill(seed)


def pattern(device: torch.device, seed: int) -> NDArray[np.uint8]:
    return random_bytes(2 * seed + (device == GPU))[:NUM_BYTES]


class DeviceAgentContract(ABC):
    """Contract of an agent for memory of GPUs; subclasses have a fixture `gpu`."""

    @abstractmethod
    def make_agent(self) -> TransferAgent:
        """Open an agent."""

    @abstractmethod
    def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        """Open a peer, and close it at the end."""

    async def read(self, agent: TransferAgent, name: str, fragments: Fragments) -> None:
        await read(agent, name, fragments.local, fragments.remote, fragments.lengths)

    @pytest.fixture
    async def peer(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        async for peer in self.peers(gpu):
            yield peer

    @pytest.fixture
    def memory(self, gpu: Gpu) -> DeviceMemory:
        return DeviceMemory(gpu)

    @pytest.fixture
    async def agent(self, memory: DeviceMemory) -> AsyncIterator[TransferAgent]:
        agent = self.make_agent()
        agent.register(memory.regions())
        yield agent
        await agent.aclose()

    async def test_metadata_says_on_which_device_each_region_is(
        self, agent: TransferAgent, memory: DeviceMemory
    ) -> None:
        wanted = [(each.address, NUM_BYTES, str(each.device)) for each in memory.regions()]
        assert AgentMetadata.decode(agent.metadata).regions == wanted

    @pytest.mark.parametrize("kind", WAYS)
    async def test_fragments_arrive_whole_and_nothing_else_changes(
        self, agent: TransferAgent, peer: DevicePeer, memory: DeviceMemory, kind: str
    ) -> None:
        ways = WAYS[kind]
        await peer.fill(1)
        memory.fill(2)
        expected = {device: memory.content(device) for device in (HOST, GPU)}
        name = await agent.add_peer(peer.metadata)
        count = NUM_BYTES // FRAGMENT_BYTES // 2 * 2
        places = np.random.default_rng(3).permutation(count) * FRAGMENT_BYTES
        columns: list[list[int]] = [[], []]
        for index, (to, from_) in enumerate(places.reshape(2, -1).T.tolist()):
            local, remote = ways[index % len(ways)]
            columns[0].append(memory.addresses[local] + to)
            columns[1].append(peer.addresses[remote] + from_)
            read = pattern(remote, 1)[from_ : from_ + FRAGMENT_BYTES]
            expected[local][to : to + FRAGMENT_BYTES] = read
        lengths = np.full(len(columns[0]), FRAGMENT_BYTES, np.uint64)
        here, there = (np.array(column, np.uint64) for column in columns)
        await self.read(agent, name, Fragments(here, there, lengths))
        for device, content in expected.items():
            assert memory.content(device).tobytes() == content.tobytes()
