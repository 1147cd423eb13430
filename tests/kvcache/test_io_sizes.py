"""Bytes of one I/O, with tensors of one layer each and allocated over all layers."""

from typing import NamedTuple

import pytest
import torch

from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.attention_backend import AttentionLayout
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.descriptors import describe
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MLASpec

NUM_BLOCKS = 3
KIB, MIB = 1 << 10, 1 << 20


class Model(NamedTuple):
    """Published shape of a model on one worker, in 16 bits, and the published sizes of its I/O."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    per_layer: float
    cross_layer: float


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128, 32 * KIB, 2 * MIB),
    "Llama-3.1-70B, TP 4": Model(80, 2, 128, 8 * KIB, 1.25 * MIB),
    "Llama-3.2-1B": Model(16, 8, 64, 16 * KIB, 0.5 * MIB),
    "Mistral-7B": Model(32, 8, 128, 32 * KIB, 2 * MIB),
    "DeepSeek-R1-Distill-Qwen-32B, TP 2": Model(64, 4, 128, 16 * KIB, 2 * MIB),
    "Qwen3-0.6B": Model(28, 8, 128, 32 * KIB, 1.75 * MIB),
    "Qwen2.5-7B": Model(28, 4, 128, 16 * KIB, 0.87 * MIB),
    "Qwen2.5-1.5B": Model(28, 2, 128, 8 * KIB, 0.44 * MIB),
}
"""Source: the table that was published with blocks of all layers. Its row of Qwen3-8B, 28 KB and
1.97 MB, is that of 36 layers of seven heads, and the model has eight."""

K_FIRST = AttentionLayout("kv block token head dim", "block layer kv token head dim")
LATENTS = AttentionLayout("block token dim", "block layer token dim")


def io_sizes(spec: AttentionSpec, num_layers: int, backend: AttentionLayout) -> tuple[float, float]:
    """Bytes of each descriptor of a block, registered per layer and allocated."""
    names = tuple(f"layers.{index}" for index in range(num_layers))
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, names),))
    shape = backend.cache_shape(spec, NUM_BLOCKS)
    kv_caches = {name: torch.empty(shape, dtype=spec.dtype) for name in names}
    registered = describe(canonicalize(kv_caches, config), 0, [1])
    allocated = describe(allocate_canonical(config, [backend]).caches, 0, [1])
    assert len(allocated) == 1
    assert len(registered) == num_layers * (1 if isinstance(spec, MLASpec) else 2)
    assert registered.num_bytes == allocated.num_bytes
    (size,) = set(registered.lengths.tolist())
    return size, allocated.lengths.tolist()[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_published_sizes_follow_from_the_published_shapes(name: str) -> None:
    model = MODELS[name]
    spec = FullAttentionSpec(
        tokens_per_block=16,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
    )
    published = (model.per_layer, model.cross_layer)
    assert io_sizes(spec, model.num_layers, K_FIRST) == pytest.approx(published, rel=0.02)


def test_the_published_sizes_of_latents_follow_from_the_published_shapes() -> None:
    spec = MLASpec(tokens_per_block=64, head_dim=576, dtype=torch.bfloat16)  # DeepSeek-V2-Lite
    assert io_sizes(spec, 27, LATENTS) == pytest.approx((72 * KIB, 1.9 * MIB), rel=0.02)
