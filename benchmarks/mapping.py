"""Benchmark of transfers through portable pages, against those of the same blocks unmapped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Case: two engines that exchange portable pages, and goals of their ratios."""

    name: str
    writer: EngineShape
    reader: EngineShape
    write_goal: str = ""
    read_goal: str = ""


CASES = (
    Case(
        name="HND, TP 2 -> 4",
        writer=EngineShape(order=HND, tp_size=2),
        reader=EngineShape(order=HND, tp_size=4),
        read_goal=">= 0.8",
    ),
    Case(
        name="NHD -> HND",
        writer=EngineShape(),
        reader=EngineShape(order=HND),
        write_goal=">= 0.5",
    ),
    Case(
        name="NHD, TP 2 -> 4",
        writer=EngineShape(tp_size=2),
        reader=EngineShape(tp_size=4),
        write_goal=">= 0.7",
        read_goal=">= 0.7",
    ),
    Case(
        name="NHD, 16 -> 64 tokens a block",
        writer=EngineShape(),
        reader=EngineShape(tokens_per_block=64),
        write_goal=">= 0.7",
        read_goal=">= 0.7",
    ),
)


class Worker:
    """Worker of an engine: its blocks, scattered in its cache, and its part of the pages.

    The memory of all portable pages is `(num_pages, page_size_bytes)`, int8.
    """

    def __init__(
        self, shape: EngineShape, rank: int, pages: torch.Tensor, tokens_per_page: int
    ) -> None:
        num_blocks = len(pages) * tokens_per_page // shape.tokens_per_block
        num_bytes = 3 * num_blocks // 2 * shape.block_bytes  # among which the blocks are scattered
        memory = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
        worker = WorkerCaches(shape, rank, memory.numpy().view(np.uint8))
        mappings = map_caches(worker.caches, worker.shard, tokens_per_page=tokens_per_page)
        self._block_ids = np.random.default_rng(rank).permutation(worker.num_blocks)[:num_blocks]
        self._mapped = BlockDescriber(worker.caches, mappings=mappings)
        self._plain = BlockDescriber(worker.caches)
        self._parts = _describe_parts(pages, mappings[0])
        places = np.arange(num_blocks) + rank * num_blocks
        self._slots = describe(pages.data_ptr(), shape.block_bytes, places, owner=pages)

    def describe(self, *, mapped: bool) -> tuple[Descriptors, Descriptors]:
        """Describe the worker's blocks, and its part of the pages or plain slots for blocks."""
        if mapped:
            return self._mapped.describe(0, self._block_ids), self._parts
        return self._plain.describe(0, self._block_ids), self._slots


def run(*, quick: bool) -> list[BenchRow]:
    """Measure describing blocks and copying them to and from portable pages in host memory.

    The workers of an engine move their parts of all pages one after the other. Baseline: they
    move the same blocks unmapped, to and from consecutive slots in the same memory.
    """
    engine = CPUCopyEngine(num_threads=NUM_THREADS)
    num_layers, rounds = (8, 7) if quick else (16, 31)
    try:
        return [row for case in CASES for row in _measure(engine, case, num_layers, rounds)]
    finally:
        engine.close()


def _measure(engine: CopyEngine, case: Case, num_layers: int, rounds: int) -> list[BenchRow]:
    shapes = [replace(each, num_layers=num_layers) for each in (case.writer, case.reader)]
    tokens_per_page = max(shape.tokens_per_block for shape in shapes)
    page_bytes = tokens_per_page * shapes[0].bytes_per_token
    pages = torch.ones((NUM_TOKENS // tokens_per_page, page_bytes), dtype=torch.int8)
    writers, readers = (
        [Worker(shape, rank, pages, tokens_per_page) for rank in range(shape.tp_size)]
        for shape in shapes
    )
    steps: list[tuple[str, list[Worker], list[Worker], str]] = [
        ("written", writers, [], case.write_goal),
        ("read", [], readers, case.read_goal),
        ("written and read", writers, readers, ""),
    ]
    rows = []
    for step, from_, to, goal in steps:
        ours, plain = time_in_turn(
            [partial(_transfer, engine, from_, to, mapped=mapped) for mapped in (True, False)],
            rounds=rounds,
        )
        num_bytes = pages.numel() * (bool(from_) + bool(to))
        name = f"{case.name}, {step}"
        rows.append(compare(name, ours, plain, unit="ns/B", goal=goal, scale=1e9 / num_bytes))
    return rows


def _transfer(
    engine: CopyEngine, writers: Sequence[Worker], readers: Sequence[Worker], *, mapped: bool
) -> None:
    """Copy blocks of the writers to the pages, or slots, and from there to the readers' blocks."""
    for worker in writers:
        blocks, host = worker.describe(mapped=mapped)
        engine.copy(blocks, host)
    for worker in readers:
        blocks, host = worker.describe(mapped=mapped)
        engine.copy(host, blocks)


def _describe_parts(pages: torch.Tensor, mapping: PageMapping) -> Descriptors:
    """Describe a worker's part of every page, in its pieces."""
    offsets, lengths, counts = [], [], []
    for index in range(len(pages)):
        fragments = mapping.pages[index % mapping.pages_per_block]
        places, sizes = fragments.page_offsets, fragments.lengths
        places, sizes = join(touch(places, sizes), places, sizes)
        offsets.append(places + index * pages.shape[1])
        lengths.append(sizes)
        counts.append(len(sizes))
    return Descriptors(
        addresses=np.uint64(pages.data_ptr()) + np.concatenate(offsets).astype(np.uint64),
        lengths=np.concatenate(lengths).astype(np.uint64),
        block_offsets=np.concatenate(([0], np.cumsum(counts))),
        payload_starts=np.zeros(len(counts), np.int64),
        device=pages.device,
        owners=(pages,),
    )
