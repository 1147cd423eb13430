"""Page mappings: pages written by one engine's workers are read by another's."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import WorkerShard, map_caches, verify_mappings
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.kvcache.page_worlds import StateWorld, World
from tests.kvcache.random_worlds import (
    divisors,
    layouts_of,
    random_options,
    random_page,
    random_world,
)
from tests.kvcache.world_engines import (
    EngineOptions,
    MappedEngine,
    StateWorker,
    Worker,
    WorldEngine,
    part_of_pages,
    start_engine,
)
from tests.kvcache.zoo_engines import ZOO

HAND_OVERS, NUM_RELAYS, MANY_RELAYS = 5, 80, 4000
RELAYS_AT_ONCE = 40


@pytest.fixture(scope="module")
def copies() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=1)
    yield engine
    engine.close()


def relay(seed: int, copies: CPUCopyEngine) -> None:
    """Hand the tokens of a world from engine to engine, as portable pages."""
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    layouts = layouts_of(world)
    turn = seed * HAND_OVERS
    options = random_options(rng, world, layouts[turn % len(layouts)])
    engine, done = start_engine(rng, world, options), 0
    for worker in engine.workers:
        worker.fill()
    while done < HAND_OVERS:
        turn += 1
        next_options = random_options(rng, world, layouts[turn % len(layouts)])
        tokens_per_page = random_page(rng, world, options, next_options)
        if tokens_per_page is None:
            continue
        next_engine = start_engine(rng, world, next_options)
        num_shards = int(rng.choice(divisors(world.num_heads)[:3]))
        chosen = {"tokens_per_page": tokens_per_page, "num_shards": num_shards}
        writer, reader = MappedEngine.of(engine, **chosen), MappedEngine.of(next_engine, **chosen)
        hand_over(world, writer, reader, tokens_per_page, num_shards, copies)
        engine, options, done = next_engine, next_options, done + 1


def hand_over(
    world: World,
    writer: MappedEngine,
    reader: MappedEngine,
    tokens_per_page: int,
    num_shards: int,
    copies: CPUCopyEngine,
) -> None:
    for group in range(len(world.positions)):
        verify_mappings(writer.of_group(group))
        verify_mappings(reader.of_group(group))
        expected = world.pages(group, tokens_per_page, num_shards)
        pages = writer.write(group, len(expected), copies)
        np.testing.assert_array_equal(pages, expected)
        reader.read(group, pages, copies)
    for worker in reader.engine.workers:
        worker.check()


@pytest.mark.parametrize("seed", range(NUM_RELAYS))
def test_what_one_engine_writes_another_reads(seed: int, copies: CPUCopyEngine) -> None:
    relay(seed, copies)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(NUM_RELAYS, MANY_RELAYS, RELAYS_AT_ONCE))
def test_what_many_engines_write_others_read(first: int, copies: CPUCopyEngine) -> None:
    for seed in range(first, first + RELAYS_AT_ONCE):
        relay(seed, copies)


PLAIN = EngineOptions(
    entry=next(entry for entry in ZOO if entry.name == "Blocks first, NHD"),
    shard=WorkerShard(num_kv_heads=4),
    tokens_per_block=32,
)
PLAIN_LATENTS = replace(
    PLAIN,
    entry=next(entry for entry in ZOO if entry.name == "MLA"),
    shard=WorkerShard(num_kv_heads=1),
)


STATES = [e for e in LAYOUT_ZOO if e.content == "states" and "state" not in e.shape.split()]
"""Where states are tensors, and not bytes."""


def named(entry: EngineLayout) -> str:
    return f"{entry.engine}, {entry.name}"


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_every_layout_of_the_zoo_can_be_mapped(entry: EngineLayout, copies: CPUCopyEngine) -> None:
    rng = np.random.default_rng(1)
    latents = entry.content == "latents"
    world = World(
        rng,
        positions=[(0, 1)],
        num_heads=1 if latents else 4,
        num_tokens=64,
        options={"head_dim": 3, "dtype": torch.float16},
        latents=latents,
    )
    plain = PLAIN_LATENTS if latents else PLAIN
    parallel = replace(plain.shard, tp_size=2)
    kernel_blocks = 2 if "kernel" in entry.order else 1
    options = EngineOptions(
        entry=entry, shard=parallel, tokens_per_block=8, kernel_blocks_per_block=kernel_blocks
    )
    engines = [start_engine(rng, world, each) for each in (plain, options, plain)]
    for worker in engines[0].workers:
        worker.fill()
    for writer, reader in pairwise(engines):
        chosen = {"tokens_per_page": 16, "num_shards": 1 if latents else 2}
        pair = MappedEngine.of(writer, **chosen), MappedEngine.of(reader, **chosen)
        hand_over(world, *pair, 16, chosen["num_shards"], copies)


@pytest.mark.parametrize("tp_sizes", list(product([1, 2, 4], [1, 2, 4])))
@pytest.mark.parametrize("head_axes", [(0, 0), (1, 0), (1, 2)])
@pytest.mark.parametrize("entry", STATES, ids=named)
def test_states_of_one_engine_are_those_of_another(
    entry: EngineLayout,
    tp_sizes: tuple[int, int],
    head_axes: tuple[int, int],
    copies: CPUCopyEngine,
) -> None:
    rng = np.random.default_rng(2)
    world = StateWorld(
        rng,
        shapes=[(4, 8), (8, 2, 4)],
        dtypes=[torch.float16, torch.float32],
        head_axes=head_axes,
        num_layers=2,
        num_blocks=3,
    )
    engines = []
    for tp_size, padding_bytes in zip(tp_sizes, (0, 16), strict=True):
        num_blocks = 5 + padding_bytes // 16
        block_ids = (1 + rng.permutation(num_blocks - 1))[:3].tolist()
        workers: list[Worker] = [
            StateWorker(
                world,
                entry,
                WorkerShard(num_kv_heads=4, tp_size=tp_size, rank=rank),
                block_ids,
                num_blocks=num_blocks,
                padding_bytes=padding_bytes,
            )
            for rank in range(tp_size)
        ]
        engine = WorldEngine([block_ids], workers)
        engines.append(MappedEngine.of(engine, state_heads=[f"s{axis}" for axis in head_axes]))
    writer, reader = engines
    for worker in writer.engine.workers:
        worker.fill()
    verify_mappings(writer.of_group(0))
    verify_mappings(reader.of_group(0))
    pages = writer.write(0, 3, copies)
    np.testing.assert_array_equal(pages, world.pages())
    reader.read(0, pages, copies)
    for worker in reader.engine.workers:
        worker.check()


def test_values_may_be_wider_than_keys_in_tensors_of_their_own(copies: CPUCopyEngine) -> None:
    spec = FullAttentionSpec(
        tokens_per_block=4, num_kv_heads=2, head_dim=3, head_dim_v=5, dtype=torch.int16
    )
    config = KVCacheConfig(3, (KVCacheGroup(spec, ("layers.0",)),))
    numbers = torch.arange(3 * 4 * 2 * 8, dtype=torch.int16)
    keys, values = (
        numbers[: 3 * 4 * 2 * 3].view(3, 4, 2, 3),
        numbers[3 * 4 * 2 * 3 :].view(3, 4, 2, 5),
    )
    caches = canonicalize({"layers.0": (keys, values)}, config)
    (mapping,) = map_caches(caches, WorkerShard(num_kv_heads=2))
    pages = np.zeros((1, mapping.page.num_bytes), np.uint8)
    blocks = BlockDescriber(caches, mappings=[mapping]).describe(0, [1])
    copies.copy(blocks, part_of_pages(mapping, pages))
    expected = [part[1].permute(1, 0, 2).contiguous().numpy().tobytes() for part in (keys, values)]
    assert pages.tobytes() == b"".join(expected)
