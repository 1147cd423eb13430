"""The fake transfer agent reads memory of the simulated GPU as the real one reads a real one's."""

from collections.abc import AsyncIterator

from kvxfer.backends.nixl.agents import (
    TransferAgent,
)
from kvxfer.testing import FakeNixlAgent
from tests.backends.device_agent_contract import (
    DeviceAgentContract,
    DevicePeer,
    LocalDevicePeer,
)
from tests.cuda.gpu import Gpu


class TestFakeNixlAgentOfGpu(DeviceAgentContract):
    def make_agent(self) -> TransferAgent:
        return FakeNixlAgent()

    async def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        agent = FakeNixlAgent()
        yield LocalDevicePeer(agent, gpu)
        await agent.aclose()
