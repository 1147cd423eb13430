"""Benchmark of transfers through portable pages, against those of the same blocks unmapped."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.batches import describe
from benchmarks.report import BenchRow, compare, time_in_turn
from benchmarks.shapes import HND, EngineShape, WorkerCaches
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import join, touch
from kvxfer.kvcache.portable import PageMapping, map_caches

NUM_THREADS = 2
NUM_TOKENS = 1024

_nhd, _hnd = EngineShape, partial(EngineShape, order=HND)
CASES: tuple[tuple[str, EngineShape, EngineShape, str, str], ...] = (
    ("HND, TP 2 -> 4", _hnd(tp_size=2), _hnd(tp_size=4), "", ">= 0.8"),
    ("NHD -> HND", _nhd(), _hnd(), ">= 0.5", ""),
    ("NHD, TP 2 -> 4", _nhd(tp_size=2), _nhd(tp_size=4), ">= 0.7", ">= 0.7"),
    ("NHD, 16 -> 64 tokens a block", _nhd(), _nhd(tokens_per_block=64), ">= 0.7", ">= 0.7"),
)
"""Name, engine that writes portable pages, engine that reads them, goals of writing and reading."""


class Worker:
    """Worker of an engine: its blocks, scattered in its cache, and its part of the pages.

    The memory of all portable pages is `(num_pages, page_size_bytes)`, int8.
    """

    def __init__(
        self, shape: EngineShape, rank: int, pages: torch.Tensor, tokens_per_page: int
    ) -> None:
        num_blocks = len(pages) * tokens_per_page // shape.tokens_per_block
        num_bytes = 3 * num_blocks // 2 * shape.block_bytes  # room to scatter the blocks
        memory = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
        worker = WorkerCaches(shape, rank, memory.numpy().view(np.uint8))
        mappings = map_caches(worker.caches, worker.shard, tokens_per_page=tokens_per_page)
        self._block_ids = np.random.default_rng(rank).permutation(worker.num_blocks)[:num_blocks]
        places = np.arange(num_blocks) + rank * num_blocks
        slots = describe(pages.data_ptr(), shape.block_bytes, places, owner=pages)
        self._mapped = (
            BlockDescriber(worker.caches, mappings=mappings),
            _describe_parts(pages, mappings[0]),
        )
        self._plain = BlockDescriber(worker.caches), slots

    def describe(self, *, mapped: bool) -> tuple[Descriptors, Descriptors]:
        """Describe the worker's blocks, and its part of the pages or plain slots for blocks."""
        describer, host = self._mapped if mapped else self._plain
        return describer.describe(0, self._block_ids), host


def run(*, quick: bool) -> list[BenchRow]:
    """Measure describing blocks and copying them to and from portable pages in host memory.

    The workers of an engine move their parts of all pages one after the other. Baseline: they
    move the same blocks unmapped, to and from consecutive slots in the same memory.
    """
    num_layers, rounds = (8, 7) if quick else (16, 31)
    rows = []
    with closing(CPUCopyEngine(num_threads=NUM_THREADS)) as engine:
        for name, *both, write_goal, read_goal in CASES:
            shapes = [replace(each, num_layers=num_layers) for each in both]
            tokens = max(shape.tokens_per_block for shape in shapes)
            size = NUM_TOKENS // tokens, tokens * shapes[0].bytes_per_token
            pages = torch.ones(size, dtype=torch.int8)
            for shape, step, goal in zip(
                shapes, ("written", "read"), (write_goal, read_goal), strict=True
            ):
                workers = [Worker(shape, rank, pages, tokens) for rank in range(shape.tp_size)]
                transfer = partial(_transfer, engine, workers, writes=step == "written")
                calls = [partial(transfer, mapped=mapped) for mapped in (True, False)]
                times, per = time_in_turn(calls, rounds=rounds), pages.numel()
                rows.append(compare(f"{name}, {step}", *times, unit="ns/B", goal=goal, per=per))
    return rows


def _transfer(engine: CopyEngine, workers: Sequence[Worker], *, writes: bool, mapped: bool) -> None:
    """Copy blocks of workers to the pages, or slots, or back."""
    for worker in workers:
        blocks, host = worker.describe(mapped=mapped)
        engine.copy(*((blocks, host) if writes else (host, blocks)))


def _describe_parts(pages: torch.Tensor, mapping: PageMapping) -> Descriptors:
    """Describe a worker's part of every page, piece by piece."""
    parts = []
    for index in range(len(pages)):
        fragments = mapping.pages[index % mapping.pages_per_block]
        places, sizes = fragments.page_offsets, fragments.lengths
        places, sizes = join(touch(places, sizes), places, sizes)
        parts.append((places + index * pages.shape[1], sizes))
    offsets, lengths = (np.concatenate(each).astype(np.uint64) for each in zip(*parts, strict=True))
    return Descriptors(
        addresses=np.uint64(pages.data_ptr()) + offsets,
        lengths=lengths,
        block_offsets=np.cumsum([0, *(len(sizes) for _, sizes in parts)]),
        payload_starts=np.zeros(len(pages), np.int64),
        device=pages.device,
        owners=(pages,),
    )
