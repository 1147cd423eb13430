"""Benchmark of layouts: bytes of one I/O and descriptors of a transfer, by kind of allocation."""

import mmap
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models import KIB, MODELS, PublishedModel
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber, describe

BlockIds = NDArray[np.int64]

NUM_TINY_BLOCKS = 3
AS_PUBLISHED = "= 1 ± 0.02"
PER_TRANSFER = "descriptors/transfer"

CACHE_BYTES = 68 << 30
"""Memory for the cache of a small model on an H100 of 80 GB."""
MAP_NORESERVE = 0x4000
"""Flag of Linux that Python's `mmap` lacks: memory that is not touched is not reserved either."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload: prompts whose blocks are sent from prefill to decode, and published figures.

    Attributes:
        registered: Published descriptors of a transfer with a tensor for each layer.
        allocated: Published descriptors of a transfer with blocks of all layers.
        reused: Whether the requests have more blocks than the cache, so that blocks are reused.
    """

    num_requests: int
    tokens_per_request: int
    registered: float
    allocated: float
    reused: bool


WORKLOAD_MODEL = "Qwen3-0.6B"
WORKLOADS = (
    Workload(1000, 16, 56.0, 1.0, reused=False),
    Workload(128, 1024, 3528.0, 1.0, reused=False),
    Workload(128, 10240, 34000.0, 422.0, reused=True),
)
"""Source: https://github.com/vllm-project/vllm/pull/30207, prefill to decode over NIXL on H100.
The block ids from a reused cache depend on all requests before; there only the drop has a goal."""


