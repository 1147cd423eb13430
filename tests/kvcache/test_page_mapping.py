"""Page mappings: what workers of any engine write, and read, are the same portable pages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import PageFragments, WorkerShard, map_caches, verify_mappings
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.examples import examples
from tests.kvcache.random_worlds import (
    divisors,
    engine_options,
    generators,
    page_tokens,
    state_worlds,
    worlds,
)
from tests.kvcache.world_engines import (
    MappedEngine,
    StateWorker,
    Worker,
    WorldEngine,
    part_of_pages,
    start_engine,
)
from tests.kvcache.zoo_engines import ZOO

STATES = [e for e in LAYOUT_ZOO if e.content == "states" and "state" not in e.shape.split()]
"""Where states are tensors, and not bytes."""


@pytest.fixture(scope="module")
def copies() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=1)
    yield engine
    engine.close()


def named(entry: EngineLayout) -> str:
    return f"{entry.engine}, {entry.name}"


def check_pages(
    engine: MappedEngine, expected: Sequence[NDArray[np.uint8]], copies: CPUCopyEngine
) -> None:
    """Check what an engine writes from its caches, and reads into empty ones."""
    workers = engine.engine.workers
    for worker in workers:
        worker.fill()
    for group, pages in enumerate(expected):
        verify_mappings(engine.of_group(group))
        np.testing.assert_array_equal(engine.write(group, len(pages), copies), pages)
    for worker in workers:
        worker.clear()
    for group, pages in enumerate(expected):
        engine.read(group, pages, copies)
    for worker in workers:
        worker.check()


def expanded(fragments: PageFragments) -> list[list[int]]:
    """List the fragments of runs, one by one."""
    return [
        [
            block,
            run.local_offset + index * run.local_stride,
            run.canonical_offset + index * run.canonical_stride,
            run.fragment_size,
        ]
        for block, run in fragments.runs()
        for index in range(run.num_fragments)
    ]


@pytest.mark.parametrize("entry", ZOO, ids=named)
@examples(6)
@given(data=st.data())
def test_the_portable_pages_of_a_model_are_those_of_plain_indexing(
    entry: EngineLayout, data: st.DataObject, copies: CPUCopyEngine
) -> None:
    world = data.draw(worlds(entry))
    options = data.draw(engine_options(world, entry))
    tokens_per_page = data.draw(page_tokens(world, options))
    num_shards = data.draw(st.sampled_from(divisors(world.num_heads)[:3]))
    engine = MappedEngine.of(
        start_engine(data.draw(generators()), world, options),
        tokens_per_page=tokens_per_page,
        num_shards=num_shards,
    )
    groups = range(len(world.positions))
    for group in groups:
        names = list(world.tensors(group))
        for mapping in engine.of_group(group):
            assert [tensor.name for tensor in mapping.page.shards[0]] == names
            for fragments in mapping.pages[:2]:
                fields = fragments.blocks, fragments.local_offsets, fragments.page_offsets
                rows = np.stack([*fields, fragments.lengths], axis=1).tolist()
                assert expanded(fragments) == rows
    expected = [world.pages(group, tokens_per_page, num_shards) for group in groups]
    check_pages(engine, expected, copies)


@pytest.mark.parametrize("entry", STATES, ids=named)
@examples(20)
@given(data=st.data())
def test_the_portable_pages_of_states_are_those_of_plain_indexing(
    entry: EngineLayout, data: st.DataObject, copies: CPUCopyEngine
) -> None:
    world = data.draw(state_worlds())
    block_ids = data.draw(st.permutations(range(1, 6)))[: world.num_blocks]
    shard = WorkerShard(num_kv_heads=4, tp_size=data.draw(st.sampled_from([1, 2, 4])))
    padding_bytes = data.draw(st.sampled_from([0, 16]))
    workers: list[Worker] = [
        StateWorker(
            world,
            entry,
            replace(shard, rank=rank),
            block_ids,
            num_blocks=6,
            padding_bytes=padding_bytes,
        )
        for rank in range(shard.tp_size)
    ]
    state_heads = [f"s{axis}" for axis in world.head_axes]
    engine = MappedEngine.of(WorldEngine([block_ids], workers), state_heads=state_heads)
    check_pages(engine, [world.pages()], copies)


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
