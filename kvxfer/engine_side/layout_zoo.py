"""Layout zoo: the KV-cache layouts of engines, release by release. Data only."""

from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

from kvxfer.engine_side.engine_layout import Content, EngineLayout

# Each entry is `name: releases`; the axes of `shape`, of `memory` (`=` if they are the same) and of
# `allocations` (`-` if there are none), and the content if it is not keys and values; and a note.
_VLLM = """
K and V first, NHD: 0.11 to 0.22
  kv block token head dim | = | layer
    FlashAttention and FlexAttention; ROCm attention until 0.28.
K and V first, HND: 0.11 to 0.22
  kv block token head dim | kv block head token dim | layer
    FlashAttention. The shape is that of NHD; only the strides differ.
K and V first, heads in the shape: 0.11 to 0.22
  kv block head token dim | = | layer
    The CPU backend.
Blocks first, NHD: 0.11 to 0.25
  block kv token head dim | = | layer
    FlashInfer and Triton; FlashAttention from 0.23.
Blocks first, HND: 0.11 to 0.25
  block kv token head dim | block kv head token dim | layer
    FlashInfer and Triton; FlashAttention from 0.23.
Blocks first, then tokens: 0.23 to 0.25
  block kv token head dim | block token kv head dim | layer
    FlexAttention.
Packed K/V, NHD: 0.26 to 0.28
  block head token kv*dim | block token head kv*dim | layer
    FlashAttention, FlashInfer, Triton and FlexAttention.
Packed K/V, HND: 0.26 to 0.28
  block head token kv*dim | = | layer
    FlashAttention, FlashInfer and Triton; the CPU backend from 0.23, which packs keys for its
    instruction set.
Kernel blocks: 0.11 to 0.25
  block*kernel kv token head dim | = | layer
    Any backend whose kernel takes smaller blocks than those of the block table.
Kernel blocks, K and V first: 0.11 to 0.22
  kv block*kernel token head dim | = | layer
MLA: 0.11 to 0.33
  block token dim | = | layer | latents
    Since 0.29 with a dimension of one head after the blocks.
Packed DeepSeek rows: 0.20 to 0.33
  block token dim | block layer token dim | - | latents
    Every layer is a view whose blocks are further apart than its pages; layers of other widths
    lie in the same row.
Mamba states: 0.11 to 0.26
  block | block state | layer | states
    A list of tensors for each layer, side by side in one page. The dimensions of a state follow
    those shown.
Mamba states, as bytes: 0.27 to 0.33
  block state | = | layer | states
    One tensor for each layer, with two dimensions of size 1 between those shown. Register all but
    the padding as a state of bytes.
All layers, K and V first in the shape, NHD: 0.12 to 0.22
  layer kv block token head dim | block layer kv token head dim | -
    FlashAttention, when the connector prefers blocks of all layers.
All layers, K and V first in the shape, HND: 0.12 to 0.22
  layer kv block token head dim | block head layer kv token dim | -
    FlashAttention.
All layers, NHD: 0.12 to 0.25
  layer block kv token head dim | block layer kv token head dim | -
    FlashInfer and Triton; FlashAttention from 0.23.
All layers, HND: 0.12 to 0.25
  layer block kv token head dim | block kv head layer token dim | -
    FlashInfer; Triton until 0.22.
All layers, heads first: 0.23 to 0.25
  layer block kv token head dim | block head layer kv token dim | -
    FlashAttention and Triton with HND.
All layers, tokens first: 0.23 to 0.25
  layer block kv token head dim | block layer token kv head dim | -
    FlexAttention.
All layers, packed K/V, NHD: 0.26 to 0.28
  layer block head token kv*dim | block layer token head kv*dim | -
    FlashAttention, FlashInfer, Triton and FlexAttention.
All layers, packed K/V, HND: 0.26 to 0.28
  layer block head token kv*dim | block head layer token kv*dim | -
    FlashAttention, FlashInfer and Triton.
All layers, MLA: 0.24 to 0.28
  layer block token dim | block layer token dim | - | latents
LBHNC: 0.29 to 0.33
  block head token kv*dim | layer block head token kv*dim | -
    The order of the CPU backend. Formerly called HND.
LBNHC: 0.29 to 0.33
  block head token kv*dim | layer block token head kv*dim | -
    The default. Formerly called NHD.
LHBNC: 0.29 to 0.33
  block head token kv*dim | layer head block token kv*dim | -
    ROCm kernels. A block has one piece for each layer and head.
BLHNC: 0.29 to 0.33
  block head token kv*dim | block layer head token kv*dim | -
BLNHC: 0.29 to 0.33
  block head token kv*dim | block layer token head kv*dim | -
BHLNC: 0.29 to 0.33
  block head token kv*dim | block head layer token kv*dim | -
    A layer's page is not contiguous; the block is, once all layers are registered.
"""

