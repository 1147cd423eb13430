"""Layout zoo, and portable pages, against the engines that they describe."""

import ctypes
from typing import Any

import pytest
import torch

from kvxfer.engine_side import LAYOUT_ZOO
from kvxfer.kvcache.canonical import attest, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.spec import FullAttentionSpec

cache_utils = pytest.importorskip("transformers.cache_utils")
kv_cache_layout = pytest.importorskip("vllm.v1.kv_cache_layout")

TOKENS = 8


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_names_mean_what_they_mean_in_vllm(name: str) -> None:
    logical = ("layer", "block", "head", "token", "kv*dim")
    memory = " ".join(logical[dim] for dim in kv_cache_layout.KVCacheLayout[name].stride_order)
    (entry,) = (entry for entry in LAYOUT_ZOO if entry.name == name)
    assert (entry.shape, entry.memory) == (" ".join(logical[1:]), memory)


SEQUENCES, HEADS, DIM = 2, 7, 6
KEYS_AND_VALUES = FullAttentionSpec(
    tokens_per_block=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32
)


def filled_layer(kind: str) -> Any:
    """Make a layer of transformers with 40 tokens of two sequences."""
    options = {
        "DynamicLayer": {},
        "StaticLayer": {"max_cache_len": 6 * TOKENS},
        "DynamicSlidingWindowLayer": {"sliding_window": 4 * TOKENS + 1},
    }
    layer = getattr(cache_utils, kind)(**options[kind])
    for step in range(5):
        states = torch.randn(2, SEQUENCES, HEADS, TOKENS, DIM) + step
        layer.update(states[0], states[1])
    return layer


@pytest.mark.parametrize(
    ("kind", "num_blocks"),
    [("DynamicLayer", 5), ("StaticLayer", 6), ("DynamicSlidingWindowLayer", 4)],
)
def test_a_sequence_of_a_transformers_cache_is_cut_into_blocks(kind: str, num_blocks: int) -> None:
    layer = filled_layer(kind)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(KEYS_AND_VALUES, ("a",)),))
    (entry,) = (entry for entry in LAYOUT_ZOO if entry.name == kind)
    for sequence in range(SEQUENCES):
        kv_caches = {"a": (layer.keys[sequence], layer.values[sequence])}
        caches = canonicalize(kv_caches, config)
        attest(kv_caches, config, caches)
        assert caches.group_data_refs[0][0].layout.startswith(entry.layout)
        for block_id in range(num_blocks):
            tokens = slice(block_id * TOKENS, (block_id + 1) * TOKENS)
            parts = (layer.keys[sequence, :, tokens], layer.values[sequence, :, tokens])
            expected = b"".join(part.contiguous().numpy().tobytes() for part in parts)
            blocks = describe(caches, 0, [block_id])
            pieces = zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
            assert b"".join(ctypes.string_at(*piece) for piece in pieces) == expected
        sizes = {"layer": 1, "kv": 2, "head": HEADS}
        assert len(describe(caches, 0, [1])) == entry.runs_per_block(sizes)
