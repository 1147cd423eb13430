"""Rows of host memory, each the chunks of all workers: their namespace and page mappings."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec
import torch

from kvxfer.backends.host import PoolShape
from kvxfer.backends.host.memory import HEADER_BYTES, SharedSegment
from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.integrations.vllm.common.worker_pages import WorkerPages, platform_kernels
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConfig,
    group_ids,
    layout_name,
    workers_keep_the_same,
)
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import (
    OPAQUE,
    PageMapping,
    WorkerShard,
    compile_mapping,
    decode_dtype,
    encode_dtype,
    portable_page,
    verify_mappings,
)
from kvxfer.storage.keys import GroupIdentity, Namespace

SEGMENT_BYTES = HEADER_BYTES + (256 << 10)
SEGMENT_HEADER = b"kvxfer worker identity 1"


def row_namespace(
    config: OffloadingConfig, model: Namespace, *, row_size_bytes: int, interleave_tokens: int = 1
) -> Namespace:
    """Build the namespace of rows of host memory: the chunks of all workers under one key.

    vLLM's release is part of it: an attention backend does not expose the layout of its pages,
    which has changed between releases.
    """
    known = {
        group_id: GroupIdentity(
            page_sizes_bytes=(row_size_bytes,),
            layer_names=group.layer_names,
            spec=f"{config.cache.blocks_per_chunk} blocks of {group.tokens_per_block} tokens",
        )
        for group_id, group in zip(group_ids(config), config.groups, strict=True)
    }
    unused = GroupIdentity(page_sizes_bytes=(row_size_bytes,), spec="not offloaded")
    parallel = config.parallel
    has_turns = parallel.pcp_size * parallel.dcp_size > 1 and interleave_tokens > 1
    return msgspec.structs.replace(
        model,
        model=config.model.name,
        dtype=config.model.dtype,
        layout=f"{layout_name(config)} of vLLM {installed_version()}",
        groups=tuple(known.get(group, unused) for group in range(max(known) + 1)),
        parallel={
            "world_size": parallel.world_size,
            "tp_size": parallel.tp_size,
            "pp_size": parallel.pp_size,
            "pcp_size": parallel.pcp_size,
            "dcp_size": parallel.dcp_size,
            "bytes_per_block": config.worker_kv_bytes_per_block,
            "replicated": int(workers_keep_the_same(config)),
            "canonical": int(getattr(config, "canonical_layout", False)),  # from 0.28 on
            **({"interleave_tokens": interleave_tokens} if has_turns else {}),
        },
        instruction_set=platform_kernels(),
    )


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one worker's model and pages; the scheduler does not get it from vLLM."""

    model: Namespace  # as `identify_model` makes it
    pages: WorkerPages


def publish_identity(name: str, rank: int, identity: WorkerIdentity) -> SharedSegment:
    """Publish an identity in shared memory for the scheduler; to be closed when the engine ends."""
    segment = SharedSegment(f"{name}-worker-{rank}", SEGMENT_HEADER, SEGMENT_BYTES)
    encoded = zlib.compress(msgspec.json.encode(identity, enc_hook=encode_dtype))
    segment.memory[HEADER_BYTES : HEADER_BYTES + len(encoded)] = list(encoded)
    return segment


def receive_identities(name: str, num_workers: int) -> list[WorkerIdentity]:
    """Read the identities that all workers published, by rank."""
    received = []
    for rank in range(num_workers):
        segment = SharedSegment(f"{name}-worker-{rank}", SEGMENT_HEADER, SEGMENT_BYTES)
        with closing(segment):
            encoded = segment.memory[HEADER_BYTES:].tobytes()
        if not any(encoded):
            rule = "workers that published their model's identity; else use host:// alone"
            raise InvalidArgumentError("backend", "a tier below host memory", rule)
        text = zlib.decompressobj().decompress(encoded)
        received.append(msgspec.json.decode(text, type=WorkerIdentity, dec_hook=decode_dtype))
    return received