_SGLANG = """
Device pool, MHA token slots, NHD: as of November 2026
  block*token head dim | = | layer kv
    A list of keys and one of values, a tensor for each layer; the first page is padding and
    counts as a block. Register (keys, values) under the name of a layer.
Device pool, MHA pages, HND: as of November 2026
  block head token dim | = | layer kv
Device pool, MLA token slots: as of November 2026
  block*token head dim | = | layer | latents
    One head.
Device pool, Mamba states: as of November 2026
  block | layer block | state | states
    Each convolution state and the temporal one is an allocation of all layers.
Host pool, layer_first: as of November 2026
  kv layer block*token head dim | = | -
Host pool, page_first: as of November 2026
  kv block*token layer head dim | = | -
Host pool, page_first_direct: as of November 2026
  kv block layer token head dim | = | -
Host pool, page_head: as of November 2026
  kv block head token layer dim | = | -
Host pool, page_unified: as proposed in September 2026
  block layer kv token head dim | = | -
    With one group of heads; a page of several groups has one such piece for each.
Host pool, layer_first, MLA: as of November 2026
  layer block*token head dim | = | - | latents
Host pool, page_first, MLA: as of November 2026
  block*token layer head dim | = | - | latents
Host pool, page_first_direct, MLA: as of November 2026
  block layer token head dim | = | - | latents
"""

_TRANSFORMERS = """
DynamicLayer: 5
  head block*token dim | = | layer kv
    One sequence of the batch, keys[i]. Tokens have no pages, so they are cut into blocks; every
    forward pass creates new tensors.
StaticLayer: 5
  head block*token dim | = | layer kv
    One sequence of the batch. The tensors stay where they are.
DynamicSlidingWindowLayer: 5
  head block*token dim | = | layer kv
    One sequence of the batch: the last window - 1 tokens of a longer tensor, so heads are further
    apart than their tokens.
"""

_TENSORRT_LLM = """
Pool: 1
  block layer kv head token dim | = | -
"""


def _read(engine: str, text: str) -> Iterator[EngineLayout]:
    lines = [*text.strip().splitlines(), ""]
    starts = [index for index, line in enumerate(lines) if not line.startswith(" ")]
    for start, stop in pairwise(starts):
        name, _, releases = lines[start].rpartition(": ")
        shape, memory, allocations, *rest = lines[start + 1].strip().split(" | ")
        yield EngineLayout(
            engine=engine,
            releases=releases,
            name=name,
            shape=shape,
            memory=shape if memory == "=" else memory,
            allocations=allocations.strip("-"),
            content=next((each for each in get_args(Content) if each in rest), "keys and values"),
            note=" ".join(line.strip() for line in lines[start + 2 : stop]),
        )


LAYOUT_ZOO = (
    *_read("vLLM", _VLLM),
    *_read("SGLang", _SGLANG),
    *_read("transformers", _TRANSFORMERS),
    *_read("TensorRT-LLM", _TENSORRT_LLM),
)
"""Every engine layout that kvxfer knows.

Source: vLLM's packages 0.20 to 0.32, and its threads 27743 (blocks of all layers), 44455 (packed
K/V) and 42082 (the six names); SGLang's `mem_cache/memory_pool.py` and `mem_cache/pool_host`, and
its pull request 39727; `transformers/cache_utils.py` of 5.16; TensorRT-LLM's KV-cache manager.
"""
