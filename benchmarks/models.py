"""Models with published sizes of one I/O: their shapes, and these figures."""

from dataclasses import dataclass

import torch

from kvxfer.kvcache.allocation import AttentionLayout
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MLASpec

KIB, MIB = 1 << 10, 1 << 20

KEYS_FIRST = AttentionLayout("kv block token head dim", "block layer kv token head dim")
LATENTS = AttentionLayout("block token dim", "block layer token dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """Model with published sizes of its I/O: its KV cache on one worker, in 16 bits.

    Attributes:
        name: Name of the model, and the tensor parallelism that was assumed.
        num_layers: Layers with a cache.
        spec: The cache of one layer.
        registered_bytes: Published size of one I/O with a tensor for each layer.
        allocated_bytes: Published size of one I/O with blocks of all layers.
        remark: Reason why the published sizes are not those of the model; empty if they are.
    """

    name: str
    num_layers: int
    spec: AttentionSpec
    registered_bytes: float
    allocated_bytes: float
    remark: str = ""

    @property
    def backend(self) -> AttentionLayout:
        """Attention layout: K and V outermost, as FlashAttention had them; or latents."""
        return LATENTS if isinstance(self.spec, MLASpec) else KEYS_FIRST

    @property
    def shape(self) -> str:
        """Shape that determines the sizes, in words."""
        heads = f"{self.spec.num_kv_heads} x {self.spec.head_dim}"
        return f"{self.num_layers} layers of {heads}, {self.spec.tokens_per_block} tokens a block"


def _attention(num_kv_heads: int, head_dim: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        tokens_per_block=16,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )


MODELS = (
    PublishedModel(
        name="Llama-3.1-8B",
        num_layers=32,
        spec=_attention(8, 128),
        registered_bytes=32 * KIB,
        allocated_bytes=2 * MIB,
    ),
    PublishedModel(
        name="Llama-3.1-70B, TP 4",
        num_layers=80,
        spec=_attention(2, 128),
        registered_bytes=8 * KIB,
        allocated_bytes=1.25 * MIB,
    ),
    PublishedModel(
        name="Llama-3.2-1B",
        num_layers=16,
        spec=_attention(8, 64),
        registered_bytes=16 * KIB,
        allocated_bytes=0.5 * MIB,
    ),
    PublishedModel(
        name="Mistral-7B",
        num_layers=32,
        spec=_attention(8, 128),
        registered_bytes=32 * KIB,
        allocated_bytes=2 * MIB,
    ),
    PublishedModel(
        name="DeepSeek-R1-Distill-Qwen-32B, TP 2",
        num_layers=64,
        spec=_attention(4, 128),
        registered_bytes=16 * KIB,
        allocated_bytes=2 * MIB,
    ),
    PublishedModel(
        name="Qwen3-0.6B",
        num_layers=28,
        spec=_attention(8, 128),
        registered_bytes=32 * KIB,
        allocated_bytes=1.75 * MIB,
    ),
    PublishedModel(
        name="Qwen3-8B",
        num_layers=36,
        spec=_attention(8, 128),
        registered_bytes=28 * KIB,
        allocated_bytes=1.97 * MIB,
        remark="published as if 7 heads",
    ),
    PublishedModel(
        name="Qwen2.5-7B",
        num_layers=28,
        spec=_attention(4, 128),
        registered_bytes=16 * KIB,
        allocated_bytes=0.87 * MIB,
    ),
    PublishedModel(
        name="DeepSeek-V2-Lite",
        num_layers=27,
        spec=MLASpec(tokens_per_block=64, head_dim=576, dtype=torch.bfloat16),
        registered_bytes=72 * KIB,
        allocated_bytes=1.9 * MIB,
    ),
    PublishedModel(
        name="Qwen2.5-1.5B",
        num_layers=28,
        spec=_attention(2, 128),
        registered_bytes=8 * KIB,
        allocated_bytes=0.44 * MIB,
    ),
)
"""Source: "Inside vLLM's New KV Offloading Connector", https://blog.vllm.ai. The 8 KB of
Llama-3.1-70B are two of its eight heads, which four workers have."""
