"""NixlAgent and memory of a GPU: the tests that the fake agent must pass, between two processes."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvxfer.backends.nixl.agents.base import Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl import NixlAgent
from kvxfer.backends.nixl.carrier import has_active_port
from kvxfer.errors import TransferFailedError
from tests.backends.agent_process import WITH_GPU, Nursery
from tests.backends.device_agent_contract import DeviceAgentContract, DevicePeer
from tests.cuda.gpu import Gpu


@pytest.mark.gpu
@pytest.mark.processes
class TestNixlAgentOfGpu(DeviceAgentContract):
    @pytest.fixture(scope="class")
    def nursery(self) -> Iterator[Nursery]:
        nursery = Nursery()
        yield nursery
        nursery.close()

    @pytest.fixture(autouse=True)
    def _process(self, nursery: Nursery) -> Iterator[None]:
        self.process = nursery.start(WITH_GPU)
        yield
        self.process.kill()

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
        """Read, or say that UCX has no way between a host's and a GPU's memory without RDMA."""
        try:
            await super().read(agent, name, fragments)
        except TransferFailedError as exc:
            if has_active_port() or "cpu" not in str(exc):
                raise
            pytest.skip(f"no RDMA port here, and without one: {exc}")
