"""Random worlds, and random engines that keep them."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvxfer.engine_side import EngineLayout
from kvxfer.kvcache.portable import WorkerShard
from kvxfer.kvcache.quantization import KVQuantization
from tests.kvcache.page_worlds import World
from tests.kvcache.world_engines import EngineOptions

TP_SIZES = (1, 2, 3, 4, 8)
MAX_WORKERS = 8
MIN_TOKENS, KERNEL_BLOCKS = 8, 2
GROUPS = ([(0, 1)], [(0,)], [(0, 1), (1,)], [(0, 1), (1, 0)])
"""Positions of each group's layers; groups share positions."""
DTYPES = (torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32)


def divisors(number: int, at_least: int = 1) -> list[int]:
    """List the divisors of a number, rising."""
    return [each for each in range(at_least, number + 1) if number % each == 0]


def generators() -> st.SearchStrategy[np.random.Generator]:
    """Draw a generator of contents and block ids."""
    return st.integers(0, 2**16).map(np.random.default_rng)


@st.composite
def worlds(draw: st.DrawFn, entry: EngineLayout) -> World:
    """Draw any model that a layout can keep: groups, K and V of unequal width, scales, dtypes."""
    latents = entry.content == "latents"
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {"head_dim": draw(st.integers(1, 5)), "dtype": dtype}
    if not latents and "kv*dim" in entry.shape.split() and draw(st.booleans()):
        options["head_dim_v"] = options["head_dim"] + 2
    if dtype.itemsize == 1:
        options["quantization"] = draw(st.sampled_from(KVQuantization))
    return World(
        draw(generators()),
        positions=draw(st.sampled_from(GROUPS)),
        num_heads=1 if latents else draw(st.integers(1, 8)),
        num_tokens=draw(st.sampled_from([32, 64, 96])),
        options=options,
        latents=latents,
    )


@st.composite
def shards(draw: st.DrawFn, num_heads: int) -> WorkerShard:
    """Draw any parallelism that a model allows."""
    tp_size = draw(
        st.sampled_from([n for n in TP_SIZES if max(n, num_heads) % min(n, num_heads) == 0])
    )
    copies = max(1, tp_size // num_heads)
    return WorkerShard(
        num_kv_heads=num_heads,
        tp_size=tp_size,
        pcp_size=draw(st.sampled_from([1, 1, 2] if 2 * tp_size <= MAX_WORKERS else [1])),
        dcp_size=draw(st.sampled_from(divisors(copies))),
        interleave_tokens=draw(st.sampled_from([1, 4, 16])),
    )


@st.composite
def engine_options(draw: st.DrawFn, world: World, entry: EngineLayout) -> EngineOptions:
    """Draw an engine of a layout with any parallelism, blocks, padding and kernel blocks."""
    shard = draw(shards(world.num_heads).filter(lambda s: _fitting_blocks(world, entry, s)))
    tokens_per_block = draw(st.sampled_from(_fitting_blocks(world, entry, shard)))
    backend = entry.attention_layout
    may_be_allocated = backend is not None and (backend.memory or "").startswith("block")
    return EngineOptions(
        entry=entry,
        shard=shard,
        tokens_per_block=tokens_per_block,
        kernel_blocks_per_block=draw(_kernel_blocks(entry, shard, tokens_per_block)),
        padding_factor=0 if "kv" in entry.allocations else draw(st.sampled_from([0, 0, 1])),
        prefix=draw(st.sampled_from(["model.layers", "decoder.block", ""])),
        allocate=may_be_allocated and draw(st.booleans()),
    )


def _fitting_blocks(world: World, entry: EngineLayout, shard: WorkerShard) -> list[int]:
    """List the tokens of a block with which the tokens of a world are whole blocks and turns."""
    return [
        tokens
        for tokens in divisors(world.num_tokens, at_least=MIN_TOKENS)
        if world.num_tokens % (tokens * shard.num_token_shares) == 0
        and (shard.num_token_shares == 1 or tokens % shard.interleave_tokens == 0)
        and ("kernel" not in entry.order or _turns_fit(shard, tokens // KERNEL_BLOCKS))
    ]


def _kernel_blocks(
    entry: EngineLayout, shard: WorkerShard, tokens_per_block: int
) -> st.SearchStrategy[int]:
    if "kernel" in entry.order:
        return st.just(KERNEL_BLOCKS)
    gaps = entry.layout != entry.memory and entry.memory.startswith("block head layer")
    if gaps or "block" not in entry.shape.split():
        return st.just(1)
    counts = divisors(tokens_per_block)
    fitting = [n for n in counts if _turns_fit(shard, tokens_per_block // n)]
    return st.just(1) | st.sampled_from(fitting or [1])


def _turns_fit(shard: WorkerShard, kernel_tokens: int) -> bool:
    """Whether the turns of workers are whole kernel blocks, or equal parts of them."""
    turn = shard.interleave_tokens
    whole = kernel_tokens % turn == 0 or turn % kernel_tokens == 0
    return shard.num_token_shares == 1 or whole


def page_tokens(world: World, options: EngineOptions) -> st.SearchStrategy[int]:
    """Draw the tokens of a page that an engine can be mapped to."""
    return st.sampled_from(
        [
            tokens
            for tokens in divisors(world.num_tokens, at_least=MIN_TOKENS)
            if options.can_be_mapped(tokens)
        ]
    )
