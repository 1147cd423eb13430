"""Benchmark of describing blocks, against vLLM's own computation of pointers."""

import numpy as np
import torch

from benchmarks.batches import make_caches
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.kvcache.describer import BlockDescriber

NUM_BLOCKS = 4096
NUM_REFS = 64
PAGE_SIZE_BYTES = 64


def run(*, quick: bool) -> list[BenchRow]:
    """Measure describing 4096 blocks of 64 refs, merging included.

    Baseline: `compute_sub_block_ptrs` of vLLM for the same blocks, once per ref, as its worker
    calls it. Each pair of a block and a ref is one descriptor on both sides.
    """
    from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

    shape, rounds = (NUM_BLOCKS, PAGE_SIZE_BYTES), 20 if quick else 100
    tensors = [torch.zeros(shape, dtype=torch.int8) for _ in range(NUM_REFS)]
    describer = BlockDescriber(make_caches(*tensors))
    pointers = np.empty((NUM_REFS, NUM_BLOCKS), np.int64)
    block_ids = np.random.default_rng(0).permutation(NUM_BLOCKS)

    def vllm() -> None:
        for tensor, computed in zip(tensors, pointers, strict=True):
            compute_sub_block_ptrs(block_ids, 1, computed, tensor)

    times = time_in_turn([lambda: describer.describe(0, block_ids), vllm], rounds=rounds)
    case, per = f"{NUM_BLOCKS} blocks x {NUM_REFS} refs, shuffled", NUM_BLOCKS * NUM_REFS
    return [compare(case, *times, unit="ns/descriptor", goal=">= 1.0", per=per)]
