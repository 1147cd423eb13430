"""Tiers for tests: the first in host memory, the lower ones observed and made to fail."""

from collections.abc import Sequence

from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.storage import Backend, BlockKey, Namespace, Status
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import read_payloads
from kvxfer.tiering import TieredBackend, TierTimeouts
from tests.backends.test_host import capacity_for

KEYS = make_keys(8)


def open_host(namespace: Namespace, num_blocks: int) -> HostBackend:
    """Open a host backend for exactly as many blocks, which sees when a byte of one changes."""
    capacity = capacity_for(namespace, num_blocks)
    config = HostConfig(capacity=capacity, integrity=MemoryIntegrity.FULL)
    return HostBackend(config, namespace)


def open_dict(namespace: Namespace, max_blocks: int | None = None) -> DictBackend:
    return DictBackend(DictConfig(max_blocks=max_blocks), namespace)


def open_tiers(tiers: Sequence[Backend], namespace: Namespace, **more: int) -> TieredBackend:
    """Open tiers with time limits that a busy machine keeps."""
    return TieredBackend(tiers, namespace, timeouts=TierTimeouts(lookup_s=None), **more)


async def settle(backend: TieredBackend) -> None:
    """Wait until every tier below has the queued blocks, or fails and waits for a retry."""
    for writer in backend._writers:
        await writer.settle()


async def load_from(backend: Backend, memory: BlockMemory, keys: Sequence[BlockKey]) -> list[bytes]:
    """Load whole blocks, each of which must be there; return their bytes."""
    blocks = memory.describe(0, range(16, 16 + len(keys)))
    assert statuses(await backend.load(keys, blocks)) == [Status.DONE] * len(keys)
    return read_payloads(blocks)
