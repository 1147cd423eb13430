"""Portable pages of caches that a real engine allocated."""

import numpy as np
import pytest
import torch

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import WorkerShard, map_caches
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.kvcache.world_engines import part_of_pages

cache_utils = pytest.importorskip("transformers.cache_utils")

TOKENS, HEADS, DIM, PAGE_TOKENS = 32, 3, 5, 16
SPEC = FullAttentionSpec(tokens_per_block=4, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "options", "first"),
    [
        ("DynamicLayer", {}, 0),
        ("StaticLayer", {"max_cache_len": 48}, 0),
        ("DynamicSlidingWindowLayer", {"sliding_window": TOKENS + 1}, 1),
    ],
)
def test_a_sequence_of_transformers_is_portable_pages(
    kind: str, options: dict[str, int], first: int
) -> None:
    layer = getattr(cache_utils, kind)(**options)
    states = torch.randn(2, 1, HEADS, TOKENS + first, DIM)
    layer.update(states[0], states[1])
    tensors = [part[0][:, :TOKENS] for part in (layer.keys, layer.values)]
    config = KVCacheConfig(TOKENS // 4, (KVCacheGroup(SPEC, ("layers.0",)),))
    caches = canonicalize({"layers.0": tensors}, config)
    (mapping,) = map_caches(caches, WorkerShard(num_kv_heads=HEADS), tokens_per_page=PAGE_TOKENS)
    pages = np.zeros((2, mapping.page.num_bytes), np.uint8)
    blocks = BlockDescriber(caches, mappings=[mapping]).describe(0, range(TOKENS // 4))
    copies = CPUCopyEngine(num_threads=1)
    copies.copy(blocks, part_of_pages(mapping, pages))
    for index, page in enumerate(pages.view(np.float32)):
        start = first + index * PAGE_TOKENS
        expected = states[:, 0, :, start : start + PAGE_TOKENS]
        np.testing.assert_array_equal(page, expected.flatten().numpy())
    for tensor in tensors:
        tensor.zero_()
    copies.copy(part_of_pages(mapping, pages), blocks)
    for tensor, part in zip(tensors, states[:, 0, :, first:], strict=True):
        assert torch.equal(tensor, part)
    copies.close()
