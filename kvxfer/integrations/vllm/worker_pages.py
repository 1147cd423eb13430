"""What the bytes of a worker's blocks mean, told to the scheduler, which moves them all at once."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from kvxfer.errors import LayoutError, PageMappingError
from kvxfer.integrations.vllm.cpu_packing import (
    PackedPlane,
    cpu_attention_isa,
    cpu_packing,
    kernel_packs_as,
)
from kvxfer.integrations.vllm.interface import OffloadingConfig, installed_version
from kvxfer.integrations.vllm_connector.config import convert_spec
from kvxfer.integrations.vllm_connector.layouts import CPU_BACKEND, layer_cache
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.spec import AttentionSpec

CPU_AXES: dict[str, tuple[str, ...]] = {"k": ("head", "dim", "token")}
"""Portable order of what the CPU attention keeps transposed: otherwise no two elements of a key
would be neighbours on both sides. `cpu_packing` has the evidence."""


class GroupPages(msgspec.Struct, frozen=True, kw_only=True):
    """What one block of a group is on one worker.

    Attributes:
        payload_size_bytes: Bytes of the block.
        boxes: What they are; empty when that cannot be told.
        axes: Portable order of the axes of some parts, where it is not the usual one.
        reason: Why it cannot be told.
    """

    payload_size_bytes: int
    boxes: tuple[PageBox, ...] = ()
    axes: dict[str, tuple[str, ...]] = {}
    reason: str = ""


class WorkerPages(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of one worker are.

    Attributes:
        groups: One for each group that is offloaded.
        num_kv_heads: KV heads of the whole model.
        interleave_tokens: Tokens that one worker keeps before the next one's turn.
    """

    groups: tuple[GroupPages, ...]
    num_kv_heads: int
    interleave_tokens: int = 1


def describe_pages(
    caches: CanonicalKVCaches, config: OffloadingConfig, vllm_config: Any
) -> WorkerPages:
    """Find out what the bytes of this worker's caches mean.

    vLLM says it of the tensors that it bound to its layers. Each is canonicalized anew, and must
    come out as what vLLM handed over; else its group is bytes.

    Args:
        caches: The caches that vLLM handed over, which are bytes.
        config: vLLM's plan of the offloading.
        vllm_config: A `vllm.config.VllmConfig`.
    """
    return WorkerPages(
        groups=tuple(
            _describe_group(refs, group, caches, config, vllm_config)
            for refs, group in zip(caches.group_data_refs, config.groups, strict=True)
        ),
        num_kv_heads=int(vllm_config.model_config.get_total_num_kv_heads()),
        interleave_tokens=int(
            getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1)
        ),
    )


def _describe_group(
    refs: Sequence[CanonicalKVCacheRef],
    group: Any,
    caches: CanonicalKVCaches,
    config: OffloadingConfig,
    vllm_config: Any,
) -> GroupPages:
    size = sum(ref.page_size_bytes for ref in refs)
    axes: Mapping[str, tuple[str, ...]] = {}
    boxes: list[PageBox] = []
    try:
        if len(refs) != len(group.layer_names):
            expected = f"one for each of {len(group.layer_names)} layers"
            raise PageMappingError("layer", f"{len(refs)} pieces", expected)  # noqa: TRY301
        tokens = group.tokens_per_block // (config.parallel.pcp_size * config.parallel.dcp_size)
        start = 0
        for ref, name in zip(refs, group.layer_names, strict=True):
            found, axes = _describe_layer(name, ref, caches, tokens, vllm_config)
            boxes += [box.moved(start) for box in found]
            start += ref.page_size_bytes
    except Exception as exc:  # noqa: BLE001 - what this vLLM does not tell is kept as bytes
        return GroupPages(payload_size_bytes=size, reason=f"{type(exc).__name__}: {exc}")
    return GroupPages(payload_size_bytes=size, boxes=tuple(boxes), axes=dict(axes))


