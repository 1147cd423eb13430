"""Page templates: descriptors of portable pages, and of blocks without a page."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable import WorkerShard, map_caches
from kvxfer.kvcache.spec import FullAttentionSpec

NUM_BLOCKS, TOKENS, HEADS, DIM = 12, 8, 2, 3
SPEC = FullAttentionSpec(
    tokens_per_block=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.int16
)


@pytest.fixture(name="cache")
def numbered_cache() -> torch.Tensor:
    numbers = torch.arange(2 * NUM_BLOCKS * TOKENS * HEADS * DIM, dtype=torch.int16)
    return numbers.view(2, NUM_BLOCKS, TOKENS, HEADS, DIM)


@pytest.fixture(name="caches")
def canonical_caches(cache: torch.Tensor) -> CanonicalKVCaches:
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(SPEC, ("layers.0",)),))
    return canonicalize({"layers.0": cache}, config)


def describer(caches: CanonicalKVCaches, **options: Any) -> BlockDescriber:
    mappings = map_caches(caches, WorkerShard(num_kv_heads=HEADS), **options)
    return BlockDescriber(caches, mappings=mappings)


def bytes_of(pages: Descriptors) -> list[bytes]:
    pieces = list(zip(pages.addresses.tolist(), pages.lengths.tolist(), strict=True))
    return [
        b"".join(ctypes.string_at(*piece) for piece in pieces[start:stop])
        for start, stop in zip(pages.block_offsets, pages.block_offsets[1:], strict=False)
    ]


def reference(cache: torch.Tensor, block_ids: list[int], tokens_per_page: int) -> list[bytes]:
    whole: NDArray[np.int16] = cache[:, block_ids].permute(0, 3, 1, 2, 4).numpy()
    tokens = whole.reshape(2, HEADS, -1, DIM)
    starts = range(0, tokens.shape[2], tokens_per_page)
    return [tokens[:, :, start : start + tokens_per_page].tobytes() for start in starts]


@pytest.mark.parametrize("tokens_per_page", [1, 2, 4, 8, 16, 32])
def test_pages_follow_each_other_as_tokens_do(
    cache: torch.Tensor, caches: CanonicalKVCaches, tokens_per_page: int
) -> None:
    ids = [3, 4, 5, 11, 1, 0, 7, 2]
    pages = describer(caches, tokens_per_page=tokens_per_page).describe(0, ids)
    assert bytes_of(pages) == reference(cache, ids, tokens_per_page)
    assert pages.payload_starts.tolist() == [0] * pages.num_blocks
    assert pages.owners == (caches,)


@pytest.mark.parametrize("num_pages", [5, 6, 7, 8])
def test_the_last_block_may_have_fewer_pages_than_it_could(
    cache: torch.Tensor, caches: CanonicalKVCaches, num_pages: int
) -> None:
    pages = describer(caches, tokens_per_page=2).describe(0, [9, 4], num_pages=num_pages)
    assert bytes_of(pages) == reference(cache, [9, 4], 2)[:num_pages]
    assert len(pages) == int(pages.block_offsets[-1])


@pytest.mark.parametrize(
    ("tokens_per_page", "num_pages"), [(2, 4), (2, 9), (2, 0), (16, 2), (16, 0)]
)
def test_a_number_of_pages_that_blocks_do_not_have_is_refused(
    caches: CanonicalKVCaches, tokens_per_page: int, num_pages: int
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        describer(caches, tokens_per_page=tokens_per_page).describe(0, [9, 4], num_pages=num_pages)
    assert (caught.value.argument, caught.value.value) == ("num_pages", num_pages)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_blocks_that_are_not_whole_pages_are_refused(caches: CanonicalKVCaches, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="a multiple of 2 blocks") as caught:
        describer(caches, tokens_per_page=16).describe(0, list(range(count)))
    assert (caught.value.argument, caught.value.value) == ("block_ids", count)


def test_pages_begin_where_they_are_stored(cache: torch.Tensor, caches: CanonicalKVCaches) -> None:
    pages = describer(caches, tokens_per_page=16)
    found = pages.describe(0, [2, 1], first_block_index=6)
    assert bytes_of(found) == reference(cache, [2, 1], 16)
    with pytest.raises(
        InvalidArgumentError, match="a multiple of 2, the blocks of a page"
    ) as caught:
        pages.describe(0, [2, 1], first_block_index=3)
    assert caught.value.argument == "first_block_index"


def test_blocks_are_checked_as_they_are_without_mappings(caches: CanonicalKVCaches) -> None:
    pages = describer(caches)
    with pytest.raises(BlockIdError):
        pages.describe(0, [NUM_BLOCKS])
    with pytest.raises(DuplicateError):
        pages.describe(0, [1, 1])
    with pytest.raises(InvalidArgumentError):
        pages.describe(0, [])


def test_there_is_one_mapping_for_each_group(caches: CanonicalKVCaches) -> None:
    mappings = map_caches(caches, WorkerShard(num_kv_heads=HEADS))
    with pytest.raises(InvalidArgumentError) as caught:
        BlockDescriber(caches, mappings=[*mappings, *mappings])
    assert caught.value.argument == "mappings"
    with pytest.raises(InvalidArgumentError) as chunked:
        BlockDescriber(caches, mappings=mappings, blocks_per_chunk=2)
    assert chunked.value.argument == "blocks_per_chunk"


def test_pieces_are_joined_in_memory_but_not_across_shards() -> None:
    layout = "block head kv token dim"
    cache = torch.arange(4 * HEADS * 2 * TOKENS * DIM, dtype=torch.int16)
    cache = cache.view(4, HEADS, 2, TOKENS, DIM)
    config = KVCacheConfig(4, (KVCacheGroup(SPEC, ("layers.0",)),))
    caches = canonicalize({"layers.0": cache}, config, layouts={"layers.0": layout})
    shards = describer(caches, num_shards=HEADS).describe(0, [1])
    assert bytes_of(shards) == [cache[1].numpy().tobytes()]
    assert shards.lengths.tolist() == [SPEC.page_size_bytes // HEADS] * HEADS


def test_pieces_that_are_apart_in_the_page_are_joined_in_memory() -> None:
    layout = "block kv head token dim"
    cache = torch.zeros(4, 2, HEADS, TOKENS, DIM, dtype=torch.int16)
    config = KVCacheConfig(4, (KVCacheGroup(SPEC, ("layers.0",)),))
    caches = canonicalize({"layers.0": cache}, config, layouts={"layers.0": layout})
    half = map_caches(caches, WorkerShard(num_kv_heads=2 * HEADS, tp_size=2))
    assert len(half[0].pages[0].lengths) == 2
    blocks = BlockDescriber(caches, mappings=half).describe(0, [2, 1])
    assert blocks.lengths.tolist() == [SPEC.page_size_bytes] * 2
