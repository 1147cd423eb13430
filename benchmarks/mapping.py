"""Benchmark of transfers through portable pages, against those of the same blocks unmapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.fragments import join, touch
from kvxfer.kvcache.portable import PageMapping, WorkerShard, map_caches
from kvxfer.kvcache.spec import FullAttentionSpec

NUM_THREADS = 2
NUM_KV_HEADS, HEAD_DIM = 8, 128
"""KV heads and their width in Llama-3.1-8B."""
NUM_TOKENS = 1024
SPARE = 3
"""Size of a cache in halves of the moved blocks, which are scattered in it."""

NHD = "kv block token head dim"
HND = "kv block head token dim"
PACKED = "block head token kv*dim"


@dataclass(frozen=True, slots=True)
class MappedEngine:
    """Engine: the layout of its caches, its number of workers, and the size of its blocks."""

    layout: str
    tp_size: int = 1
    tokens_per_block: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Case: two engines that exchange portable pages, and goals of their ratios."""

    name: str
    writer: MappedEngine
    reader: MappedEngine
    write_goal: str = ""
    read_goal: str = ""


CASES = (
    Case(name="HND -> HND", writer=MappedEngine(HND), reader=MappedEngine(HND)),
    Case(
        name="HND, TP 2 -> 4",
        writer=MappedEngine(HND, tp_size=2),
        reader=MappedEngine(HND, tp_size=4),
        read_goal=">= 0.8",
    ),
    Case(
        name="NHD -> HND", writer=MappedEngine(NHD), reader=MappedEngine(HND), write_goal=">= 0.5"
    ),
    Case(
        name="NHD, TP 2 -> 4",
        writer=MappedEngine(NHD, tp_size=2),
        reader=MappedEngine(NHD, tp_size=4),
    ),
    Case(name="split -> packed K/V", writer=MappedEngine(HND), reader=MappedEngine(PACKED)),
    Case(
        name="NHD, 16 -> 64 tokens a block",
        writer=MappedEngine(NHD),
        reader=MappedEngine(NHD, tokens_per_block=64),
    ),
)


class Worker:
    """Worker of an engine: its blocks, scattered in its cache, and its part of the pages.

    Args:
        engine: Layout, workers and blocks of the engine.
        rank: Rank of this worker.
        pages: Memory for all portable pages, `(num_pages, page_size_bytes)`, int8.
        num_layers: Layers of the model.
        tokens_per_page: Tokens of a portable page.
    """

    def __init__(
        self,
        engine: MappedEngine,
        rank: int,
        pages: torch.Tensor,
        *,
        num_layers: int,
        tokens_per_page: int,
    ) -> None:
        num_pages = len(pages)
        num_blocks = num_pages * tokens_per_page // engine.tokens_per_block
        spec = FullAttentionSpec(
            tokens_per_block=engine.tokens_per_block,
            num_kv_heads=NUM_KV_HEADS // engine.tp_size,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
        )
        sizes = {"kv": 2, "block": num_blocks * SPARE // 2, "token": engine.tokens_per_block}
        sizes |= {"head": spec.num_kv_heads, "dim": HEAD_DIM, "kv*dim": 2 * HEAD_DIM}
        shape = [sizes[axis] for axis in engine.layout.split()]
        self.tensors = {
            f"layers.{index}": torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)
            for index in range(num_layers)
        }
        config = KVCacheConfig(
            num_blocks=sizes["block"],
            groups=(KVCacheGroup(layer_names=tuple(self.tensors), spec=spec),),
        )
        caches = canonicalize(
            {name: tensor.view(torch.bfloat16) for name, tensor in self.tensors.items()},
            config,
            layouts=dict.fromkeys(self.tensors, engine.layout),
        )
        shard = WorkerShard(num_kv_heads=NUM_KV_HEADS, rank=rank, tp_size=engine.tp_size)
        mappings = map_caches(caches, shard, tokens_per_page=tokens_per_page)
        self.block_ids = np.random.default_rng(rank).permutation(sizes["block"])[:num_blocks]
        self._mapped = BlockDescriber(caches, mappings=mappings)
        self._plain = BlockDescriber(caches)
        self._parts = _describe_parts(pages, mappings[0])
        slot = self._plain.block_size_bytes(0)
        place = np.arange(num_blocks) + rank * num_blocks
        self._slots = _describe_host(
            pages, place * slot, np.full(num_blocks, slot), [1] * num_blocks
        )

    def describe(self, *, mapped: bool) -> tuple[Descriptors, Descriptors]:
        """Describe the worker's blocks, and its part of the pages or plain slots for blocks."""
        if mapped:
            return self._mapped.describe(0, self.block_ids), self._parts
        return self._plain.describe(0, self.block_ids), self._slots


def make_workers(case: Case, num_layers: int) -> tuple[torch.Tensor, list[Worker], list[Worker]]:
    """Make memory for the portable pages of a case, and the workers that write and read them."""
    engines = case.writer, case.reader
    tokens_per_page = max(engine.tokens_per_block for engine in engines)
    token_bytes = 2 * num_layers * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize
    shape = (NUM_TOKENS // tokens_per_page, tokens_per_page * token_bytes)
    pages = torch.ones(shape, dtype=torch.int8)
    writers, readers = (
        [
            Worker(engine, rank, pages, num_layers=num_layers, tokens_per_page=tokens_per_page)
            for rank in range(engine.tp_size)
        ]
        for engine in engines
    )
    return pages, writers, readers


def transfer(
    engine: CopyEngine, writers: Sequence[Worker], readers: Sequence[Worker], *, mapped: bool
) -> None:
    """Copy blocks of the writers to the pages, or slots, and from there to the readers' blocks."""
    for worker in writers:
        blocks, host = worker.describe(mapped=mapped)
        engine.copy(blocks, host)
    for worker in readers:
        blocks, host = worker.describe(mapped=mapped)
        engine.copy(host, blocks)


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
    pages, writers, readers = make_workers(case, num_layers)
    steps: list[tuple[str, list[Worker], list[Worker], str]] = [
        ("written", writers, [], case.write_goal),
        ("read", [], readers, case.read_goal),
        ("written and read", writers, readers, ""),
    ]
    rows = []
    for step, from_, to, goal in steps:
        ours, plain = time_in_turn(
            [partial(transfer, engine, from_, to, mapped=mapped) for mapped in (True, False)],
            rounds=rounds,
        )
        num_bytes = pages.numel() * (bool(from_) + bool(to))
        name = f"{case.name}, {step}"
        rows.append(compare(name, ours, plain, unit="ns/B", goal=goal, scale=1e9 / num_bytes))
    return rows


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
    return _describe_host(pages, np.concatenate(offsets), np.concatenate(lengths), counts)


def _describe_host(
    pages: torch.Tensor,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    counts: Sequence[int],
) -> Descriptors:
    return Descriptors(
        addresses=np.uint64(pages.data_ptr()) + offsets.astype(np.uint64),
        lengths=lengths.astype(np.uint64),
        block_offsets=np.concatenate(([0], np.cumsum(counts))),
        payload_starts=np.zeros(len(counts), np.int64),
        device=pages.device,
        owners=(pages,),
    )
