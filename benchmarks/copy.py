"""Benchmark of scattered copies on the CPU, against one plain copy of the same bytes."""

from contextlib import closing
from functools import partial

import numpy as np
import torch

from benchmarks import copy_cuda
from benchmarks.batches import KIB, batch_memory, describe
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.copy_engine.cpu import CPUCopyEngine

NUM_THREADS = 2
FRAGMENTS = tuple(size * KIB for size in (4, 8, 16, 32, 64, 128, 256, 2048))
SCATTERED_GOALS = {8: 0.3, 16: 0.3, 32: 0.75, 64: 0.75, 256: 0.9, 2048: 0.9}
"""Goals, by fragment size in KiB."""
GATHER_GOAL = ">= 0.7"
SCATTER_GOAL = ">= 0.6"
SMALLEST_GOAL = 8 * KIB
"""Smallest fragment, in bytes, for which gathering and scattering have a goal."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure the CPU copy engine on host memory, source and destination shuffled.

    Baseline: `torch.Tensor.copy_` of the same bytes in one piece, on as many threads. On a machine
    with a GPU, copies to and from the GPU follow.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    memory, rounds = batch_memory((64 if quick else 256) << 20), 5 if quick else 15
    try:
        with closing(CPUCopyEngine(num_threads=NUM_THREADS)) as engine:
            rows = [row for each in FRAGMENTS for row in _measure(engine, *memory, each, rounds)]
    finally:
        torch.set_num_threads(threads_before)
    return [*rows, *copy_cuda.run(quick=quick)] if torch.cuda.is_available() else rows


def _measure(
    engine: CPUCopyEngine, source: torch.Tensor, target: torch.Tensor, fragment: int, rounds: int
) -> list[BenchRow]:
    count = source.numel() // fragment
    generator = np.random.default_rng(fragment)
    in_order = np.arange(count)
    from_, to = generator.permutation(count), generator.permutation(count)
    scattered = SCATTERED_GOALS.get(fragment // KIB)
    gather, scatter = (GATHER_GOAL, SCATTER_GOAL) if fragment >= SMALLEST_GOAL else ("", "")
    cases = {
        "scattered to scattered": (from_, to, f">= {scattered}" if scattered else ""),
        "gather into one piece": (from_, in_order, gather),
        "scatter from one piece": (in_order, to, scatter),
    }
    rows = []
    num_bytes = count * fragment
    copy = partial(target[:num_bytes].copy_, source[:num_bytes])
    for case, (sources, targets, goal) in cases.items():
        pair = [
            describe(memory.data_ptr(), fragment, order, owner=memory)
            for memory, order in ((source, sources), (target, targets))
        ]
        times = time_in_turn([partial(engine.copy, *pair), copy], rounds=rounds)
        title = f"{case}, {fragment // KIB} KiB"
        rows.append(compare(title, *times, unit="ns/B", goal=goal, per=num_bytes))
    return rows
