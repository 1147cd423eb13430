"""Layouts of registered KV caches, as vLLM tells them, in the notation of `KVLayout`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.spec import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
)

RegisteredEntry = torch.Tensor | Sequence[torch.Tensor]

AXES = {"B": "block", "H": "head", "N": "token"}
"""Axes by the letters of layout names, from 0.29 on; `C` is one token's elements per head."""
PROBE = {"num_blocks": 1009, "block_size": 16, "num_kv_heads": 7, "head_size": 64}
"""Sizes with which a backend's shape is probed: distinct numbers that backends accept."""
AXIS_OF_SIZE = {1009: "block", 16: "token", 7: "head", 64: "dim", 128: "kv*dim", 2: "kv"}
CPU_BACKEND = "CPU_ATTN"


class LayerCache(NamedTuple):
    """Tensor of a layer with its axes, empty where vLLM does not tell; or states of a layer."""

    entry: RegisteredEntry
    layout: str = ""


def layer_cache(
    name: str, entry: RegisteredEntry, config: KVCacheConfig, vllm_config: Any
) -> LayerCache:
    """Find the layout of a layer's cache, of which `entry` was registered."""
    (group,) = [group for group in config.groups if name in group.layer_names]
    spec = group.spec.for_layer(name)
    if isinstance(spec, MambaSpec):
        if isinstance(entry, torch.Tensor):  # `(num_blocks, 1, 1, bytes)`, with padding or without
            entry = [entry[:, 0, 0, : spec.unpadded_page_size_bytes]]
        return LayerCache(entry)
    if not isinstance(spec, AttentionSpec) or not isinstance(entry, torch.Tensor):
        return LayerCache(entry)
    backend = vllm_config.compilation_config.static_forward_context[name].get_attn_backend()
    named = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    layout = _axes_of_name(named, spec, entry.ndim) if named else _axes_of_backend(backend)
    if backend.get_name() == CPU_BACKEND and layout.endswith("kv*dim"):
        return LayerCache(_as_planes(entry), "block head kv token dim")
    return LayerCache(entry, layout)


def cross_layer_layout(attn_backend: Any) -> str:
    """Ask an attention backend for the layout of one tensor of all layers.

    Raises:
        InvalidArgumentError: The backend does not tell.
    """
    layout = _axes_of_backend(attn_backend, layers=True)
    if not layout:
        rule = "a backend that says how it lays out a tensor of all layers"
        raise InvalidArgumentError("attn_backend", attn_backend, rule)
    return layout


def _axes_of_name(name: str, spec: KVCacheSpec, num_axes: int) -> str:
    """Convert a layout's name to axes; tensors of latents may have a head axis of one or none."""
    if not isinstance(spec, (MLASpec, SlidingWindowMLASpec)):
        return " ".join(AXES.get(letter, "kv*dim") for letter in name if letter != "L")
    axes = [AXES.get(letter, "dim") for letter in name if letter != "L"]
    return " ".join(axis for axis in axes if axis != "head" or num_axes == len(axes))


def _axes_of_backend(backend: Any, *, layers: bool = False) -> str:
    """Derive the axes, in order of memory, from a backend's shape and stride order."""
    try:
        shape = backend.get_kv_cache_shape(**PROBE)
    except (AttributeError, NotImplementedError):
        return ""
    axes = [AXIS_OF_SIZE.get(size, "") for size in shape]
    if not all(axes):
        return ""
    if layers:
        axes = ["layer", *axes]
    try:
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=layers)
    except (AttributeError, NotImplementedError):
        order = () if layers else range(len(axes))
    return " ".join(axes[index] for index in order)


def _as_planes(tensor: torch.Tensor) -> torch.Tensor:
    """View a CPU cache as its kernels do: in each block and head all keys, then all values.

    Its shape `(num_blocks, heads, tokens, 2*dim)` says otherwise.
    """
    num_blocks, heads, tokens, width = tensor.shape
    block_stride, head_stride, _, _ = tensor.stride()
    dim = width // 2
    return tensor.as_strided(
        (num_blocks, heads, 2, tokens, dim), (block_stride, head_stride, tokens * dim, dim, 1)
    )
