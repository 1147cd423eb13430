"""Holder and its peer in one process, whose agents a test may hold."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.units import ByteSize

KEYS = make_keys(4)
MEMORY = [[4096, 512]]
LEASES = {"lease_s": 4.0, "heartbeat_s": 0.5}


@dataclass
class Pair:
    """Holder and its peer in one process, and the agents that they opened."""

    host: HostBackend
    holder: NixlBackend
    client: NixlBackend
    holder_agents: list[FakeNixlAgent]
    client_agents: list[FakeNixlAgent]
    memory: BlockMemory
    payloads: list[bytes]
    open_client: Callable[[], NixlBackend]

    @property
    def stalled(self) -> FakeNixlAgent:
        """Agent that reads loaded blocks."""
        return self.client_agents[-1]


@contextlib.asynccontextmanager
async def open_pair(
    *, attached: bool = True, agent: type[FakeNixlAgent] = FakeNixlAgent, **fields: Any
) -> AsyncIterator[Pair]:
    memory = BlockMemory(MEMORY, num_blocks=16)
    agents: tuple[list[FakeNixlAgent], list[FakeNixlAgent]] = ([], [])

    def open_backend(index: int, config: NixlConfig, **options: Any) -> NixlBackend:
        def make_agent() -> FakeNixlAgent:
            agents[index].append(agent())
            return agents[index][-1]

        return NixlBackend(config, memory.namespace(), make_agent=make_agent, **options)

    host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), memory.namespace())
    holder = open_backend(0, NixlConfig(listen="127.0.0.1:0"), own=host)
    async with host, holder:
        await holder.start()
        assert holder.server is not None
        config = NixlConfig(address=str(holder.server.endpoint), **(LEASES | fields))
        async with open_backend(1, config) as client:
            if attached:
                client.attach(memory_regions(memory.caches))
            payloads = await store_generated(client, KEYS, memory.describe(0, range(4)))
            reopen = partial(open_backend, 1, config)
            yield Pair(host, holder, client, *agents, memory, payloads, reopen)
