"""Benchmark of layouts: bytes of one I/O and descriptors of a transfer, by kind of allocation."""

import mmap
import statistics
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.batches import KIB
from benchmarks.models import MODELS, PublishedModel
from benchmarks.report import BenchRow, compare
from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber, describe

BlockIds = NDArray[np.int64]

NUM_TINY_BLOCKS = 3
AS_PUBLISHED = "= 1 ± 0.02"
PER_TRANSFER = "descriptors/transfer"
EACH_LAYER, ALL_LAYERS = "a tensor for each layer", "blocks of all layers"

CACHE_BYTES = 68 << 30
"""Memory for the cache of a small model on an H100 of 80 GB."""
MAP_NORESERVE = 0x4000
"""Flag of Linux, missing in Python's `mmap`, that reserves no memory before it is touched."""


WORKLOAD_MODEL = "Qwen3-0.6B"
WORKLOADS = (
    (1000, 16, 56.0, 1.0),
    (128, 1024, 3528.0, 1.0),
    (128, 10240, 34000.0, 422.0),
)
"""Requests, tokens, and published descriptors of a transfer: with a tensor for each layer, and
with blocks of all. Source: https://github.com/vllm-project/vllm/pull/30207, prefill to decode over
NIXL on H100. In a reused cache, block ids depend on all earlier requests; there only the drop has
a goal."""


class FreeBlocks:
    """vLLM's queue of free blocks, with the prefix cache on.

    Blocks are taken from the head. The full blocks of a request return to the end, last block
    first, since the beginning of a prompt is the likeliest prefix hit. Block 0 is the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = deque(range(1, num_blocks))

    def take(self, count: int) -> BlockIds:
        """Take the blocks of a new request, in its order.

        Raises:
            IndexError: Too few blocks are free.
        """
        return np.array([self._ids.popleft() for _ in range(count)], np.int64)

    def give_back(self, block_ids: BlockIds) -> None:
        """Return the blocks of a request, given in its order, to the queue."""
        self._ids.extend(block_ids[::-1].tolist())


def assign_blocks(
    num_blocks: int, num_requests: int, blocks_per_request: int
) -> Iterator[BlockIds]:
    """Yield the blocks of each request; a prompt is computed while the previous one is sent."""
    free, being_sent = FreeBlocks(num_blocks), None
    for _ in range(num_requests):
        block_ids = free.take(blocks_per_request)
        if being_sent is not None:
            free.give_back(being_sent)
        being_sent = block_ids
        yield block_ids


def run(*, quick: bool) -> list[BenchRow]:  # noqa: ARG001 - it measures no time
    """Reproduce published figures for blocks of all layers; those figures are the baseline.

    Sizes are measured on the descriptors of tiny caches with the models' shapes, made both ways.

    The descriptors of a transfer are counted on a cache as large as an H100's, in memory that is
    never touched, with block ids from vLLM's queue of free blocks. The payload of a transfer is its
    blocks in order, and neighbours in it merge. The baseline of the drop is the cache with a
    tensor for each layer.
    """
    rows = [row for model in MODELS for row in io_sizes(model)]
    (model,) = (each for each in MODELS if each.name == WORKLOAD_MODEL)
    caches = _caches_in_reserved_memory(model)
    return rows + [row for each in WORKLOADS for row in _transfers(model, caches, *each)]


def io_sizes(model: PublishedModel) -> list[BenchRow]:
    """Measure the KiB of a block's descriptors: a tensor for each layer, and blocks of all."""
    spec, config = model.spec, _config(model, NUM_TINY_BLOCKS)
    shape = model.backend.cache_shape(spec, NUM_TINY_BLOCKS)
    kv_caches = {
        name: torch.empty(shape, dtype=spec.dtype) for name in config.groups[0].layer_names
    }
    name = f"{model.name} ({model.remark})" if model.remark else model.name
    rows = []
    for how, caches, published in (
        (EACH_LAYER, canonicalize(kv_caches, config), model.registered_bytes),
        (ALL_LAYERS, allocate_canonical(config, [model.backend]).caches, model.allocated_bytes),
    ):
        block = describe(caches, 0, [1])
        case = f"{name}, {model.shape}, {how}: {len(block)} descriptors a block"
        size, published_kib = block.num_bytes / len(block) / KIB, published / KIB
        goal = "" if model.remark else AS_PUBLISHED
        rows.append(_beside_published(case, size, published_kib, unit="KiB", goal=goal))
    return rows


def _transfers(
    model: PublishedModel,
    caches: Sequence[CanonicalKVCaches],
    num_requests: int,
    tokens_per_request: int,
    *published: float,
) -> list[BenchRow]:
    """Count the descriptors of a workload both ways and, if blocks are reused, their drop."""
    blocks_per_request = -(-tokens_per_request // model.spec.tokens_per_block)
    num_blocks = len(caches[0].tensors[0].tensor)
    are_reused = num_requests * blocks_per_request > num_blocks
    requests = list(assign_blocks(num_blocks, num_requests, blocks_per_request))
    case = f"{num_requests} x {tokens_per_request} tokens of {model.name}, {num_blocks} blocks"
    goal, rows = "" if are_reused else AS_PUBLISHED, []
    for how, made, told in zip((EACH_LAYER, ALL_LAYERS), caches, published, strict=True):
        describer = BlockDescriber(made, blocks_per_chunk=blocks_per_request)
        count = statistics.fmean(len(describer.describe(0, ids)) for ids in requests)
        row = _beside_published(f"{case}, {how}", count, told, unit=PER_TRANSFER, goal=goal)
        rows.append(row)
    if are_reused:
        before, after = ([row.value] for row in rows)
        goal = f"<= {published[1] / published[0]:.4f}"
        rows.append(compare(f"{case}, drop", after, before, unit=PER_TRANSFER, goal=goal))
    return rows


def _caches_in_reserved_memory(model: PublishedModel) -> list[CanonicalKVCaches]:
    """Make the model's caches for an H100: a tensor for each layer, and blocks of all layers."""
    spec, num_layers = model.spec, model.num_layers
    num_blocks = CACHE_BYTES // (num_layers * spec.page_size_bytes)
    config = _config(model, num_blocks)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    reserved = mmap.mmap(-1, num_blocks * num_layers * spec.page_size_bytes, flags)
    memory = torch.frombuffer(reserved, dtype=spec.dtype)
    kv, _, *page = model.backend.cache_shape(spec, num_blocks)
    per_layer = memory.view(num_layers, kv, num_blocks, *page)
    per_block = memory.view(num_blocks, num_layers, kv, *page).movedim(0, 2)
    names = config.groups[0].layer_names
    return [
        canonicalize(dict(zip(names, layers, strict=True)), config)
        for layers in (per_layer, per_block)
    ]


def _config(model: PublishedModel, num_blocks: int) -> KVCacheConfig:
    names = tuple(f"layers.{index}" for index in range(model.num_layers))
    return KVCacheConfig(num_blocks, (KVCacheGroup(model.spec, names),))


def _beside_published(
    case: str, value: float, published: float, *, unit: str, goal: str
) -> BenchRow:
    case = f"{case}, {value / published - 1:+.1%}"
    return compare(case, [value], [published], unit=unit, goal=goal, of_time=True)
