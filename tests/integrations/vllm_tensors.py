"""KV caches as releases of vLLM from 0.20 on plan, allocate and register them."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from packaging.version import Version
from vllm.platforms.interface import DeviceCapability
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.worker import utils

NUM_BLOCKS = 6
TOKENS = 32
DTYPE = torch.bfloat16
ATTENTION: dict[str, Any] = {
    "block_size": TOKENS,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": DTYPE,
}
PAGE_BYTES = TOKENS * 2 * 2 * 64 * DTYPE.itemsize
LAYOUTS_ARE_NAMED = hasattr(utils, "allocate_kv_cache")
"""From 0.29 on a layout has a name; before, an attention backend told shape and stride order."""
STATES_ARE_BYTES = Version(vllm.__version__) >= Version("0.27")
"""Since then the states of a recurrent layer are one tensor, and a list of them before."""

FULL = interface.FullAttentionSpec(**ATTENTION)
SLIDING = interface.SlidingWindowSpec(**ATTENTION, sliding_window=48)
LATENT = interface.MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=DTYPE)
STATES = interface.MambaSpec(
    block_size=TOKENS,
    shapes=((3, 64), (4, 16, 8)),
    dtypes=(DTYPE, torch.float32),
    page_size_padded=PAGE_BYTES,
)


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0)
) -> None:
    gpu = SimpleNamespace(
        is_cpu=lambda: False,
        device_name="cuda",
        get_device_name=lambda: name,
        get_device_capability=lambda: DeviceCapability(*capability),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu, raising=False)


def backend(name: str) -> Any:
    module, _, class_name = name.rpartition(".")
    return getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), class_name)


@dataclass
class Caches:
    """Arguments of a worker's connector, and of its registration of caches."""

    config: Any
    vllm_config: Any
    tensors: dict[str, Any] = field(default_factory=dict)


def plan(
    specs: Sequence[Any],
    attn_backend: Any,
    *,
    num_layers: int,
    layout: str,
    num_blocks: int = NUM_BLOCKS,
) -> Caches:
    """Plan groups of one spec each, whose layers lie on top of each other."""
    names = [[f"group{g}.layer{i}" for i in range(num_layers)] for g in range(len(specs))]
    page = specs[0].page_size_bytes
    size = page * num_blocks
    if LAYOUTS_ARE_NAMED:
        of_layer, of_block = (page, page * num_layers) if layout.startswith("B") else (size, page)
        strides = {"layer_stride": of_layer, "block_stride": of_block}
        tensors = [
            interface.KVCacheTensor(size=size * num_layers, layers=layers, **strides)
            for layers in names
        ]
    else:
        tensors = [
            interface.KVCacheTensor(size=size, shared_by=list(shared))
            for shared in zip(*names, strict=True)
        ]
    groups = [interface.KVCacheGroupSpec(*each) for each in zip(names, specs, strict=True)]
    layer = SimpleNamespace(get_attn_backend=lambda: attn_backend)
    return Caches(
        config=interface.KVCacheConfig(num_blocks, tensors, groups),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(**({"kv_cache_layout": layout} if layout else {})),
            compilation_config=SimpleNamespace(
                static_forward_context={name: layer for layers in names for name in layers}
            ),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        ),
    )


def allocate(specs: Sequence[Any], attn_backend: Any, *, layout: str = "") -> Caches:
    """Allocate two layers of each group, as this release's workers do."""
    caches = plan(specs, attn_backend, num_layers=2, layout=layout)
    if LAYOUTS_ARE_NAMED:
        named = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout[layout]
        caches.tensors = utils.allocate_kv_cache(caches.config, torch.device("cpu"), named)
        return caches
    specs_of = {
        name: g.kv_cache_spec for g in caches.config.kv_cache_groups for name in g.layer_names
    }
    for tensor in caches.config.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        for name in tensor.shared_by:
            spec = specs_of[name]
            is_recurrent = isinstance(spec, interface.MambaSpec)
            caches.tensors[name] = (
                _states(raw, spec) if is_recurrent else _view(raw, spec, attn_backend)
            )
    return caches


def allocate_cross_layer(spec: Any, attn_backend: Any) -> tuple[Caches, torch.Tensor]:
    """Allocate one tensor of four layers, as workers did up to 0.28."""
    caches = plan([spec], attn_backend, num_layers=4, layout="")
    raw = torch.zeros(4 * spec.page_size_bytes * NUM_BLOCKS, dtype=torch.int8)
    return caches, _physical(raw, spec, attn_backend, num_layers=4)[0]


def _view(raw: torch.Tensor, spec: Any, attn_backend: Any) -> torch.Tensor:
    tensor, order = _physical(raw, spec, attn_backend)
    return tensor.permute(*[order.index(axis) for axis in range(len(order))])


def _physical(
    raw: torch.Tensor, spec: Any, attn_backend: Any, *, num_layers: int = 0
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """View memory in the order of its axes; which axis of the backend's shape each of them is."""
    shape = attn_backend.get_kv_cache_shape(
        NUM_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    if num_layers:
        shape = (num_layers, *shape)
    ask: Callable[..., Any] = getattr(attn_backend, "get_kv_cache_stride_order", _no_stride_order)
    try:
        order = tuple(ask(include_num_layers_dimension=bool(num_layers)))
    except NotImplementedError:
        order = tuple(range(len(shape)))
    return raw.view(spec.dtype).view([shape[axis] for axis in order]), order


def _no_stride_order(**_: Any) -> Any:
    raise NotImplementedError


def _states(raw: torch.Tensor, spec: Any) -> list[torch.Tensor] | torch.Tensor:
    if STATES_ARE_BYTES:
        return raw.view(NUM_BLOCKS, 1, 1, spec.page_size_bytes)
    states, offset_bytes = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        whole = torch.empty((NUM_BLOCKS, *shape), dtype=dtype)
        strides = (spec.page_size_bytes // dtype.itemsize, *whole.stride()[1:])
        offset = offset_bytes // dtype.itemsize
        states.append(raw.view(dtype).as_strided(whole.shape, strides, offset))
        offset_bytes += whole[0].nbytes
    return states
