"""Namespaces of portable pages: the properties that workers of different shape must share."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.portable import PageMapping, PortableTensor
from kvxfer.kvcache.spec import KVCacheSpec, UniformTypeKVCacheSpecs
from kvxfer.storage.keys import GroupIdentity, Namespace, StoredTensor

_SAFETENSORS_DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Source: https://github.com/huggingface/safetensors, `bindings/python/py_src/safetensors`."""


def portable_namespace(
    namespace: Namespace, mappings: Sequence[PageMapping], specs: Sequence[KVCacheSpec] = ()
) -> Namespace:
    """Make the namespace of portable pages: without the fields that page mappings bridge.

    Model, revision, data type, quantization and configuration must agree, and so must the tensors
    of a page. Layout, block size, parallel mapping and the packing of an instruction set may
    differ: the mappings describe these differences. A difference that they cannot describe is part
    of a tensor's encoding, and so of the namespace.

    Every shard of a group is a group of its own here, as `shard_groups` numbers them.

    Args:
        namespace: Identity of the pages, with whatever is not in their tensors.
        mappings: Page mapping of each group.
        specs: Spec of each group, of which windows count: the values of a layer depend on what
            those before it attend to. None where `config_hash` has the windows.

    Raises:
        InvalidArgumentError: A tensor has a data type that a file cannot name.
    """
    return msgspec.structs.replace(
        namespace,
        layout="",
        parallel={},
        instruction_set="",
        blocks_per_chunk=1,
        groups=tuple(
            GroupIdentity(
                page_sizes_bytes=(sum(tensor.num_bytes for tensor in shard),),
                spec=_describe_windows(specs[index]) if specs else "",
                layouts=tuple(map(_describe, shard)),
                tensors=tuple(map(_stored, shard)),
            )
            for index, mapping in enumerate(mappings)
            for shard in mapping.page.shards
        ),
    )


def shard_groups(mappings: Sequence[PageMapping]) -> list[list[int]]:
    """List for each group the portable namespace's groups of the shards that a worker holds.

    Raises:
        PageMappingError: The worker holds only a part of some shard.
    """
    firsts = accumulate((len(mapping.page.shards) for mapping in mappings[:-1]), initial=0)
    return [
        [first + shard for shard in mapping.shards]
        for first, mapping in zip(firsts, mappings, strict=True)
    ]


def _describe_windows(spec: KVCacheSpec) -> str:
    """Name the windows of layers; empty where all of them attend to every token."""
    layers = spec.layer_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}
    told = [
        f"{layer} {name}={window}".strip()
        for layer, each in sorted(layers.items())
        for name in ("sliding_window", "attention_chunk_tokens")
        if (window := getattr(each, name, None)) is not None
    ]
    return ", ".join(told)


def _describe(tensor: PortableTensor) -> str:
    axes = " ".join(tensor.axes)
    return f"{axes}, {tensor.encoding}" if tensor.encoding else axes


def _stored(tensor: PortableTensor) -> StoredTensor:
    if tensor.dtype not in _SAFETENSORS_DTYPES:
        known = ", ".join(map(str, _SAFETENSORS_DTYPES))
        raise InvalidArgumentError(f"dtype of {tensor.name!r}", tensor.dtype, f"one of {known}")
    return StoredTensor(
        name=tensor.name, dtype=_SAFETENSORS_DTYPES[tensor.dtype], shape=tensor.shape
    )
