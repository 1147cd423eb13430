"""Engine views: KV-cache tensors as engines register them, for tests of the canonical form."""

from math import prod
from typing import Any

import torch

from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec


def engine_view(
    physical: str, logical: str, sizes: dict[str, int], *, offset: int = 0
) -> torch.Tensor:
    """Make a tensor whose shape has the axes of `logical` and whose memory those of `physical`."""
    axes = physical.split()
    lengths = [
        sizes.get(axis) or prod(sizes[factor] for factor in axis.split("*")) for axis in axes
    ]
    strides = [0] * len(axes)
    dense = 1
    for index in reversed(range(len(axes))):
        strides[index] = dense
        dense *= lengths[index]
    storage = torch.zeros(offset + dense, dtype=torch.float16)
    view = storage.as_strided(lengths, strides, offset)
    return view.permute([axes.index(axis) for axis in logical.split()])


NUM_BLOCKS = 7
SIZES = {"block": NUM_BLOCKS, "kv": 2, "token": 16, "head": 3, "dim": 8}
SPEC = FullAttentionSpec(tokens_per_block=16, num_kv_heads=3, head_dim=8, dtype=torch.float16)
PAGE = SPEC.page_size_bytes
NHD = "block kv token head dim"


def config_of(*groups: tuple[KVCacheSpec, str], **options: Any) -> KVCacheConfig:
    """Make a config of groups whose layers are the letters of a word."""
    return KVCacheConfig(
        options.pop("num_blocks", NUM_BLOCKS),
        tuple(KVCacheGroup(spec, tuple(names)) for spec, names in groups),
        **options,
    )


def shapes(caches: CanonicalKVCaches) -> list[tuple[int, ...]]:
    return [tuple(each.tensor.shape) for each in caches.tensors]


def refs(caches: CanonicalKVCaches, group: int = 0) -> list[tuple[int, int, str]]:
    return [
        (ref.tensor_idx, ref.page_size_bytes, "".join(ref.layer_names))
        for ref in caches.group_data_refs[group]
    ]


def nhd() -> torch.Tensor:
    return engine_view(NHD, NHD, SIZES)


MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((4, 3), (2, 5, 5)), dtypes=(torch.float16, torch.float32)
)


def states(
    spec: MambaSpec, raw: torch.Tensor, *, num_blocks: int = NUM_BLOCKS
) -> list[torch.Tensor]:
    """View states over one raw allocation, one page after the other."""
    tensors, start = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        strides = (spec.page_size_bytes // dtype.itemsize, *torch.empty(shape).stride())
        view = raw.view(dtype).as_strided((num_blocks, *shape), strides, start // dtype.itemsize)
        tensors.append(view)
        start += prod(shape) * dtype.itemsize
    return tensors
