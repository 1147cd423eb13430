"""Random worlds, and random engines that can hand them to each other."""

from typing import Any

import numpy as np
import torch

from kvxfer.engine_side import EngineLayout
from kvxfer.kvcache.portable import WorkerShard
from kvxfer.kvcache.quantization import KVQuantization
from tests.kvcache.page_worlds import World
from tests.kvcache.world_engines import EngineOptions
from tests.kvcache.zoo_engines import ZOO

TP_SIZES = (1, 2, 4, 8)
MAX_WORKERS = 8
MIN_TOKENS, KERNEL_BLOCKS = 8, 2
GROUPS = ([(0, 1)], [(0, 1)], [(0, 1)], [(0,)], [(0, 1), (1,)], [(0, 1), (1, 0)])
"""Positions of each group's layers; groups share positions."""
DTYPES = (torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32)


def divisors(number: int, at_least: int = 1) -> list[int]:
    """List the divisors of a number, rising."""
    return [each for each in range(at_least, number + 1) if number % each == 0]


def random_world(rng: np.random.Generator) -> World:
    """Draw any model: one or several groups, latents, K and V of unequal width, scales, dtypes."""
    kind = rng.choice(["kv", "unequal", "latents"], p=[0.6, 0.15, 0.25])
    dtype = DTYPES[rng.integers(len(DTYPES))]
    options: dict[str, Any] = {"head_dim": int(rng.integers(1, 6)), "dtype": dtype}
    if kind == "unequal":
        options["head_dim_v"] = options["head_dim"] + 2
    if dtype.itemsize == 1:
        options["quantization"] = list(KVQuantization)[rng.integers(len(KVQuantization))]
    return World(
        rng,
        positions=GROUPS[rng.integers(len(GROUPS))],
        num_heads=1 if kind == "latents" else int(rng.integers(1, 17)),
        num_tokens=int(rng.choice([32, 64, 96, 128])),
        options=options,
        latents=kind == "latents",
    )


def layouts_of(world: World) -> list[EngineLayout]:
    """List the layouts that can keep a world."""
    content = "latents" if world.latents else "keys and values"
    unequal = len({width for _, width in world.parts}) > 1
    return [
        entry
        for entry in ZOO
        if entry.content == content and (not unequal or "kv*dim" in entry.shape.split())
    ]


def random_shard(rng: np.random.Generator, num_heads: int) -> WorkerShard:
    """Draw any parallelism that a model allows."""
    sizes = [tp for tp in TP_SIZES if max(tp, num_heads) % min(tp, num_heads) == 0]
    tp_size = int(rng.choice(sizes))
    pcp_size = 2 if tp_size < MAX_WORKERS and rng.random() < 0.2 else 1
    dcp_sizes = [dcp for dcp in TP_SIZES if max(1, tp_size // num_heads) % dcp == 0]
    return WorkerShard(
        num_kv_heads=num_heads,
        tp_size=tp_size,
        pcp_size=pcp_size,
        dcp_size=int(rng.choice(dcp_sizes)) if rng.random() < 0.5 else 1,
        interleave_tokens=int(rng.choice([1, 4, 16])),
    )


def random_options(rng: np.random.Generator, world: World, entry: EngineLayout) -> EngineOptions:
    """Draw an engine of a layout with any parallelism, blocks, padding and kernel blocks."""
    fitting: list[int] = []
    while not fitting:
        shard = random_shard(rng, world.num_heads)
        fitting = [
            tokens
            for tokens in divisors(world.num_tokens, at_least=MIN_TOKENS)
            if world.num_tokens % (tokens * shard.num_token_shares) == 0
            and (shard.num_token_shares == 1 or tokens % shard.interleave_tokens == 0)
            and ("kernel" not in entry.order or _turns_fit(shard, tokens // KERNEL_BLOCKS))
        ]
    tokens_per_block = int(rng.choice(fitting))
    backend = entry.attention_layout
    may_be_allocated = backend is not None and (backend.memory or "").startswith("block")
    return EngineOptions(
        entry=entry,
        shard=shard,
        tokens_per_block=tokens_per_block,
        kernel_blocks_per_block=_random_kernel_blocks(rng, entry, shard, tokens_per_block),
        padding_factor=0 if "kv" in entry.allocations else int(rng.choice([0, 0, 1])),
        prefix=str(rng.choice(["model.layers", "decoder.block", ""])),
        allocate=bool(may_be_allocated and rng.random() < 0.3),
    )


def _random_kernel_blocks(
    rng: np.random.Generator, entry: EngineLayout, shard: WorkerShard, tokens_per_block: int
) -> int:
    if "kernel" in entry.order:
        return KERNEL_BLOCKS
    gaps = entry.layout != entry.memory and entry.memory.startswith("block head layer")
    if gaps or "block" not in entry.shape.split() or rng.random() < 0.7:
        return 1
    per_block = int(rng.choice(divisors(tokens_per_block)))
    return per_block if _turns_fit(shard, tokens_per_block // per_block) else 1


def _turns_fit(shard: WorkerShard, kernel_tokens: int) -> bool:
    """Whether the turns of workers are whole kernel blocks, or equal parts of them."""
    turn = shard.interleave_tokens
    whole = kernel_tokens % turn == 0 or turn % kernel_tokens == 0
    return shard.num_token_shares == 1 or whole


def random_page(rng: np.random.Generator, world: World, *engines: EngineOptions) -> int | None:
    """Compute the tokens of a page that all engines can be mapped to; None without such a page."""
    fitting = [
        tokens
        for tokens in divisors(world.num_tokens, at_least=MIN_TOKENS)
        if all(engine.can_be_mapped(tokens) for engine in engines)
    ]
    return int(rng.choice(fitting)) if fitting else None
