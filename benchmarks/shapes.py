"""Engines without a model: the shapes of their caches, in given memory, and descriptions."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.portable import CacheDescription, WorkerShard, describe_caches

NUM_KV_HEADS, HEAD_DIM = 8, 128
"""KV heads and their width in Llama-3.1-8B."""

ROWS = "block layer kv token head dim"
NHD = "layer kv block token head dim"
HND = "layer kv block head token dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Shape of an engine's caches, in bfloat16.

    Attributes:
        order: Axes of all caches in memory, the outermost first.
        tp_size: Number of workers that share the heads.
        packs_keys: Whether keys are stored dimension by dimension, as vLLM's CPU attention does.
    """

    order: str = NHD
    num_layers: int = 32
    tokens_per_block: int = 16
    tp_size: int = 1
    packs_keys: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token, of all workers together."""
        return 2 * self.num_layers * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one worker."""
        return self.tokens_per_block * self.bytes_per_token // self.tp_size

    @property
    def page_bytes(self) -> int:
        """Bytes of each contiguous piece of a block."""
        return self.block_bytes // (1 if self.order == ROWS else 2 * self.num_layers)


class WorkerCaches:
    """Caches of one worker of an engine, which fill the given memory, uint8.

    Attributes:
        shard: Part of the model that this worker has.
        description: Description of the caches for other engines.
    """

    def __init__(self, shape: EngineShape, rank: int, memory: NDArray[np.uint8]) -> None:
        self.num_blocks = memory.nbytes // shape.block_bytes
        num_heads = NUM_KV_HEADS // shape.tp_size
        sizes = {"layer": shape.num_layers, "kv": 2, "block": self.num_blocks, "dim": HEAD_DIM}
        sizes |= {"token": shape.tokens_per_block, "head": num_heads}
        axes = shape.order.split()
        used = torch.from_numpy(memory[: self.num_blocks * shape.block_bytes])
        whole = used.view(torch.bfloat16).view([sizes[axis] for axis in axes])
        names = tuple(f"layers.{index}" for index in range(shape.num_layers))
        layout = " ".join(axis for axis in axes if axis != "layer")
        self.caches: CanonicalKVCaches = canonicalize(
            dict(zip(names, whole.unbind(axes.index("layer")), strict=True)),
            KVCacheConfig.uniform(
                self.num_blocks,
                names,
                tokens_per_block=shape.tokens_per_block,
                num_kv_heads=num_heads,
                head_dim=HEAD_DIM,
                dtype=torch.bfloat16,
            ),
            layouts=dict.fromkeys(names, layout),
        )
        self.shard = WorkerShard(num_kv_heads=NUM_KV_HEADS, rank=rank, tp_size=shape.tp_size)
        described = describe_caches(self.caches, self.shard)
        self.description = _pack_keys(described) if shape.packs_keys else described


def _pack_keys(description: CacheDescription) -> CacheDescription:
    """Describe the same bytes, but with keys in which tokens, not dimensions, are neighbours."""

    def pack(box: PageBox) -> PageBox:
        """Swap tokens and dimensions within the plane of each head."""
        element = box.dtype.itemsize
        strides = (
            {"token": element, "dim": box.extent("token") * element} if box.part == "k" else {}
        )
        digits = (replace(d, stride_bytes=strides.get(d.axis, d.stride_bytes)) for d in box.digits)
        return replace(box, digits=tuple(digits))

    change = msgspec.structs.replace
    groups = (change(each, boxes=tuple(map(pack, each.boxes))) for each in description.groups)
    return change(description, groups=tuple(groups))
