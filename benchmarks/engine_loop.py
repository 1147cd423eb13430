"""Benchmark of polled transfers in the loop of an engine, against one copy of the same bytes."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.batches import KIB, make_caches, make_keys
from benchmarks.report import BenchRow, beyond, compare, time_in_turn
from kvxfer.connect import connect
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.keys import Namespace
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import JobId

SMALL, LARGE = 128 * KIB, 2048 * KIB
NUM_BLOCKS = (1, 16, 256)
HIT = (28, LARGE)
"""Number and size of the blocks in a hit of 2448 tokens of SmolLM2: 56 MiB."""
LONG_HIT = (128, LARGE)
"""Number and size of the blocks in a hit of 8192 tokens of a model of 1B parameters: 256 MiB."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure polled loads from and stores to host memory, from submission to end.

    The calling thread polls without a pause, as the loop of an engine does. Baseline: one copy of
    the same bytes, in one piece, on the same thread. On a machine with a GPU, the same follows for
    the GPU, with `cudaMemcpyAsync` and a wait as the baseline.

    Args:
        quick: Whether to run fewer rounds, and no batch of 256 blocks.

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
        memory = torch.ones(LONG_HIT, dtype=torch.int8, device=device)
        with open_engine(memory, "&integrity=full") as verifying, open_engine(memory) as trusting:
            loads = [Loop(engine).loading(LONG_HIT[0]) for engine in (verifying, trusting)]
            times = time_in_turn(loads, rounds=5 if quick else 15)
        case = f"{_case('load', *LONG_HIT, device)} verified, against not"
        rows.append(compare(case, *times, unit="ms", of_time=True))
    return rows


def _case(name: str, count: int, block_bytes: int, device: torch.device) -> str:
    on_gpu = f" {device}," if device != HOST else ""
    return f"{name} {count} x {block_bytes // KIB} KiB, polled,{on_gpu}"


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
                case = _case(name, count, block_bytes, device)
                goal = "<= 1.15" if (count, block_bytes) == HIT else ""
                rows.append(compare(f"{case} against one copy", ours, theirs, unit="us", goal=goal))
                case, more = f"{case} beyond one copy, against 60 us", beyond(ours, theirs)
                goal = "<= 1.0" if count == 1 else ""
                rows.append(compare(case, more, 60e-6, unit="us", goal=goal))
    return rows


def open_engine(memory: torch.Tensor, parameters: str = "") -> contextlib.closing[TransferEngine]:
    """Open an engine over blocks `(num_blocks, block_bytes)`, with host memory for two of each."""
    num_blocks, block_bytes = memory.shape
    url = f"host://?capacity={(2 * num_blocks + 1) * (block_bytes + 4 * KIB)}{parameters}"
    namespace = Namespace(model="bench", revision="1")
    return contextlib.closing(connect(url, make_caches(memory), namespace=namespace))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cuda or target.is_cuda:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    else:
        np.copyto(target.numpy(), source.numpy())


class Loop:
    """Loop of an engine that submits a batch and polls for its end."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def loading(self, num_blocks: int) -> Callable[[], None]:
        """Store blocks; return a call that loads them."""
        keys, ids = make_keys(num_blocks), [np.arange(num_blocks)]
        self._finish(self._engine.submit_store(keys, ids))
        return lambda: self._finish(self._engine.submit_load(keys, ids))

    def storing(self, num_blocks: int, num_calls: int) -> Callable[[], None]:
        """Return a call that stores blocks under new keys, to be made at most `num_calls` times."""
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