def _describe_layer(
    name: str,
    ref: CanonicalKVCacheRef,
    caches: CanonicalKVCaches,
    tokens_per_block: int,
    vllm_config: Any,
) -> tuple[Sequence[PageBox], Mapping[str, tuple[str, ...]]]:
    layer = vllm_config.compilation_config.static_forward_context[name]
    entry = layer.kv_cache
    if not isinstance(entry, torch.Tensor) and len(entry) == 1:
        (entry,) = entry
    tensor = caches.tensors[ref.tensor_idx]
    spec = convert_spec(layer.get_kv_cache_spec(vllm_config), entry)
    if not isinstance(spec, AttentionSpec):
        raise PageMappingError("head", f"states of {name!r}", "keys and values, or latents")
    spec = replace(spec, tokens_per_block=tokens_per_block, page_size_padded=tensor.page_size_bytes)
    config = KVCacheConfig(len(tensor.tensor), (KVCacheGroup(spec, (name,)),))
    cache = layer_cache(name, entry, config, vllm_config)
    layouts = {name: cache.layout} if cache.layout else None
    ours = canonicalize({name: cache.entry}, config, layouts=layouts)
    found = ours.group_data_refs[0]
    view = ours.tensors[found[0].tensor_idx].tensor
    same = (view.data_ptr(), view.stride(0), found[0].page_size_bytes) == (
        tensor.tensor.data_ptr(),
        tensor.tensor.stride(0),
        ref.page_size_bytes,
    )
    if len(found) > 1 or not same:
        raise LayoutError(f"layer {name!r}: vLLM's block is not {ours}")
    boxes = found[0].boxes
    if layer.get_attn_backend().get_name() != CPU_BACKEND or "head" not in boxes[0].axes:
        return boxes, {}
    *_, token, _ = boxes[0].digits
    packing = _find_packing(spec, token.size, vllm_config)
    if packing is None:
        isa = _instruction_set(spec, token.size, vllm_config)
        return [as_bytes(box, f"packed for {isa}") for box in boxes], {}
    planes = dict(zip(("k", "v"), packing, strict=True))
    return [_as_packed(box, planes[box.part]) for box in boxes], CPU_AXES


def _find_packing(
    spec: AttentionSpec, tokens_per_block: int, vllm_config: Any
) -> tuple[PackedPlane, PackedPlane] | None:
    """In which order the CPU's kernels keep keys and values, None unless they were seen to."""
    isa = _instruction_set(spec, tokens_per_block, vllm_config)
    if isa is None:
        return None
    return _seen_packing(isa, tokens_per_block, spec.head_dim, spec.dtype)


@functools.cache
def _seen_packing(
    isa: str, tokens_per_block: int, head_dim: int, dtype: torch.dtype
) -> tuple[PackedPlane, PackedPlane] | None:
    """What `cpu_packing` says, if the kernel does it: tried once for all layers alike."""
    planes = cpu_packing(
        isa, tokens_per_block=tokens_per_block, head_dim=head_dim, itemsize=dtype.itemsize
    )
    return planes if planes and kernel_packs_as(planes, isa, dtype) else None


def _as_packed(box: PageBox, plane: PackedPlane) -> PageBox:
    *outer, _, _ = box.digits
    stride, inner = box.dtype.itemsize, []
    for axis, step, size in reversed(plane.digits):
        inner.append(Digit(axis, size, stride, step))
        stride *= size
    return replace(box, digits=(*outer, *reversed(inner)))


def as_bytes(box: PageBox, packing: str) -> PageBox:
    """Keys or values of each head as bytes: heads can still be divided among other workers.

    Raises:
        PageMappingError: A head of a block is in several pieces.
    """
    *outer, token, dim = box.digits
    if [digit.axis for digit in outer] != ["head"]:
        raise PageMappingError("token", f"{box.axes} of keys in an unknown order", "one piece")
    num_bytes = token.size * dim.size * box.dtype.itemsize
    return replace(
        box,
        dtype=torch.uint8,
        digits=(*outer, Digit("byte", num_bytes, 1)),
        encoding=f"{token.size} tokens of {box.dtype} {packing} by vLLM {installed_version()} "
        f"on {torch.backends.cpu.get_cpu_capability()}",
    )


def _instruction_set(spec: AttentionSpec, tokens_per_block: int, vllm_config: Any) -> str | None:
    return cpu_attention_isa(
        dtype=vllm_config.model_config.dtype,
        tokens_per_block=tokens_per_block,
        head_dim=spec.head_dim,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
    )
