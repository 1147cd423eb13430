"""Page mappings: what workers of any engine write, and read, are the same portable pages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.engine_side import EngineLayout
from kvxfer.kvcache.portable import PageFragments, WorkerShard, verify_mappings
from tests.examples import examples
from tests.kvcache.random_worlds import (
    divisors,
    engine_options,
    generators,
    page_tokens,
    worlds,
)
from tests.kvcache.world_engines import (
    MappedEngine,
    StateWorker,
    Worker,
    WorldEngine,
    start_engine,
)
from tests.kvcache.zoo_engines import ZOO


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


@pytest.mark.parametrize("is_joined", [False, True], ids=["pages", "tensors of all layers"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("head_axes", list(product((0, 1), (0, 2))))
def test_the_portable_pages_of_states_are_those_of_plain_indexing(
    head_axes: tuple[int, int], tp_size: int, copies: CPUCopyEngine, *, is_joined: bool
) -> None:
    rng, block_ids = np.random.default_rng(0), [5, 1, 4]
    whole = [
        rng.integers(-100, 100, (2, len(block_ids), *shape)).astype(kind)
        for shape, kind in (((4, 8), np.int16), ((8, 2, 4), np.int32))
    ]
    shard = WorkerShard(num_kv_heads=4, tp_size=tp_size)
    workers: list[Worker] = [
        StateWorker(whole, head_axes, replace(shard, rank=rank), block_ids, is_joined=is_joined)
        for rank in range(tp_size)
    ]
    state_heads = [f"s{axis}" for axis in head_axes]
    engine = MappedEngine.of(WorldEngine([block_ids], workers), state_heads=state_heads)
    pages = [
        b"".join(
            np.moveaxis(state[layer, block], head, 0).tobytes()
            for layer in range(2)
            for state, head in zip(whole, head_axes, strict=True)
        )
        for block in range(len(block_ids))
    ]
    expected = np.frombuffer(b"".join(pages), np.uint8).reshape(len(block_ids), -1)
    check_pages(engine, [expected], copies)
