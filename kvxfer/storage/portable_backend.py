"""Portable pages in a backend: their namespace, and a wrapper that stores them shard by shard."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragment_pairs import cut_both
from kvxfer.kvcache.portable import PageMapping, PortableTensor
from kvxfer.kvcache.spec import KVCacheSpec, UniformTypeKVCacheSpecs
from kvxfer.storage.backend import (
    DONE,
    Backend,
    Outcome,
    Purgeable,
    TellsKept,
    WrappingBackend,
    pick_outcome,
)
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import Move, delete_from
from kvxfer.storage.eviction.retention import Retention, retain_in, retentions_in
from kvxfer.storage.keys import (
    GROUP_INDEX_BYTES,
    BlockKey,
    GroupIdentity,
    Namespace,
    StoredTensor,
    group_of,
    make_block_key,
)
from kvxfer.storage.observer import Reports
from kvxfer.storage.staging_memory import SharesBuffers

T = TypeVar("T")

_SAFETENSORS_DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""Source: https://github.com/huggingface/safetensors, `bindings/python/py_src/safetensors`."""


def portable_namespace(
    namespace: Namespace, mappings: Sequence[PageMapping], specs: Sequence[KVCacheSpec] = ()
) -> Namespace:
    """Create the namespace of portable pages, without the fields that page mappings bridge.

    Model, revision, data type, quantization and configuration must agree, and so must the tensors
    of a page. Layout, block size, parallel mapping and the packing of an instruction set may
    differ: the mappings describe these differences. A difference that they cannot describe is part
    of a tensor's encoding, and thus of the namespace.

    Here, every shard of a group is a group of its own, as `shard_groups` numbers them. The windows
    of `specs` count, because the values of a layer depend on what earlier layers attend to. Pass no
    specs if `config_hash` covers the windows.
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
    """List, for each group, the portable namespace's groups of the shards that a worker holds."""
    firsts = accumulate((len(mapping.page.shards) for mapping in mappings[:-1]), initial=0)
    return [
        [first + shard for shard in mapping.shards]
        for first, mapping in zip(firsts, mappings, strict=True)
    ]


def _describe_windows(spec: KVCacheSpec) -> str:
    """Describe the windows of layers; empty if all layers attend to every token."""
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


class PortableBackend(TellsKept, WrappingBackend):
    """Backend for one worker's shards of portable pages, which workers of another shape can load.

    A block is the shards of a portable page that the worker holds, one after the other, as
    `BlockDescriber` describes them with the same mappings. Each is stored under the key of its
    page and its own group. Workers that hold the same bytes take turns, by key: if it is another
    worker's turn, a store is `DONE` without writing any byte. A worker that holds only a part of
    some shard is refused with a `PageMappingError`.

    The inner backend is opened with `portable_namespace`, and closed with this one.
    """

    # The key of a shard begins like that of its page, and its bytes are in the memory of the page.
    passes_on = frozenset({Purgeable, Reports, SharesBuffers})

    def __init__(self, backend: Backend, mappings: Sequence[PageMapping]) -> None:
        super().__init__(backend)
        self._guard = CallGuard("portable backend")
        self._mappings = tuple(mappings)
        self._groups = shard_groups(mappings)
        self._sizes = [
            [mapping.page.shard_sizes[shard] for shard in mapping.shards] for mapping in mappings
        ]

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each key whether every shard that this worker holds is present."""
        self._guard.check_batch(keys)
        names, counts = self._names(keys)
        return [all(shards) for shards in _by_page(await self.inner.lookup(names), counts)]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; a page that another worker has to store is `DONE` at once."""
        self._guard.check_batch(keys, blocks)
        outcomes = [DONE] * len(keys)
        ours = [index for index, key in enumerate(keys) if self._is_turn(key)]
        if ours:
            chosen = [keys[index] for index in ours]
            stored = await self._move(self.inner.store, chosen, blocks.take(ours))
            for index, outcome in zip(ours, stored, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        self._guard.check_batch(keys, blocks)
        return await self._move(self.inner.load, keys, blocks)

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `Retaining.retain`."""
        names, _ = self._names(keys)
        retain_in(self.inner, names, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """See `Retaining.retentions`: the wish for the first shard of each page."""
        names, counts = self._names(keys)
        starts = np.cumsum([0, *counts])[:-1].tolist()
        return retentions_in(self.inner, [names[start] for start in starts])

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`: a page stays if any shard that this worker holds does."""
        self._guard.check_batch(keys)
        names, counts = self._names(keys)
        gone, left = await delete_from(self.inner, names)
        pages = list(zip(keys, _by_page(names, counts), strict=True))
        kept = {key for key, shards in pages if not left.isdisjoint(shards)}
        return {key for key, shards in pages if not gone.isdisjoint(shards)} - kept, kept

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self._guard.close()
        await self.inner.aclose()

    async def _move(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        names, counts = self._names(keys)
        pages = [self._sizes[group_of(key)] for key in keys]
        sizes = [size for page in pages for size in page]
        if (found := blocks.block_sizes.tolist()) != [sum(page) for page in pages]:
            raise InvalidArgumentError("blocks", found, f"shards of {sizes} bytes")
        return list(map(_worst, _by_page(await move(names, _split(blocks, sizes)), counts)))

    def _names(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[int]]:
        """Return the keys of all shards, and the number of shards of each page."""
        names, counts = [], []
        for key in keys:
            shards = self._groups[self._known_group(key)]
            names += [make_block_key(key[:-GROUP_INDEX_BYTES], shard) for shard in shards]
            counts.append(len(shards))
        return names, counts

    def _is_turn(self, key: BlockKey) -> bool:
        return self._mappings[self._known_group(key)].writes(xxhash.xxh3_64_intdigest(key))

    def _known_group(self, key: BlockKey) -> int:
        if (group := group_of(key)) >= len(self._groups):
            raise UnknownGroupError(group, len(self._groups))
        return group


def _by_page(answers: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Group answers for shards by page; raise if some are missing: `all` of none would be True."""
    ends = list(accumulate(counts))
    if len(answers) != ends[-1]:
        raise BackendUnavailableError(f"{len(answers)} answers for {ends[-1]} shards")
    return [answers[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _split(blocks: Descriptors, sizes: Sequence[int]) -> Descriptors:
    lengths = np.array(sizes, np.uint64)
    shards = Descriptors.of_pieces(np.cumsum(lengths) - lengths, lengths)  # at their offsets
    addresses, _, lengths = cut_both(blocks, shards)
    ends = np.cumsum(lengths).searchsorted(np.cumsum(shards.lengths)) + 1
    return replace(
        blocks,
        addresses=addresses,
        lengths=lengths,
        block_offsets=np.concatenate(([0], ends)),
        payload_starts=np.zeros(len(sizes), np.int64),
    )


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    missed = [outcome for outcome in outcomes if not outcome.done]
    if not missed:
        return DONE
    safe, worst = all(outcome.memory_safe for outcome in outcomes), missed[0]
    for outcome in missed:
        worst = pick_outcome(worst, outcome, memory_safe=safe)
    return worst
