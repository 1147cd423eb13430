"""Host pools of SGLang: the supported kinds, and their pages as canonical caches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from kvxfer.errors import LayoutError
from kvxfer.extras import installed_version
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.page_box import Digit
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, MambaSpec, MLASpec

ATTENTION_LAYOUTS = {
    "layer_first": "kv layer block token head dim",
    "page_first": "kv block token layer head dim",
    "page_first_direct": "kv block layer token head dim",
    "page_head": "kv block head token layer dim",
    "page_unified": "block layer kv token head dim",
}
"""Axes of `kv_buffer` by SGLang's name of the layout, outermost first. In `page_unified`, a page
has several such blocks, one for each group of heads.

Source: `MHATokenToKVPoolHost.init_kv_buffer`, `PageUnifiedLayout.page_dims`.
"""

LATENT_LAYOUTS = {
    "layer_first": "layer block token dim",
    "page_first": "block token layer dim",
    "page_first_direct": "block layer token dim",
    "page_unified": "block layer token dim",
}
"""The same for `MLATokenToKVPoolHost`."""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Pages of one host pool.

    Attributes:
        caches: The pages as blocks of one group, over the pool's own memory.
        rows_per_page: Rows of the pool in one page: its tokens, or one state.
        num_kv_heads: KV heads of a rank; None if every rank of a model has the same bytes.
        opaque: For pages whose layout is not known, what must be equal, besides the rank, in
            engines that share them; empty if the layout is known.
    """

    caches: CanonicalKVCaches
    rows_per_page: int
    num_kv_heads: int | None
    opaque: str = ""

    @property
    def places(self) -> list[tuple[int, torch.Size]]:
        """Address and shape of the memory of each tensor."""
        tensors = [each.tensor for each in self.caches.tensors]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


def read_pool(name: str, pool: Any) -> HostPages:
    """Read the pages of the host pool that SGLang calls `name`.

    Raises:
        LayoutError: The kind of the pool is not supported, or its layout is not that of its kind.
    """
    kind = type(pool).__name__
    if kind not in _KINDS or not type(pool).__module__.startswith("sglang."):
        known = ", ".join(sorted(_KINDS))
        raise LayoutError(f"host pool {name!r} is a {kind}; supported kinds are {known}")
    if getattr(pool, "dcp_size", 1) > 1:
        raise LayoutError(f"host pool {name!r} has the tokens of only one of {pool.dcp_size} ranks")
    try:
        return _KINDS[kind](name, pool)
    except AttributeError as exc:
        raise LayoutError(f"host pool {name!r}, a {kind}, has another interface: {exc}") from exc


