"""Benchmark of describing blocks, against vLLM's own computation of pointers."""

from functools import partial

import numpy as np
import torch

from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
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

    tensors = [
        torch.zeros((NUM_BLOCKS, PAGE_SIZE_BYTES), dtype=torch.int8) for _ in range(NUM_REFS)
    ]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, PAGE_SIZE_BYTES) for tensor in tensors],
        group_data_refs=[[CanonicalKVCacheRef(ref, PAGE_SIZE_BYTES) for ref in range(NUM_REFS)]],
    )
    describer = BlockDescriber(caches)
    rounds = 20 if quick else 100
    pointers = np.empty(NUM_REFS * NUM_BLOCKS, np.int64)
    shuffled = np.random.default_rng(0).permutation(NUM_BLOCKS)

    def vllm(block_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        for ref, tensor in enumerate(tensors):
            begin = ref * len(block_ids)
            compute_sub_block_ptrs(block_ids, 1, pointers[begin : begin + len(block_ids)], tensor)

    rows = []
    for case, block_ids in (("shuffled", shuffled), ("in order", np.arange(NUM_BLOCKS))):
        ours, theirs = time_in_turn(
            [partial(describer.describe, 0, block_ids), partial(vllm, block_ids)], rounds=rounds
        )
        per_descriptor = 1e9 / (NUM_BLOCKS * NUM_REFS)
        name = f"{NUM_BLOCKS} blocks x {NUM_REFS} refs, {case}"
        rows.append(
            compare(name, ours, theirs, unit="ns/descriptor", goal=">= 1.0", scale=per_descriptor)
        )
    quarter = shuffled[shuffled < NUM_BLOCKS // 4]
    few, many = time_in_turn(
        [partial(describer.describe, 0, each) for each in (quarter, shuffled)], rounds=rounds
    )
    case = f"growth from {NUM_BLOCKS // 4} to {NUM_BLOCKS} blocks, per block"
    quarters = [seconds / 4 for seconds in many]
    return [*rows, compare(case, quarters, few, unit="us", goal="<= 1.25")]
