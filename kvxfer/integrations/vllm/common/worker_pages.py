"""Worker pages: what the bytes of a worker's blocks mean, described for the scheduler."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec
import torch

from kvxfer.errors import KVXferError, LayoutError, PageMappingError
from kvxfer.integrations.vllm.common.cpu_packing import (
    PackedPlane,
    cpu_attention_isa,
    cpu_kernels,
    cpu_packing,
    is_cpu,
    kernel_packs_as,
)
from kvxfer.integrations.vllm.common.kv_caches import CPU_BACKEND, canonicalize_layers, convert_spec
from kvxfer.integrations.vllm.common.model_identity import draft_of
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import is_state

logger = logging.getLogger(__name__)

KV_HEADS = re.compile(
    r"(.*_)?(key_value_heads|(n|num)_kv_heads?|n_head_kv|attention_groups|group_num)"
)
"""Names of model settings that state how many KV heads layers have, such as ChatGLM's
`multi_query_group_num`. Source: `ModelArchConfigConvertorBase` of vLLM."""
HEADS = re.compile(r"head|group|kv|quer(y|ies)")
"""Matches names of settings that may state it in some other way."""
NO_KV_HEADS = frozenset({
    "attention_head_dim", "attention_heads", "clip_qkv", "d_head", "d_kv", "dim_head", "head_dim",
    "head_size", "index_head_dim", "index_n_heads", "kv_channels", "kv_lora_rank",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_n_groups", "mamba_n_heads",
    "mamba_num_heads", "n_group", "n_groups", "n_head", "n_heads", "n_mamba_heads",
    "num_attention_heads", "num_heads", "num_kv_shared_layers", "qk_head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "query_pre_attn_scalar", "swa_head_dim", "swa_v_head_dim", "topk_group",
    "v_head_dim",
})  # fmt: skip
"""Top-level settings that `HEADS` matches but that, as one integer, say nothing of KV heads."""
NO_LAYERS = frozenset({
    "audio_config", "compression_config", "quantization_config", "rope_parameters", "rope_scaling",
    "vision_config",
})  # fmt: skip
"""Nested settings that concern no layer with a KV cache."""

CPU_AXES: dict[str, tuple[str, ...]] = {"k": ("head", "dim", "token")}
"""Portable order of the axes of keys, which CPU attention stores transposed: in the usual order, no
two elements would be neighbours both in the cache and in the page. See `cpu_packing`."""


class GroupPages(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one block of a group on one worker."""

    payload_size_bytes: int
    boxes: tuple[PageBox, ...] = ()  # empty when they are unknown
    axes: dict[str, tuple[str, ...]] = {}  # portable order, for parts where it is unusual
    # Of the keys and values, if any. On a GPU, if the boxes are unknown, the kernels' names.
    packing: str = ""
    reason: str = ""  # why the boxes are unknown


