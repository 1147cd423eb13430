"""Holder and its peer in one process, whose agent a test may hold."""

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


@dataclass
class Pair:
    """Holder and its peer in one process, and the agent that reads stored blocks."""

    host: HostBackend
    holder: NixlBackend
    client: NixlBackend
    holder_agent: FakeNixlAgent
    memory: BlockMemory
    payloads: list[bytes]
    open_client: Callable[[], NixlBackend]


@contextlib.asynccontextmanager
async def open_pair(*, attached: bool = True, **fields: Any) -> AsyncIterator[Pair]:
    memory, agent = BlockMemory(MEMORY, num_blocks=16), FakeNixlAgent()
    namespace = memory.namespace()
    host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)
    listening = NixlConfig(listen="127.0.0.1:0")
    holder = NixlBackend(listening, namespace, own=host, make_agent=lambda: agent)
    async with host, holder:
        await holder.start()
        assert holder.server is not None
        config = NixlConfig(address=str(holder.server.endpoint), **fields)
        open_client = partial(NixlBackend, config, namespace, make_agent=FakeNixlAgent)
        async with open_client() as client:
            if attached:
                client.attach(memory_regions(memory.caches))
            payloads = await store_generated(client, KEYS, memory.describe(0, range(4)))
            yield Pair(host, holder, client, agent, memory, payloads, open_client)
