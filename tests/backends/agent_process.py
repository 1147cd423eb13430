"""Peers for tests of transfer agents, each in a process of its own."""

import asyncio
import os
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.kvcache.memory_region import HOST
from tests.backends.agent_contract import LocalPeer
from tests.backends.device_agent_contract import GPU, LocalDevicePeer
from tests.backends.processes import ObedientProcess, answer


class PeerProcess(ObedientProcess):
    """`Peer` in another process, and a `DevicePeer` if it has memory of the GPU."""

    def __init__(self, *, has_gpu: bool = False, **environment: str) -> None:
        super().__init__(serve, environment, has_gpu)
        self.metadata, addresses = self.said
        self.address = addresses[0]
        self.addresses = dict(zip((HOST, GPU), addresses, strict=False))

    async def fill(self, seed: int) -> None:
        await asyncio.to_thread(self.tell, seed)

    async def content(self) -> bytes:
        content: bytes = await asyncio.to_thread(self.tell, None)
        return content


def serve(orders: Connection, environment: dict[str, str], has_gpu: bool) -> None:  # noqa: FBT001
    """Open an agent, and fill and read its memory as ordered; the agent is never closed."""
    os.environ.update(environment)
    peer: LocalPeer | LocalDevicePeer
    if has_gpu:
        from tests.cuda.gpu import Gpu

        peer = LocalDevicePeer(NixlAgent(), Gpu())
        addresses = [peer.addresses[HOST], peer.addresses[GPU]]
    else:
        peer = LocalPeer(NixlAgent())
        addresses = [peer.address]

    def obey(seed: int | None) -> Any:
        if seed is not None:
            return asyncio.run(peer.fill(seed))
        assert isinstance(peer, LocalPeer)
        return asyncio.run(peer.content())

    answer(orders, (peer.metadata, addresses), obey)