class WorkerPages(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one worker. A `CacheDescription` would refuse what rows keep as plain bytes."""

    groups: tuple[GroupPages, ...]
    num_kv_heads: int  # of the whole model
    interleave_tokens: int = 1  # consecutive tokens of one worker, before those of the next


def describe_pages(
    caches: CanonicalKVCaches,
    groups: Sequence[tuple[Sequence[str], int]],
    vllm_config: Any,
    *,
    with_states: bool = False,
) -> WorkerPages:
    """Describe this worker's caches; `groups` has the layers and tokens per block of each group.

    The tensors that vLLM bound to its layers are canonicalized again, and must lie within the
    blocks of `caches`, else the group is opaque bytes. So are states, unless `with_states`.
    """
    return WorkerPages(
        groups=tuple(
            _describe_group(refs, *group, caches, vllm_config, with_states=with_states)
            for refs, group in zip(caches.group_data_refs, groups, strict=True)
        ),
        num_kv_heads=int(vllm_config.model_config.get_total_num_kv_heads()),
        interleave_tokens=interleave_tokens(vllm_config),
    )


def interleave_tokens(vllm_config: Any) -> int:
    """Return how many consecutive tokens one worker keeps, under either of vLLM's names."""
    names = "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"
    return max(int(getattr(vllm_config.parallel_config, name, 1)) for name in names)


def platform_kernels() -> str:
    """Name what vLLM picks its kernels by: features of the processor, or the GPU's model."""
    from vllm.platforms import current_platform

    if is_cpu():
        return cpu_kernels()
    capability = current_platform.get_device_capability()
    version = capability.as_version_str() if capability is not None else "unknown"
    return f"{current_platform.get_device_name()} of capability {version}"


def layer_kernels(layer_names: Sequence[str], vllm_config: Any) -> str:
    """Name the platform and, on a GPU, the layers' kernels, which give their bytes a meaning."""
    layers = {} if is_cpu() else vllm_config.compilation_config.static_forward_context
    names = {
        f"{each.get_attn_backend().get_name()} {getattr(each, 'gdn_prefill_backend', '')}".rstrip()
        for each in (layers[name] for name in layer_names if name in layers)
    }
    return ", ".join((platform_kernels(), *sorted(names)))


def _require_one_number_of_heads(vllm_config: Any) -> None:
    """Check that workers that share their heads in one layer do so in every layer.

    vLLM states one number of KV heads per model. With more workers than heads, each worker has one
    head of every layer, and no tensor shows which workers share it. So all layers must be known to
    have that number. In MiMo-V2, layers with a sliding window have another one; layers of
    Nemotron-NAS have one each; and a draft model has its own.
    """
    tp_size, numbers = vllm_config.parallel_config.tensor_parallel_size, set[int]()
    unknown: list[str] = []
    for model in filter(None, (vllm_config.model_config, draft_of(vllm_config))):
        numbers.add(int(model.get_total_num_kv_heads()))
        config = getattr(model, "hf_text_config", None)
        for name, value in _stated_kv_heads(config.to_dict() if config is not None else {}):
            numbers |= set() if value is None else {value}
            unknown += [name] if value is None else []
    if tp_size <= max(1, min(numbers)):
        return
    if len(numbers) > 1:
        rule = f"at most {min(numbers)} workers, since layers have {sorted(numbers)} KV heads"
        raise PageMappingError("head", "several numbers", rule)
    if unknown:
        rule = f"at most {min(numbers)} workers, since it may say that layers have other KV heads"
        raise PageMappingError("head", f"the setting {unknown[0]!r}", rule)


def _stated_kv_heads(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int | None]]:
    """Yield settings at any depth that may state a number of KV heads, with that number or None."""
    for key, value in ((str(key), value) for key, value in config.items()):  # labels have integers
        name = f"{path}{key}"
        if key in NO_LAYERS:
            continue
        if isinstance(value, Mapping):
            yield from _stated_kv_heads(value, f"{name}.")
            continue
        several = value if isinstance(value, (list, tuple)) else (value,)
        whole = {each for each in several if type(each) is int}
        if any(isinstance(each, (Mapping, list, tuple)) for each in several):
            yield name, None  # settings by layer
        elif KV_HEADS.fullmatch(key):
            yield from ((name, number) for number in whole)
        elif whole and HEADS.search(key) and (path or len(whole) > 1 or key not in NO_KV_HEADS):
            yield name, None


def _describe_group(
    refs: Sequence[CanonicalKVCacheRef],
    layer_names: Sequence[str],
    tokens_per_block: int,
    caches: CanonicalKVCaches,
    vllm_config: Any,
    *,
    with_states: bool,
) -> GroupPages:
    starts = list(accumulate((ref.page_size_bytes for ref in refs), initial=0))
    size = starts.pop()
    layer, boxes = GroupPages(payload_size_bytes=size), list[PageBox]()
    try:
        _require_one_number_of_heads(vllm_config)
        if len(refs) not in (1, len(layer_names)):
            expected = f"one for each of {len(layer_names)} layers, or for all"
            raise PageMappingError("layer", f"{len(refs)} pieces", expected)  # noqa: TRY301
        for index, name in enumerate(layer_names):
            place = min(index, len(refs) - 1)
            layer = _describe_layer(name, refs[place], caches, tokens_per_block, vllm_config)
            if not with_states and any(map(is_state, layer.boxes)):
                kind = "keys and values, or latents"
                raise PageMappingError("head", f"states of {name!r}", kind)  # noqa: TRY301
            boxes += [box.moved(starts[place]) for box in layer.boxes]
    except Exception as exc:  # a group that is not understood becomes opaque bytes
        if not isinstance(exc, KVXferError):
            text = "only equal engines can share blocks of %s: its cache was not understood"
            logger.warning(text, layer_names[0], exc_info=True)
        return GroupPages(
            payload_size_bytes=size,
            packing="" if is_cpu() else layer_kernels(layer_names, vllm_config),
            reason=f"{type(exc).__name__}: {exc}",  # in the namespace: rewording hides pages
        )
    return msgspec.structs.replace(layer, payload_size_bytes=size, boxes=tuple(boxes))


