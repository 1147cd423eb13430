"""NixlAgent and memory of a GPU: on a machine with one, and what NIXL is told of it elsewhere."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl import has_active_port
from kvxfer.backends.nixl.agents import Fragments, NixlAgent, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import PeerLostError
from kvxfer.kvcache.memory_region import MemoryRegion
from tests.backends.agent_contract import Pool, read_runs, words
from tests.backends.agent_process import PeerProcess
from tests.backends.device_agent_contract import DeviceAgentContract, DevicePeer
from tests.cuda.gpu import Gpu

Row = tuple[int, int, int, str]


@pytest.mark.gpu
@pytest.mark.processes
class TestNixlAgentOfGpu(DeviceAgentContract):
    @pytest.fixture(autouse=True)
    def _process(self) -> Iterator[None]:
        self.process = PeerProcess(has_gpu=True)
        yield
        self.process.end()

    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        gpu = Gpu()
        yield gpu
        gpu.release()

    def make_agent(self) -> TransferAgent:
        return NixlAgent()

    async def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        yield self.process

    async def read(self, agent: TransferAgent, name: str, fragments: Fragments) -> None:
        """Read, or say that UCX has no way without RDMA.

        Between a host's and a GPU's memory it has none; within a GPU it needs CUDA IPC, which it
        does not find in some virtual machines.
        """
        try:
            await super().read(agent, name, fragments)
        except PeerLostError as exc:  # what NIXL calls a read for which UCX has no way
            if has_active_port():
                raise
            pytest.skip(f"no RDMA port here, and without one: {exc}")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[int]]]:
    """Kinds of memory and devices that NIXL was told; it takes all of it as host memory."""
    nixl = import_nixl(otherwise="skip these tests")
    told: list[tuple[str, set[int]]] = []

    base: Any = nixl.nixl_agent

    class Agent(base):  # type: ignore[misc]
        def register_memory(self, rows: Sequence[Row], kind: str) -> Any:
            told.append((kind, {row[2] for row in rows}))
            return super().register_memory([(*row[:2], 0, "") for row in rows], "DRAM")

        def get_xfer_descs(self, rows: NDArray[np.uint64], kind: str) -> Any:
            told.append((kind, set(rows[:, 2].tolist())))
            return super().get_xfer_descs(rows * np.array([1, 1, 0], np.uint64), "DRAM")

    monkeypatch.setattr(nixl, "nixl_agent", Agent)
    return told


@pytest.mark.processes
async def test_nixl_is_told_the_kind_and_the_device_of_either_side(
    named: list[tuple[str, set[int]]],
) -> None:
    agents, pools = [NixlAgent(), NixlAgent()], [Pool(), Pool()]
    devices = [torch.device("cuda", 3), torch.device("cuda", 5)]
    for agent, pool, device in zip(agents, pools, devices, strict=True):
        first, second = pool.regions()
        on_gpu = MemoryRegion(second.address, second.num_bytes, pool, device)
        named.clear()
        agent.register([first, on_gpu])
        assert named == [("DRAM", {0}), ("VRAM", {device.index})]
    name = await agents[0].add_peer(agents[1].metadata)
    named.clear()
    half = first.num_bytes
    starts = [(0, half), (half, half), (half, 0), (0, 0), (half + 99, half + 99)]
    local, remote = (words(*column) for column in zip(*starts, strict=True))
    fragments = Fragments(
        local + words(pools[0].address), remote + words(pools[1].address), words(*[7] * 5)
    )
    await read_runs(agents[0], name, [fragments], lambda _: None)
    sides = list(zip(named[::2], named[1::2], strict=True))
    host, ours, theirs = ("DRAM", {0}), ("VRAM", {3}), ("VRAM", {5})
    assert len(sides) == 4, "one transfer for each pair of kinds"
    assert all(
        side in sides for side in [(host, theirs), (ours, theirs), (ours, host), (host, host)]
    )
    for agent in agents:
        await agent.aclose()
