"""Tiers for tests: the first in host memory, the lower ones observed and made to fail."""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity, PoolShape
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
    DictConfig,
    FaultRates,
    FaultyBackend,
    Operation,
)
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import read_payloads
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.units import ByteSize

KEYS = make_keys(8)


def host_capacity(namespace: Namespace, num_blocks: int) -> ByteSize:
    """Count the bytes in which exactly `num_blocks` chunks of the largest group fit."""
    chunk = max(namespace.chunk_size_bytes(group) for group in range(len(namespace.groups)))
    slot = -(-chunk // 4096) * 4096 + 32
    shape = PoolShape.fit(
        capacity_bytes=8192 + num_blocks * slot, num_parts=1, part_size_bytes=chunk
    )
    assert shape.num_slots == num_blocks
    return ByteSize(8192 + num_blocks * slot)


def open_host(namespace: Namespace, num_blocks: int) -> HostBackend:
    """Open a host backend for exactly as many blocks, which sees when a byte of one changes."""
    capacity = host_capacity(namespace, num_blocks)
    config = HostConfig(capacity=capacity, integrity=MemoryIntegrity.FULL)
    return HostBackend(config, namespace)


def open_dict(namespace: Namespace, max_blocks: int | None = None) -> DictBackend:
    return DictBackend(DictConfig(max_blocks=max_blocks), namespace)


def open_tiers(tiers: Sequence[Backend], namespace: Namespace, **more: int) -> TieredBackend:
    """Open tiers that are asked for as long as a busy machine takes to answer."""
    return TieredBackend(tiers, namespace, timeouts=TierTimeouts(lookup_s=None), **more)


class Recorder(DictBackend):
    """Backend that records its calls."""

    def __init__(self, namespace: Namespace, max_blocks: int | None = None) -> None:
        super().__init__(DictConfig(max_blocks=max_blocks), namespace)
        self.stored: list[BlockKey] = []
        self.calls: list[str] = []
        self.addresses: list[int] = []

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.calls.append("lookup")
        return await super().lookup(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.calls.append("load")
        return await super().load(keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.calls.append("delete")
        return await super().delete(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.calls.append("store")
        self.stored += keys
        self.addresses += blocks.addresses[blocks.block_offsets[:-1]].tolist()
        return await super().store(keys, blocks)


@dataclasses.dataclass
class Opened:
    """Two tiers, the lower one with faults on demand, and the backend over them."""

    backend: TieredBackend
    first: HostBackend
    lower: Recorder
    faults: FaultyBackend

    def fail(
        self,
        *operations: Operation,
        stuck: float = 0.0,
        error: float = 0.0,
        failure: float = 0.0,
    ) -> None:
        """Let these operations of the lower tier fail from now on."""
        self.faults.rates = FaultRates(
            operations=frozenset(operations), stuck=stuck, error=error, failure=failure
        )


@asynccontextmanager
async def opened(memory: BlockMemory, *, num_slots: int = 16) -> AsyncIterator[Opened]:
    namespace = memory.namespace()
    first, lower = open_host(namespace, num_slots), Recorder(namespace)
    faults = FaultyBackend(lower, seed=0, rates=FaultRates())
    async with TieredBackend([first, faults], namespace) as backend:
        yield Opened(backend, first, lower, faults)


async def settle(backend: TieredBackend) -> None:
    """Wait until every tier below has the queued blocks, or fails and waits for a retry."""
    for writer in backend._writers:
        await writer.settle()


async def load_from(backend: Backend, memory: BlockMemory, keys: Sequence[BlockKey]) -> list[bytes]:
    """Load whole blocks, each of which must be there; return their bytes."""
    blocks = memory.describe(0, range(16, 16 + len(keys)))
    assert statuses(await backend.load(keys, blocks)) == [Status.DONE] * len(keys)
    return read_payloads(blocks)