class FreeBlocks:
    """Queue from which vLLM takes blocks, with its prefix cache on.

    Blocks are taken from its head, and the full ones of a request go back to its end, last block
    first: the beginning of a prompt is the likeliest prefix hit. Block 0 is the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids = deque(range(1, num_blocks))

    def take(self, count: int) -> BlockIds:
        """Take the blocks of a new request, in its order.

        Raises:
            IndexError: There are not as many free blocks.
        """
        return np.array([self._ids.popleft() for _ in range(count)], np.int64)

    def give_back(self, block_ids: BlockIds) -> None:
        """Return the blocks of a request, given in its order, to the queue."""
        self._ids.extend(block_ids[::-1].tolist())


def assign_blocks(
    num_blocks: int, num_requests: int, blocks_per_request: int
) -> Iterator[BlockIds]:
    """Yield the blocks of each request; a prompt is computed while the one before is sent."""
    free, being_sent = FreeBlocks(num_blocks), None
    for _ in range(num_requests):
        block_ids = free.take(blocks_per_request)
        if being_sent is not None:
            free.give_back(being_sent)
        being_sent = block_ids
        yield block_ids


def run(*, quick: bool) -> list[BenchRow]:
    """Reproduce published figures of blocks of all layers, which are the baseline.

    Sizes are those of the descriptors of tiny caches of the models' shapes, made both ways.

    Descriptors of a transfer are those of a cache as large as an H100's, in memory that is
    reserved and never touched, for block ids from vLLM's queue of free blocks. The payload of a
    transfer is its blocks in order, and neighbours in it merge. The baseline of the drop and of
    the times is the cache with a tensor for each layer.
    """
    rows = [row for model in MODELS for row in io_sizes(model)]
    (model,) = (each for each in MODELS if each.name == WORKLOAD_MODEL)
    registered, allocated = _caches_in_reserved_memory(model)
    for workload in WORKLOADS:
        rows += _transfers(model, workload, registered, allocated, rounds=5 if quick else 51)
    return rows


def io_sizes(model: PublishedModel) -> list[BenchRow]:
    """Measure KiB of each descriptor of a block: a tensor for each layer, and blocks of all."""
    spec, num_blocks = model.spec, NUM_TINY_BLOCKS
    config = _config(model, num_blocks)
    shape = model.backend.cache_shape(spec, num_blocks)
    kv_caches = {
        name: torch.empty(shape, dtype=spec.dtype) for name in config.groups[0].layer_names
    }
    registered = canonicalize(kv_caches, config)
    allocated = allocate_canonical(config, [model.backend]).caches
    return [
        _io_size(model, "a tensor for each layer", registered, model.registered_bytes),
        _io_size(model, "blocks of all layers", allocated, model.allocated_bytes),
    ]


def _io_size(
    model: PublishedModel, how: str, caches: CanonicalKVCaches, published: float
) -> BenchRow:
    block = describe(caches, 0, [1])
    remark = f" ({model.remark})" if model.remark else ""
    return _beside_published(
        f"{model.name}{remark}, {model.shape}, {how}: {len(block)} descriptors a block",
        block.num_bytes / len(block) / KIB,
        published / KIB,
        unit="KiB",
        goal="" if model.remark else AS_PUBLISHED,
    )


def _transfers(
    model: PublishedModel,
    workload: Workload,
    registered: CanonicalKVCaches,
    allocated: CanonicalKVCaches,
    *,
    rounds: int,
) -> list[BenchRow]:
    """Measure one workload: descriptors both ways; in a reused cache also the drop and the time."""
    blocks_per_request = -(-workload.tokens_per_request // model.spec.tokens_per_block)
    before = BlockDescriber(registered, blocks_per_chunk=blocks_per_request)
    after = BlockDescriber(allocated, blocks_per_chunk=blocks_per_request)
    num_blocks = allocated.tensors[0].tensor.shape[0]
    requests = list(assign_blocks(num_blocks, workload.num_requests, blocks_per_request))
    tokens = f"{workload.tokens_per_request} tokens of {model.name}"
    case = f"{workload.num_requests} x {tokens}, {num_blocks} blocks"
    goal = "" if workload.reused else AS_PUBLISHED
    rows = [
        _beside_published(
            f"{case}, {how}",
            _descriptors_per_transfer(describer, requests),
            published,
            unit=PER_TRANSFER,
            goal=goal,
        )
        for how, describer, published in (
            ("a tensor for each layer", before, workload.registered),
            ("blocks of all layers", after, workload.allocated),
        )
    ]
    if not workload.reused:
        return rows
    shuffled = np.random.default_rng(0).permutation(num_blocks)[:blocks_per_request]
    drop = f"<= {workload.allocated / workload.registered:.4f}"
    of_a_block = f"<= {1 / len(registered.tensors):.4f}"
    last = requests[-1]
    ours, theirs = time_in_turn(
        [lambda: after.describe(0, last), lambda: before.describe(0, last)], rounds=rounds
    )
    return [
        *rows,
        _drop(f"{case}, drop", before, after, requests, goal=drop),
        _drop(f"{tokens}, shuffled blocks, drop", before, after, [shuffled], goal=of_a_block),
        compare(f"{case}, time to describe one transfer", ours, theirs, unit="us"),
    ]


def _drop(
    case: str,
    before: BlockDescriber,
    after: BlockDescriber,
    requests: Sequence[BlockIds],
    *,
    goal: str,
) -> BenchRow:
    value, baseline = (_descriptors_per_transfer(each, requests) for each in (after, before))
    return _row(case, [value], [baseline], unit=PER_TRANSFER, goal=goal)


def _descriptors_per_transfer(describer: BlockDescriber, requests: Sequence[BlockIds]) -> float:
    return statistics.fmean(len(describer.describe(0, block_ids)) for block_ids in requests)


def _caches_in_reserved_memory(
    model: PublishedModel,
) -> tuple[CanonicalKVCaches, CanonicalKVCaches]:
    """Make the model's caches of an H100: a tensor for each layer, and blocks of all layers."""
    spec, num_layers = model.spec, model.num_layers
    num_blocks = CACHE_BYTES // (num_layers * spec.page_size_bytes)
    config = _config(model, num_blocks)
    names = config.groups[0].layer_names
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    reserved = mmap.mmap(-1, num_blocks * num_layers * spec.page_size_bytes, flags)
    memory = torch.frombuffer(reserved, dtype=spec.dtype)
    kv, _, *page = model.backend.cache_shape(spec, num_blocks)
    per_layer = memory.view(num_layers, kv, num_blocks, *page)
    per_block = memory.view(num_blocks, num_layers, kv, *page)
    return (
        canonicalize({name: per_layer[at] for at, name in enumerate(names)}, config),
        canonicalize(
            {name: per_block[:, at].transpose(0, 1) for at, name in enumerate(names)}, config
        ),
    )


def _config(model: PublishedModel, num_blocks: int) -> KVCacheConfig:
    names = tuple(f"layers.{index}" for index in range(model.num_layers))
    return KVCacheConfig(num_blocks, (KVCacheGroup(model.spec, names),))


def _beside_published(
    case: str, value: float, published: float, *, unit: str, goal: str
) -> BenchRow:
    return _row(f"{case}, {value / published - 1:+.1%}", [value], [published], unit=unit, goal=goal)


_row = partial(compare, of_time=True)
