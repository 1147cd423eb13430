"""Models with published I/O sizes: their shapes, and those sizes."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.batches import KIB, MIB
from kvxfer.kvcache.allocation import AttentionLayout
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MLASpec


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Model with published sizes of its I/O: its KV cache on one worker, in 16 bits.

    Attributes:
        name: Name of the model, and the tensor parallelism that was assumed.
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
        if isinstance(self.spec, MLASpec):
            return AttentionLayout("block token dim", "block layer token dim")
        return AttentionLayout("kv block token head dim", "block layer kv token head dim")

    @property
    def shape(self) -> str:
        """Shape that determines the sizes, as text."""
        heads = f"{self.spec.num_kv_heads} x {self.spec.head_dim}"
        return f"{self.num_layers} layers of {heads}, {self.spec.tokens_per_block} tokens a block"


def _attention(num_kv_heads: int, head_dim: int) -> FullAttentionSpec:
    shape: Any = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return FullAttentionSpec(tokens_per_block=16, dtype=torch.bfloat16, **shape)


_LATENTS_OF_DEEPSEEK = MLASpec(tokens_per_block=64, head_dim=576, dtype=torch.bfloat16)
MODELS = tuple(
    PublishedModel(name, num_layers, spec, registered_kib * KIB, allocated_mib * MIB, *remark)
    for name, num_layers, spec, registered_kib, allocated_mib, *remark in (
        ("Llama-3.1-8B", 32, _attention(8, 128), 32, 2),
        ("Llama-3.1-70B, TP 4", 80, _attention(2, 128), 8, 1.25),
        ("Llama-3.2-1B", 16, _attention(8, 64), 16, 0.5),
        ("Mistral-7B", 32, _attention(8, 128), 32, 2),
        ("DeepSeek-R1-Distill-Qwen-32B, TP 2", 64, _attention(4, 128), 16, 2),
        ("Qwen3-0.6B", 28, _attention(8, 128), 32, 1.75),
        ("Qwen3-8B", 36, _attention(8, 128), 28, 1.97, "published as if 7 heads"),
        ("Qwen2.5-7B", 28, _attention(4, 128), 16, 0.87),
        ("DeepSeek-V2-Lite", 27, _LATENTS_OF_DEEPSEEK, 72, 1.9),
        ("Qwen2.5-1.5B", 28, _attention(2, 128), 8, 0.44),
    )
)
"""Source: "Inside vLLM's New KV Offloading Connector", https://blog.vllm.ai. The 8 KB of
Llama-3.1-70B are two of its eight heads, those of one of four workers."""
