"""Mappings of whole caches: one page mapping for every group of a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from kvxfer.checks import (
    require_instance,
    require_positive,
    require_sequence,
    require_text,
    require_texts,
)
from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable.page import PortablePage, natural_order, portable_page
from kvxfer.kvcache.portable.page_mapping import PageMapping, compile_mapping
from kvxfer.kvcache.portable.worker_shard import OPAQUE, WorkerShard
from kvxfer.kvcache.spec import KVCacheSpec


def map_caches(
    caches: CanonicalKVCaches,
    shard: WorkerShard,
    *,
    tokens_per_page: int | None = None,
    num_shards: int = 1,
    state_heads: Sequence[str | None] = (),
    axes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    opaque: str = "",
) -> tuple[PageMapping, ...]:
    """Map the blocks of every group of a worker's caches to portable pages.

    Args:
        caches: Caches from `canonicalize` or `allocate_canonical`, whose refs have boxes.
        shard: Position of this worker in the model.
        tokens_per_page: Tokens of a portable page: a divisor or a multiple of a block's, over all
            workers that share its tokens, and no more than all blocks have; by default the same.
        num_shards: Equal shares of the heads, stored under separate keys. A worker must hold whole
            shares, so choose the largest number of workers that will divide the heads.
        state_heads: For each state of a recurrent layer the axis, `s0` or `s1`, ..., along which
            workers divide it; by default states can be mapped on a single worker only.
        axes: See `portable_page`; all engines that share pages must give the same.
        opaque: If given, groups that cannot be mapped are stored as plain bytes, for equal workers
            only. The text names all that must be equal besides the rank, such as engine, release
            and layout. The reason is added to the encoding of the stored tensors.

    Returns:
        One mapping per group.

    Raises:
        PageMappingError: A group cannot be mapped, with the reason; never with `opaque`.
        InvalidArgumentError: The caches have no specs, or the heads cannot be divided into
            `num_shards`.
    """
    require_instance("caches", caches, CanonicalKVCaches)
    require_instance("shard", shard, WorkerShard)
    num_shards = require_positive("num_shards", num_shards)
    require_sequence("state_heads", state_heads, "an axis, or None, for each state")
    require_instance("axes", axes, Mapping)
    for part, names in axes.items():
        require_texts(f"axes[{part!r}]", names)
    opaque = require_text("opaque", opaque)
    if tokens_per_page is not None:
        tokens_per_page = require_positive("tokens_per_page", tokens_per_page)
    if not caches.group_specs and not opaque:
        raise InvalidArgumentError("caches", "no specs", "caches made by canonicalize")
    mappings = []
    for group, refs in enumerate(caches.group_data_refs):
        spec = caches.group_specs[group] if caches.group_specs else None
        try:
            boxes = shard.place(_name_heads(payload_boxes(refs), state_heads))
            if spec is None:
                raise PageMappingError("token", "no spec", "the tokens of a block")  # noqa: TRY301
            tokens_per_block = spec.tokens_per_block * shard.num_token_shares
            tokens = tokens_per_page or tokens_per_block
            most = tokens_per_block * min(len(caches.tensors[r.tensor_idx].tensor) for r in refs)
            if tokens > most:
                raise InvalidArgumentError("tokens_per_page", tokens, f"at most {most}")
            page = portable_page(boxes, shard, num_tokens=tokens, num_shards=num_shards, axes=axes)
            mappings.append(_map(refs, boxes, page, shard, tokens_per_block))
        except PageMappingError as exc:
            if not opaque:
                raise
            encoding = f"{opaque}, worker {shard.rank} of {shard.num_workers} ({exc})"
            boxes = opaque_boxes(refs, encoding + _contents(spec, refs))
            page = portable_page(boxes, shard, num_tokens=1)
            mappings.append(_map(refs, boxes, page, shard, 1))
    return tuple(mappings)


def _contents(spec: KVCacheSpec | None, refs: Sequence[CanonicalKVCacheRef]) -> str:
    """Describe what opaque boxes say nothing of: encodings, and layers that are in one row."""
    forms = spec.cache_tensors if spec else ()
    contents = "".join(sorted({f", {form.encoding}" for form in forms if form.encoding}))
    if any(len(ref.layer_names) > 1 for ref in refs):
        contents += f", layers {[list(ref.layer_names) for ref in refs]}"
    return contents


def _map(
    refs: Sequence[CanonicalKVCacheRef],
    boxes: Sequence[PageBox],
    page: PortablePage,
    shard: WorkerShard,
    tokens_per_block: int,
) -> PageMapping:
    num_writers, writer_index = shard.writers(boxes)
    sizes = [ref.page_size_bytes for ref in refs]
    mapping = compile_mapping(boxes, page, tokens_per_block=tokens_per_block, payload_sizes=sizes)
    return replace(mapping, num_writers=num_writers, writer_index=writer_index)


def payload_boxes(refs: Sequence[CanonicalKVCacheRef]) -> list[PageBox]:
    """List the boxes of the payload of a group's block: the pages of its refs, one by one.

    Layers that share the same bytes appear once: as the first by the number in its name.
    """
    boxes: list[PageBox] = []
    start = 0
    for ref in refs:
        if not ref.boxes:
            raise PageMappingError("layout", f"bytes of {list(ref.layer_names)}", "named axes")
        boxes += [box.moved(start) for box in ref.boxes]
        start += ref.page_size_bytes
    boxes.sort(key=lambda box: natural_order(box.layer_name))
    distinct: dict[PageBox, PageBox] = {}
    for box in boxes:
        distinct.setdefault(replace(box, layer_name=""), box)
    return list(distinct.values())


def opaque_boxes(refs: Sequence[CanonicalKVCacheRef], encoding: str) -> tuple[PageBox, ...]:
    """Describe a block as plain bytes; `encoding` names all that must be equal."""
    sizes = [ref.page_size_bytes for ref in refs]
    return tuple(
        PageBox(
            layer_name=ref.layer_names[0] if len(ref.layer_names) == 1 else "row",
            part=f"{OPAQUE}{index}",
            dtype=torch.uint8,
            digits=(Digit("byte", ref.page_size_bytes, 1),),
            offset_bytes=sum(sizes[:index]),
            encoding=encoding,
        )
        for index, ref in enumerate(refs)
    )


def _name_heads(boxes: Sequence[PageBox], state_heads: Sequence[str | None]) -> list[PageBox]:
    axes = {f"state{index}": axis for index, axis in enumerate(state_heads)}
    named = []
    for box in boxes:
        axis = axes.get(box.part)
        digits = tuple(replace(d, axis="head") if d.axis == axis else d for d in box.digits)
        named.append(replace(box, digits=digits))
    return named
