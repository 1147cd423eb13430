"""Batches: those with conflicting blocks are refused before any byte moves."""

from collections.abc import AsyncIterator

import pytest
import torch

from kvxfer.errors import DuplicateError, InvalidArgumentError
from kvxfer.kvcache.allocation import AttentionLayout, allocate_canonical
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.spec import FullAttentionSpec
from kvxfer.storage.backend import DONE
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key
from kvxfer.testing import DictBackend, DictConfig
from kvxfer.transfer.batch import describe_batch
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

SPEC = FullAttentionSpec(tokens_per_block=4, num_kv_heads=3, head_dim=8, dtype=torch.float32)
GROUPS = (KVCacheGroup(SPEC, ("a",)), KVCacheGroup(SPEC, ("b",)))
LAYOUT = AttentionLayout("block kv token head dim", "block layer kv token head dim")
NUM_BLOCKS = 16
K0, K1 = make_block_key(b"first", 0), make_block_key(b"second", 1)


def overlaid(*, null_block_id: int | None = None) -> CanonicalKVCaches:
    config = KVCacheConfig(NUM_BLOCKS, GROUPS, (("a", "b"),), null_block_id=null_block_id)
    return allocate_canonical(config, [LAYOUT, LAYOUT]).caches


def three_groups() -> CanonicalKVCaches:
    """Make three groups; group 1 shares a tensor with either neighbour, which share none."""
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(NUM_BLOCKS, 8, dtype=torch.int8), 8) for _ in range(2)
    ]
    first, second = (CanonicalKVCacheRef(index, 8) for index in range(2))
    return CanonicalKVCaches(tensors, [[first], [first, second], [second]])


@pytest.fixture
async def engine() -> AsyncIterator[TransferEngine]:
    caches = overlaid()
    sizes = [tuple(ref.page_size_bytes for ref in refs) for refs in caches.group_data_refs]
    groups = tuple(GroupIdentity(page_sizes_bytes=pages) for pages in sizes)
    backend = DictBackend(DictConfig(), Namespace(model="m", groups=groups))
    async with TransferEngine(caches, backend) as engine:
        yield engine


async def test_a_block_of_two_groups_is_neither_loaded_nor_stored(engine: TransferEngine) -> None:
    assert await engine.store([K0, K1], [[1], [2]]) == [DONE, DONE]
    for call in (engine.load, engine.store):
        with pytest.raises(DuplicateError, match=r"block_ids\[1\] is 5; .* group 0"):
            await call([K0, K1], [[5], [5]])
    assert await engine.load([K0, K1], [[5], [6]]) == [DONE, DONE]


def keys_of(*groups: int) -> list[BlockKey]:
    return [make_block_key(bytes([65 + index]), group) for index, group in enumerate(groups)]


@pytest.mark.parametrize("ids", [[[3], [3], []], [[], [1, 3], [3]], [[1], [2, 3], [3]]])
def test_each_pair_of_groups_that_shares_a_tensor_is_compared(ids: list[list[int]]) -> None:
    keys = keys_of(*(group for group, of_one in enumerate(ids) for _ in of_one))
    with pytest.raises(DuplicateError, match="is 3"):
        describe_batch(BlockDescriber(three_groups()), keys, ids, None)


@pytest.mark.parametrize("null_block_id", [0, 7])
def test_nothing_is_loaded_into_the_null_block(null_block_id: int) -> None:
    describer = BlockDescriber(overlaid(null_block_id=null_block_id))
    ids = [[1, null_block_id], [2]]
    with pytest.raises(InvalidArgumentError, match=rf"block_ids\[0\] is {null_block_id}; .*null"):
        describe_batch(describer, keys_of(0, 0, 1), ids, None, direction=Direction.LOAD)
    stored = describe_batch(describer, keys_of(0, 0, 1), ids, None, direction=Direction.STORE)
    assert stored.num_blocks == 3
    null = [[null_block_id]] * 2
    stored = describe_batch(describer, keys_of(0, 1), null, None, direction=Direction.STORE)
    assert stored.num_blocks == 2
