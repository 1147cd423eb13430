"""Canonical allocation: a block of all layers is one piece; the zoo compares every byte."""

from dataclasses import replace

import pytest
import torch

from kvxfer.kvcache.allocation import AttentionLayout, allocate_canonical
from kvxfer.kvcache.canonical import attest
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.spec import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

NHD = AttentionLayout("kv block token head dim", "block layer kv token head dim")
FULL = FullAttentionSpec(tokens_per_block=16, num_kv_heads=2, head_dim=8, dtype=torch.float16)
SLIDING = SlidingWindowSpec(
    tokens_per_block=16, num_kv_heads=2, head_dim=8, dtype=torch.float16, sliding_window=32
)
NHD_PAGE = "block kv token head dim"


GEMMA = KVCacheConfig(
    6,
    (
        KVCacheGroup(FULL, ("0", "1", "2")),
        KVCacheGroup(SLIDING, ("3", "4")),
        KVCacheGroup(SLIDING, ("5", "6")),
    ),
    (("0", "3", "5"), ("1", "4", "6"), ("2",)),
)


def test_a_block_of_any_group_is_one_piece() -> None:
    allocation = allocate_canonical(GEMMA, [NHD] * 3, tokens_per_kernel_block=[16, 8, 16])
    row = 3 * FULL.page_size_bytes
    (tensor,) = allocation.caches.tensors
    assert tuple(tensor.tensor.shape) == (6, row)
    assert allocation.buffer.shape == (6 * row,)
    assert not allocation.buffer.any()
    for group, num_layers in enumerate((3, 2, 2)):
        blocks = describe(allocation.caches, group, [4, 1])
        assert blocks.addresses.tolist() == [
            allocation.buffer.data_ptr() + block * row for block in (4, 1)
        ]
        # The second group's kernel blocks spread its two layers over the whole row.
        end = row - (3 - num_layers) * FULL.page_size_bytes // (2 if group == 1 else 1)
        assert blocks.lengths.tolist() == [end, end]


def test_layers_of_one_group_may_have_their_own_specs() -> None:
    narrow = replace(FULL, num_kv_heads=4, head_dim=4)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL, "b": narrow})
    config = KVCacheConfig(6, (KVCacheGroup(specs, ("a", "b")),))
    allocation = allocate_canonical(config, [NHD])
    assert tuple(allocation.kv_caches["a"].shape) == (2, 6, 16, 2, 8)
    assert tuple(allocation.kv_caches["b"].shape) == (2, 6, 16, 4, 4)
    attest(allocation.kv_caches, config, allocation.caches, layouts={"a": NHD_PAGE})


@pytest.mark.gpu
def test_a_block_is_one_piece_of_device_memory() -> None:
    allocation = allocate_canonical(GEMMA, [NHD] * 3, device="cuda")
    assert allocation.buffer.is_cuda
    layouts = dict.fromkeys(GEMMA.layer_names, NHD_PAGE)
    attest(allocation.kv_caches, GEMMA, allocation.caches, layouts=layouts)


@pytest.mark.gpu
def test_host_memory_is_pinned() -> None:
    assert allocate_canonical(GEMMA, [NHD] * 3, pinned=True).buffer.is_pinned()