def _read_attention(name: str, pool: Any) -> HostPages:
    heads, tokens = pool.head_num, pool.page_size
    inner = getattr(getattr(pool, "page_unified_layout", None), "heads_per_group", heads)
    spec = FullAttentionSpec(
        tokens_per_block=tokens, num_kv_heads=heads, head_dim=pool.head_dim, dtype=pool.dtype
    )
    caches = _read_axes(name, pool, ATTENTION_LAYOUTS, spec, heads // inner)
    return HostPages(caches, tokens, heads)


def _read_latents(name: str, pool: Any) -> HostPages:
    tokens = pool.page_size
    spec = MLASpec(tokens_per_block=tokens, head_dim=pool.kv_cache_dim, dtype=pool.dtype)
    return HostPages(_read_axes(name, pool, LATENT_LAYOUTS, spec), tokens, None)


def _read_states(name: str, pool: Any) -> HostPages:
    """Read states of recurrent layers: each rank has its own, and each row is a page."""
    states = [pool.temporal_buffer, *pool.conv_buffer, *getattr(pool, "slot_state_buffers", ())]
    return _read_opaque(name, pool, [each for each in states if each.numel()], 1, 1)


def _read_index_keys(name: str, pool: Any) -> HostPages:
    """Read keys and scales of the indexer of sparse attention, which are the same on all ranks."""
    buffer, tokens = pool.index_k_with_scale_buffer, pool.page_size
    rows = [] if buffer is None else list(buffer) if pool.layout == "layer_first" else [buffer]
    return _read_opaque(name, pool, rows, tokens, None)


_KINDS: Mapping[str, Callable[[str, Any], HostPages]] = {
    "MHATokenToKVPoolHost": _read_attention,
    "MLATokenToKVPoolHost": _read_latents,
    "MambaPoolHost": _read_states,
    "DSAIndexerPoolHost": _read_index_keys,
}
"""Readers of pools by the pool's exact class name: a subclass may lay out its bytes differently."""


def _read_axes(
    name: str, pool: Any, layouts: Mapping[str, str], spec: AttentionSpec, num_groups: int = 1
) -> CanonicalKVCaches:
    """Read a pool of one buffer whose axes are known.

    A page has `num_groups` groups of heads, one after the other; each is read as a block.
    """
    if pool.layout not in layouts:
        found = f"host pool {name!r} has the layout {pool.layout!r}"
        raise LayoutError(f"{found}; supported layouts are {', '.join(layouts)}")
    layout, buffer, num_pages = layouts[pool.layout], pool.kv_buffer, pool.page_num
    group = replace(spec, num_kv_heads=spec.num_kv_heads // num_groups)
    sizes = {
        "block": num_pages * num_groups,
        "layer": pool.layer_num,
        "kv": 2,
        "token": spec.tokens_per_block,
        "head": group.num_kv_heads,
        "dim": spec.head_dim,
    }
    shape = [sizes[axis] for axis in layout.split()]
    if (
        not isinstance(buffer, torch.Tensor)
        or not buffer.is_contiguous()
        or buffer.dtype != pool.dtype
        or buffer.numel() != prod(shape)
        or buffer.device.type != "cpu"
    ):
        found = getattr(buffer, "shape", type(buffer).__name__)
        wanted = f"a buffer {tuple(shape)} of {pool.dtype} in host memory, but has {found}"
        raise LayoutError(f"host pool {name!r}, layout {pool.layout!r}, should have {wanted}")
    config = KVCacheConfig(num_pages * num_groups, (KVCacheGroup(group, _layer_names(pool)),))
    caches = canonicalize({name: buffer.view(shape)}, config, layouts={name: layout})
    if num_groups == 1:
        return caches
    ((ref,),), (blocks,) = caches.group_data_refs, caches.tensors
    page_bytes = num_groups * blocks.page_size_bytes
    of_group = Digit("head", num_groups, blocks.page_size_bytes, group.num_kv_heads)
    boxes = tuple(replace(box, digits=(of_group, *box.digits)) for box in ref.boxes)
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(blocks.tensor.view(num_pages, page_bytes), page_bytes)],
        group_data_refs=[[replace(ref, page_size_bytes=page_bytes, boxes=boxes)]],
        group_specs=[spec],
    )


def _layer_names(pool: Any) -> tuple[str, ...]:
    """Name the layers of a pool as in the whole model; those of a draft model come last."""
    num_layers = min(getattr(pool, "target_layer_num", pool.layer_num), pool.layer_num)
    first = pool.start_layer or 0
    return (
        *(f"layers.{first + index}" for index in range(num_layers)),
        *(f"draft.{index}" for index in range(pool.layer_num - num_layers)),
    )


def _read_opaque(
    name: str, pool: Any, buffers: list[torch.Tensor], rows_per_page: int, num_kv_heads: int | None
) -> HostPages:
    """Read a pool whose pages are opaque bytes: each page is one row of every buffer."""
    kind = type(pool).__name__
    if not buffers:
        raise LayoutError(f"host pool {name!r}, a {kind}, has no bytes on this rank")
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[CanonicalKVCacheRef] = []
    for index, buffer in enumerate(buffers):
        if len(buffer) != len(buffers[0]) or not buffer.is_contiguous():
            shape = f"{tuple(buffer.shape)}, strides {buffer.stride()}"
            raise LayoutError(f"host pool {name!r} should have {len(buffers[0])} rows, has {shape}")
        rows = buffer.reshape(len(buffer), -1).view(torch.int8)
        tensors.append(CanonicalKVCacheTensor(rows, rows.shape[1]))
        refs.append(CanonicalKVCacheRef(index, rows.shape[1], layer_names=(f"{name}.{index}",)))
    described = [f"{tuple(buffer.shape[1:])} {buffer.dtype}" for buffer in buffers]
    release = installed_version("sglang")
    opaque = f"{kind} {pool.layout} {described} of SGLang {release}"
    spec = MambaSpec(
        tokens_per_block=rows_per_page,
        shapes=tuple((ref.page_size_bytes,) for ref in refs),
        dtypes=(torch.int8,) * len(refs),
    )
    caches = CanonicalKVCaches(tensors=tensors, group_data_refs=[refs], group_specs=[spec])
    return HostPages(caches, rows_per_page, num_kv_heads, opaque)
