"""Host pools of SGLang: the kinds that are known, and their pages as canonical caches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from kvxfer.errors import LayoutError
from kvxfer.extras import installed_version
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLASpec

ATTENTION_LAYOUTS = {
    "layer_first": "kv layer block token head dim",
    "page_first": "kv block token layer head dim",
    "page_first_direct": "kv block layer token head dim",
    "page_head": "kv block head token layer dim",
    "page_unified": "block head layer kv token head dim",
}
"""Axes of `kv_buffer` by SGLang's name of the layout, outermost first. An axis that is there twice
is divided: the outer one counts groups of the inner one.

Source: `MHATokenToKVPoolHost.init_kv_buffer`, `PageUnifiedLayout.page_dims`.
"""

LATENT_LAYOUTS = {
    "layer_first": "layer block token dim",
    "page_first": "block token layer dim",
    "page_first_direct": "block layer token dim",
    "page_unified": "block layer token dim",
}
"""The same of `MLATokenToKVPoolHost`."""

OUTER_AXES = frozenset({"kv", "layer"})
"""Axes each of whose indices has rows of its own where they lie outside of the pages."""


@dataclass(frozen=True, slots=True)
class HostPages:
    """Pages of one host pool.

    Attributes:
        caches: The pages as blocks of one group, over the pool's own memory.
        rows_per_page: Indices of the pool that one page has, its tokens or one state.
        num_kv_heads: KV heads of a rank; None where every rank of a model has the same bytes.
        opaque: What must be equal, besides the rank, in engines that share pages whose bytes have
            no meaning here; empty where they have one.
    """

    caches: CanonicalKVCaches
    rows_per_page: int
    num_kv_heads: int | None
    opaque: str = ""


def read_pool(name: str, pool: Any) -> HostPages:
    """Read the pages of a host pool.

    Args:
        name: SGLang's name of the pool.
        pool: The pool.

    Raises:
        LayoutError: The pool is of a kind that is not known, or not as that kind is known.
    """
    kind = type(pool).__name__
    if kind not in _KINDS or not type(pool).__module__.startswith("sglang."):
        known = ", ".join(sorted(_KINDS))
        raise LayoutError(f"host pool {name!r} is a {kind}, and known are {known}")
    if getattr(pool, "dcp_size", 1) > 1:
        raise LayoutError(f"host pool {name!r} has the tokens of one of {pool.dcp_size} ranks")
    try:
        return _KINDS[kind](name, pool)
    except AttributeError as exc:
        raise LayoutError(f"host pool {name!r}, a {kind}, is of another release: {exc}") from exc


def _read_attention(name: str, pool: Any) -> HostPages:
    heads, dim, tokens = pool.head_num, pool.head_dim, pool.page_size
    inner = getattr(getattr(pool, "page_unified_layout", None), "heads_per_group", heads)
    sizes = {"kv": 2, "token": tokens, "head": inner, "dim": dim}
    spec = FullAttentionSpec(
        tokens_per_block=tokens, num_kv_heads=heads, head_dim=dim, dtype=pool.dtype
    )
    caches = _read_axes(name, pool, ATTENTION_LAYOUTS, sizes, ("k", "v"), spec)
    return HostPages(caches, tokens, heads)


def _read_latents(name: str, pool: Any) -> HostPages:
    dim, tokens = pool.kv_cache_dim, pool.page_size
    spec = MLASpec(tokens_per_block=tokens, head_dim=dim, dtype=pool.dtype)
    sizes = {"token": tokens, "dim": dim}
    caches = _read_axes(name, pool, LATENT_LAYOUTS, sizes, ("latent",), spec)
    return HostPages(caches, tokens, None)


def _read_states(name: str, pool: Any) -> HostPages:
    """Read states of recurrent layers, of which each rank has its own; one index is one page."""
    states = [pool.temporal_buffer, *pool.conv_buffer, *getattr(pool, "slot_state_buffers", ())]
    return _read_opaque(name, pool, [each for each in states if each.numel()], 1, 1)


def _read_index_keys(name: str, pool: Any) -> HostPages:
    """Read keys and scales of the indexer of sparse attention, which are the same on all ranks."""
    buffer, tokens = pool.index_k_with_scale_buffer, pool.page_size
    if buffer is None:
        kind = type(pool).__name__
        raise LayoutError(f"host pool {name!r}, a {kind}, has no bytes on this rank")
    rows = list(buffer) if pool.layout == "layer_first" else [buffer]
    return _read_opaque(name, pool, rows, tokens, None)


_KINDS: Mapping[str, Callable[[str, Any], HostPages]] = {
    "MHATokenToKVPoolHost": _read_attention,
    "MLATokenToKVPoolHost": _read_latents,
    "MambaPoolHost": _read_states,
    "DSAIndexerPoolHost": _read_index_keys,
}
"""Kinds of pools by the names of their classes: a subclass keeps its bytes in another way."""


def _read_axes(
    name: str,
    pool: Any,
    layouts: Mapping[str, str],
    sizes: Mapping[str, int],
    parts: tuple[str, ...],
    spec: KVCacheSpec,
) -> CanonicalKVCaches:
    """Read a pool of one buffer whose axes are known."""
    if pool.layout not in layouts:
        known = ", ".join(layouts)
        raise LayoutError(
            f"host pool {name!r} has the layout {pool.layout!r}, and known are {known}"
        )
    axes, buffer, num_pages = layouts[pool.layout].split(), pool.kv_buffer, pool.page_num
    sizes = {**sizes, "block": num_pages, "layer": pool.layer_num}
    shape = [sizes[axis] for axis in axes]
    if axes.count("head") > 1:
        shape[axes.index("head")] = pool.head_num // sizes["head"]
    if (
        not isinstance(buffer, torch.Tensor)
        or not buffer.is_contiguous()
        or buffer.dtype != pool.dtype
        or buffer.numel() != prod(shape)
        or buffer.device.type != "cpu"
    ):
        found = getattr(buffer, "shape", type(buffer).__name__)
        wanted = f"a buffer {tuple(shape)} of {pool.dtype} in host memory, and has {found}"
        raise LayoutError(f"host pool {name!r}, layout {pool.layout!r}, should have {wanted}")
    names = list(_layer_names(pool))
    item = buffer.element_size()
    strides = [prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
    block = axes.index("block")
    outer = [(axes[axis], shape[axis], strides[axis]) for axis in range(block)]
    inner = [(axes[axis], shape[axis], strides[axis]) for axis in range(block + 1, len(axes))]
    assert OUTER_AXES.issuperset(axis for axis, _, _ in outer)
    page_bytes = prod(shape[block + 1 :]) * item
    flat = buffer.reshape(-1).view(torch.int8)
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[CanonicalKVCacheRef] = []
    for place in product(*(range(size) for _, size, _ in outer)):
        offset = sum(i * stride for i, (_, _, stride) in zip(place, outer, strict=True))
        at = {axis: index for index, (axis, _, _) in zip(place, outer, strict=True)}
        rows = flat.as_strided((num_pages, page_bytes), (strides[block], 1), offset)
        boxes = tuple(_boxes(names, parts, inner, at, pool.dtype))
        refs.append(
            CanonicalKVCacheRef(
                tensor_idx=len(tensors),
                page_size_bytes=page_bytes,
                layer_names=tuple(dict.fromkeys(box.layer_name for box in boxes)),
                layout=layouts[pool.layout],
                boxes=boxes,
            )
        )
        tensors.append(CanonicalKVCacheTensor(rows, page_bytes))
    return CanonicalKVCaches(tensors=tensors, group_data_refs=[refs], group_specs=[spec])


def _boxes(
    layer_names: list[str],
    parts: tuple[str, ...],
    inner: list[tuple[str, int, int]],
    at: Mapping[str, int],
    dtype: torch.dtype,
) -> Iterator[PageBox]:
    """Describe what a row has of each layer and part.

    Args:
        layer_names: All layers of the pool.
        parts: Its parts.
        inner: Name, size and stride in bytes of the axes of a row, outermost first.
        at: Index of the row along the axes outside of the pages.
        dtype: Type of the elements.
    """
    steps = {axis: stride for axis, _, stride in inner}
    digits = []
    for index, (axis, size, stride) in enumerate(inner):
        if axis not in OUTER_AXES:
            step = prod(each for other, each, _ in inner[index + 1 :] if other == axis)
            digits.append(Digit(axis, size, stride, step))
    for layer, part in product(range(len(layer_names)), range(len(parts))):
        if at.get("layer", layer) != layer or at.get("kv", part) != part:
            continue
        yield PageBox(
            layer_name=layer_names[layer],
            part=parts[part],
            dtype=dtype,
            digits=tuple(digits),
            offset_bytes=layer * steps.get("layer", 0) + part * steps.get("kv", 0),
        )


def _layer_names(pool: Any) -> Iterator[str]:
    """Name the layers of a pool as in the whole model; those of a draft model come last."""
    num_layers = getattr(pool, "target_layer_num", pool.layer_num)
    for index in range(pool.layer_num):
        drafted = index - num_layers
        yield f"draft.{drafted}" if drafted >= 0 else f"layers.{(pool.start_layer or 0) + index}"


def _read_opaque(
    name: str,
    pool: Any,
    buffers: list[torch.Tensor],
    rows_per_page: int,
    num_kv_heads: int | None,
) -> HostPages:
    """Read a pool of buffers whose pages are plain bytes, one row of each buffer a page."""
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[CanonicalKVCacheRef] = []
    for index, buffer in enumerate(buffers):
        if len(buffer) != len(buffers[0]) or not buffer.is_contiguous():
            shape = f"{tuple(buffer.shape)}, strides {buffer.stride()}"
            raise LayoutError(f"host pool {name!r} should have {len(buffers[0])} rows: {shape}")
        rows = buffer.reshape(len(buffer), -1).view(torch.int8)
        tensors.append(CanonicalKVCacheTensor(rows, rows.shape[1]))
        refs.append(CanonicalKVCacheRef(index, rows.shape[1], layer_names=(f"{name}.{index}",)))
    described = [f"{tuple(buffer.shape[1:])} {buffer.dtype}" for buffer in buffers]
    release = installed_version("sglang")
    opaque = f"{type(pool).__name__} {pool.layout} {described} of SGLang {release}"
    spec = MambaSpec(
        tokens_per_block=rows_per_page,
        shapes=tuple((ref.page_size_bytes,) for ref in refs),
        dtypes=(torch.int8,) * len(refs),
    )
    caches = CanonicalKVCaches(tensors=tensors, group_data_refs=[refs], group_specs=[spec])
    return HostPages(caches, rows_per_page, num_kv_heads, opaque)