def _describe_layer(
    name: str,
    ref: CanonicalKVCacheRef,
    caches: CanonicalKVCaches,
    tokens_per_block: int,
    vllm_config: Any,
) -> GroupPages:
    """Find a layer's boxes in the page of a ref, which may be that of several layers."""
    theirs = caches.tensors[ref.tensor_idx].tensor
    layer = _canonicalize_layer(name, tokens_per_block, len(theirs), vllm_config)
    ours, page = layer.tensors[0].tensor, layer.group_data_refs[0][0]
    offset = ours.data_ptr() - theirs.data_ptr()
    is_inside = 0 <= offset <= ref.page_size_bytes - page.page_size_bytes
    if not is_inside or len(layer.tensors) > 1 or ours.stride(0) != theirs.stride(0):
        raise LayoutError(f"layer {name!r}: vLLM's block does not have {layer}")
    found, axes, packing = _describe_packing(name, page.boxes, vllm_config)
    boxes, size = tuple(box.moved(offset) for box in found), page.page_size_bytes
    return GroupPages(payload_size_bytes=size, boxes=boxes, axes=axes, packing=packing)


def _canonicalize_layer(
    name: str, tokens_per_block: int, num_blocks: int, vllm_config: Any
) -> CanonicalKVCaches:
    layer = vllm_config.compilation_config.static_forward_context[name]
    entry = layer.kv_cache
    if not isinstance(entry, torch.Tensor) and len(entry) == 1:
        (entry,) = entry
    customize = getattr(layer.get_attn_backend(), "customize_spec", lambda spec: spec)
    spec = convert_spec(customize(layer.get_kv_cache_spec(vllm_config)), entry)
    spec = replace(spec, tokens_per_block=tokens_per_block)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(spec, (name,)),))
    return canonicalize_layers({name: entry}, config, vllm_config)


def _describe_packing(
    name: str, boxes: Sequence[PageBox], vllm_config: Any
) -> tuple[Sequence[PageBox], dict[str, tuple[str, ...]], str]:
    """Describe a layer's boxes in the order of its kernels; return boxes, axes and packing.

    Only the kernels that compute a state know what its elements mean.
    """
    from vllm.platforms import current_platform

    attention = vllm_config.compilation_config.static_forward_context[name]
    kind = attention.get_attn_backend().get_name()
    if is_state(boxes[0]):
        backend = getattr(getattr(vllm_config, "mamba_config", None), "backend", None)
        kernels = layer_kernels([name], vllm_config)
        encoding = f"{kind} of vLLM {installed_version()}, {backend}, {kernels}"
        return [replace(box, encoding=encoding) for box in boxes], {}, ""
    if "INDEXER" in kind and boxes[0].dtype is torch.uint8:  # all values, then all scales
        order = f"by {kind} on {current_platform.device_name}"
        return [as_bytes(box, order) for box in boxes], {}, ""
    if kind != CPU_BACKEND or "head" not in boxes[0].axes:
        return boxes, {}, ""
    *_, token, dim = boxes[0].digits
    isa = cpu_attention_isa(
        dtype=vllm_config.model_config.dtype,
        tokens_per_block=token.size,
        head_dim=dim.size,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
    )
    return *unpack(boxes, isa), str(isa)


def unpack(
    boxes: Sequence[PageBox], isa: str | None
) -> tuple[Sequence[PageBox], dict[str, tuple[str, ...]]]:
    """Describe keys and values that CPU attention has packed; return boxes and the order of axes.

    `boxes` describe them as if unpacked, with the digits of token and dimension last. An order
    without rows, such as AMX's pairs, becomes bytes: with named axes, a page would have a two-byte
    fragment for each element.
    """
    *_, token, dim = boxes[0].digits
    packing = isa and _proven_packing(isa, token.size, dim.size, boxes[0].dtype)
    if not packing:
        release = f"packed for {isa} by vLLM {installed_version()} on {cpu_kernels()}"
        return [as_bytes(box, release) for box in boxes], {}
    if not all(plane.has_rows for plane in packing):
        return [as_bytes(box, f"packed for {isa}") for box in boxes], {}
    planes = dict(zip(("k", "v"), packing, strict=True))
    return [_as_packed(box, planes[box.part]) for box in boxes], CPU_AXES


@functools.cache
def _proven_packing(
    isa: str, tokens_per_block: int, head_dim: int, dtype: torch.dtype
) -> tuple[PackedPlane, PackedPlane] | None:
    """Return `cpu_packing` if the kernel confirms it; tested once for all equal layers."""
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
    """Turn the part of each head into bytes, so that workers can still divide the heads."""
    *outer, token, dim = box.digits
    if any(digit.axis != "head" for digit in outer):
        raise PageMappingError("token", f"{box.axes} of keys in an unknown order", "one piece")
    num_bytes = token.size * dim.size * box.dtype.itemsize
    return replace(
        box,
        dtype=torch.uint8,
        digits=(*outer, Digit("byte", num_bytes, 1)),
        encoding=" ".join((f"{token.size} tokens of {box.dtype} {packing}", box.encoding)).strip(),
    )
