"""Benchmark of polled transfers in the loop of an engine, against one copy of the same bytes."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.batches import make_keys
from benchmarks.report import BenchRow, beyond, compare, time_in_turn
from kvxfer.connect import connect
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.keys import Namespace
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import JobId

KIB = 1 << 10
SMALL, LARGE = 128 * KIB, 2048 * KIB
NUM_BLOCKS = (1, 16, 256)
HIT = (28, LARGE)
"""Blocks of a hit of 2448 tokens of SmolLM2, 56 MB, and their bytes."""
LONG_HIT = (128, LARGE)
"""Blocks of a hit of 8192 tokens of a model of 1 billion parameters, 256 MiB, and their bytes."""

HIT_GOAL = "<= 1.15"
FIXED_COST_S = 60e-6


def run(*, quick: bool) -> list[BenchRow]:
    """Measure polled loads from and stores to host memory, from submission to end.

    The calling thread polls without a pause, as the loop of an engine does. Baseline: one copy of
    the same bytes, in one piece, on the same thread; to and from a GPU, where there is one, by
    `cudaMemcpyAsync` and a wait for it.

    Args:
        quick: Fewer rounds, and no batch of 256 blocks.

    Raises:
        RuntimeError: A block was not moved.
    """
    counts = NUM_BLOCKS[:2] if quick else NUM_BLOCKS
    rounds = 10 if quick else 40
    gpus = [torch.device("cuda", 0)] if torch.cuda.is_available() else []
    rows = []
    for device in [HOST, *gpus]:
        rows += _measure(SMALL, counts, rounds, device)
        rows += _measure(LARGE, sorted({*counts, HIT[0]}), rounds, device)
        rows.append(_measure_verifying(5 if quick else 15, device))
    return rows


def _measure(
    block_bytes: int, counts: Sequence[int], rounds: int, device: torch.device
) -> list[BenchRow]:
    on_gpu = device != HOST
    shape = counts[-1], block_bytes
    memory, target = (torch.ones(shape, dtype=torch.int8, device=device) for _ in range(2))
    source = torch.ones(shape, dtype=torch.int8, pin_memory=on_gpu)
    rows = []
    with open_engine(memory) as engine:
        loop = Loop(engine)
        for count in counts:
            sides = source[:count], target[:count]
            moves = (
                ("load", loop.loading(count), partial(_copy, *sides)),
                ("store", loop.storing(count, rounds + 1), partial(_copy, *reversed(sides))),
            )
            for name, move, copy in moves:
                ours, theirs = time_in_turn([move, copy], rounds=rounds)
                case = f"{name} {count} x {block_bytes // KIB} KiB, polled,"
                case += f" {device}," if on_gpu else ""
                rows += _rows(case, ours, theirs, is_hit=(count, block_bytes) == HIT)
    return rows


def _measure_verifying(rounds: int, device: torch.device) -> BenchRow:
    """Measure what it costs to hash the blocks of a hit before they are copied."""
    memory = torch.ones(LONG_HIT, dtype=torch.int8, device=device)
    count, block_bytes = LONG_HIT
    size = f"{count} x {block_bytes // KIB} KiB," + (f" {device}," if device != HOST else "")
    with open_engine(memory, "&integrity=full") as verifying, open_engine(memory) as trusting:
        loads = [Loop(engine).loading(count) for engine in (verifying, trusting)]
        verified, trusted = time_in_turn(loads, rounds=rounds)
    case = f"load {size} polled, verified, against not"
    return compare(case, verified, trusted, unit="ms", of_time=True)


def open_engine(memory: torch.Tensor, parameters: str = "") -> contextlib.closing[TransferEngine]:
    """Open an engine over blocks `(num_blocks, block_bytes)`, and host memory for two of each."""
    num_blocks, block_bytes = memory.shape
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(memory, block_bytes)],
        group_data_refs=[[CanonicalKVCacheRef(0, block_bytes)]],
    )
    url = f"host://?capacity={(2 * num_blocks + 1) * (block_bytes + 4 * KIB)}{parameters}"
    namespace = Namespace(model="bench", revision="1")
    return contextlib.closing(connect(url, caches, namespace=namespace))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cuda or target.is_cuda:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    else:
        np.copyto(target.numpy(), source.numpy())


def _rows(
    case: str, ours: Sequence[float], copy: Sequence[float], *, is_hit: bool
) -> list[BenchRow]:
    goal, limit = HIT_GOAL if is_hit else "", "<= 1.0" if " 1 x " in case else ""
    more, against = beyond(ours, copy), f"{case} beyond one copy, against 60 us"
    return [
        compare(f"{case} against one copy", ours, copy, unit="us", goal=goal),
        compare(against, more, FIXED_COST_S, unit="us", goal=limit),
    ]


class Loop:
    """Loop of an engine that submits a batch and polls for its end."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def loading(self, num_blocks: int) -> Callable[[], None]:
        """Make a call that loads blocks, which are stored now."""
        keys, ids = make_keys(num_blocks), [np.arange(num_blocks)]
        self._finish(self._engine.submit_store(keys, ids))
        return lambda: self._finish(self._engine.submit_load(keys, ids))

    def storing(self, num_blocks: int, num_calls: int) -> Callable[[], None]:
        """Make a call that stores blocks under new keys, for so many calls."""
        batches = iter([make_keys(num_blocks) for _ in range(num_calls)])
        ids = [np.arange(num_blocks)]
        return lambda: self._finish(self._engine.submit_store(next(batches), ids))

    def _finish(self, job_id: JobId) -> None:
        while True:
            for job in self._engine.get_finished():
                if job.job_id == job_id:
                    if not job.done:
                        raise RuntimeError(f"a block was not moved: {job.outcomes}")
                    return