def num_copies(pages: WorkerPages | None, config: OffloadingConfig) -> int:
    """Count the workers that keep the same bytes; a row has one part for all of them."""
    parallel = config.parallel
    if workers_keep_the_same(config):
        return int(parallel.world_size)
    if pages is None or parallel.world_size != parallel.tp_size or parallel.dcp_size > 1:
        return 1
    boxes = [box for group in pages.groups for box in group.boxes]
    if any(group.reason for group in pages.groups) or any("head" not in b.axes for b in boxes):
        return 1  # pages without heads are divided in another way
    try:
        for group in pages.groups:  # raises if a layer's tensor has another number of heads
            _shard([pages], config, 0).place(group.boxes)
    except (PageMappingError, InvalidArgumentError):
        return 1
    return max(1, int(parallel.tp_size) // max(1, pages.num_kv_heads))


def map_rows(
    workers: Sequence[WorkerPages], config: OffloadingConfig, shape: PoolShape, encoding: str
) -> list[PageMapping]:
    """Build the page mapping of rows for every group that a key may name; `workers` are by rank.

    A row has a part for each worker, or one for all workers that keep the same bytes. A group that
    cannot be mapped is stored as plain bytes, which only engines with the same `encoding` read.
    """
    position = {group_id: index for index, group_id in enumerate(group_ids(config))}
    mappings = []
    for group_id in range(max(position) + 1):
        try:
            if group_id not in position:
                raise PageMappingError(OPAQUE, f"group {group_id}", "one that is offloaded")  # noqa: TRY301
            mapping = _map_group(workers, config, shape, position[group_id])
        except (PageMappingError, InvalidArgumentError) as exc:  # its text is in the namespace
            at = position.get(group_id)
            groups = [] if at is None else [worker.groups[at] for worker in workers]
            packings = sorted({group.packing for group in groups if group.packing})
            packed = f", packed for {' and '.join(packings)}" if packings else ""
            mapping = _opaque_mapping(shape.slot_size_bytes, f"{encoding} ({exc}){packed}")
        mappings.append(mapping)
    return mappings


def _map_group(
    workers: Sequence[WorkerPages], config: OffloadingConfig, shape: PoolShape, group: int
) -> PageMapping:
    """Build the page mapping of a group's rows; raises if it is not known what they mean."""
    boxes = list(_row_boxes(workers, config, shape, group))
    tokens = config.groups[group].tokens_per_block * config.cache.blocks_per_chunk
    page = portable_page(
        boxes, _shard(workers, config, 0), num_tokens=tokens, axes=workers[0].groups[group].axes
    )
    mapping = compile_mapping(
        boxes, page, tokens_per_block=tokens, payload_sizes=[shape.slot_size_bytes]
    )
    verify_mappings([mapping])
    return mapping


def _opaque_mapping(row_size_bytes: int, encoding: str) -> PageMapping:
    """Build a page mapping that stores a row as plain bytes."""
    digits = (Digit("byte", row_size_bytes, 1),)
    box = PageBox(
        layer_name="row", part=OPAQUE, dtype=torch.uint8, digits=digits, encoding=encoding
    )
    page = portable_page([box], WorkerShard(num_kv_heads=1), num_tokens=1)
    return compile_mapping([box], page, tokens_per_block=1, payload_sizes=[row_size_bytes])


def _row_boxes(
    workers: Sequence[WorkerPages], config: OffloadingConfig, shape: PoolShape, group: int
) -> Iterator[PageBox]:
    """Yield the boxes of a group in a row, with the indices of the whole model."""
    if config.parallel.pp_size > 1:
        raise PageMappingError("layer", f"{config.parallel.pp_size} stages", "one stage")
    tokens = config.groups[group].tokens_per_block
    copies = config.parallel.world_size // shape.num_parts
    for part in range(shape.num_parts):
        rank = part * copies
        pages, shard = workers[rank].groups[group], _shard(workers, config, rank)
        if pages.reason:
            raise PageMappingError(OPAQUE, pages.reason, "named axes")
        num_writers, _ = shard.writers(pages.boxes)
        if num_writers != copies:
            expected = f"{copies} for a part of a row"
            raise PageMappingError("head", f"kept by {num_writers} workers", expected)
        for block in range(config.cache.blocks_per_chunk):
            start = part * shape.part_size_bytes + block * pages.payload_size_bytes
            for box in shard.place(pages.boxes):
                yield box.moved(start).shifted("token", block * tokens)


def _shard(workers: Sequence[WorkerPages], config: OffloadingConfig, rank: int) -> WorkerShard:
    return WorkerShard(
        num_kv_heads=max(1, workers[0].num_kv_heads),
        rank=rank,
        tp_size=config.parallel.tp_size,
        pcp_size=config.parallel.pcp_size,
        dcp_size=config.parallel.dcp_size,
        interleave_tokens=workers[0].interleave_tokens,
    )
