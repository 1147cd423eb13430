"""Verification of page mappings: runs equal their fragments, and broken mappings are found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.engine_side import EngineLayout
from kvxfer.errors import PageMappingError
from kvxfer.kvcache.portable import (
    CopyRun,
    PageFragments,
    PageMapping,
    WorkerShard,
    verify_mappings,
)
from tests.examples import examples
from tests.kvcache.page_worlds import World
from tests.kvcache.random_worlds import engine_options, generators, page_tokens, worlds
from tests.kvcache.world_engines import EngineOptions, MappedEngine, start_engine
from tests.kvcache.zoo_engines import ZOO

LAYERS, HEADS, TOKENS, DIM = 2, 4, 16, 4
HEAD = TOKENS * DIM * 2  # bytes of one head of a page's keys


def mappings_of(
    name: str, shard: WorkerShard, *, tokens_per_block: int = TOKENS, **options: Any
) -> list[PageMapping]:
    """Make the mappings of all workers of an engine of vLLM."""
    entry: EngineLayout = next(entry for entry in ZOO if entry.name == name)
    world = World(
        np.random.default_rng(0),
        positions=[tuple(range(LAYERS))],
        num_heads=shard.num_kv_heads,
        num_tokens=4 * TOKENS,
        options={"head_dim": DIM, "dtype": torch.float16},
        latents=entry.content == "latents",
    )
    engine = EngineOptions(entry=entry, shard=shard, tokens_per_block=tokens_per_block)
    started = start_engine(np.random.default_rng(0), world, engine)
    return MappedEngine.of(started, **options).of_group(0)


def runs_of(mapping: PageMapping) -> list[tuple[int, CopyRun]]:
    (fragments,) = mapping.pages
    return fragments.runs()


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


@examples(30)
@given(data=st.data())
def test_runs_are_exactly_the_fragments(data: st.DataObject) -> None:
    entry = data.draw(st.sampled_from(ZOO))
    world = data.draw(worlds(entry))
    options = data.draw(engine_options(world, entry))
    tokens_per_page = data.draw(page_tokens(world, options))
    started = start_engine(data.draw(generators()), world, options)
    engine = MappedEngine.of(started, tokens_per_page=tokens_per_page)
    mapping = engine.mappings[-1][-1]
    for fragments in mapping.pages[:2]:
        fields = fragments.blocks, fragments.local_offsets, fragments.page_offsets
        rows = np.stack([*fields, fragments.lengths], axis=1).tolist()
        assert expanded(fragments) == rows


ALONE = WorkerShard(num_kv_heads=HEADS)


PARALLEL = {
    "heads": WorkerShard(num_kv_heads=HEADS, tp_size=4),
    "replicated": WorkerShard(num_kv_heads=2, tp_size=8),
    "tokens": WorkerShard(num_kv_heads=1, tp_size=4, dcp_size=2, pcp_size=2, interleave_tokens=4),
    "latents": WorkerShard(num_kv_heads=1, tp_size=4),
}


def parallel_mappings(kind: str) -> list[PageMapping]:
    name = "MLA" if kind == "latents" else "Blocks first, NHD"
    return mappings_of(name, PARALLEL[kind])


@pytest.mark.parametrize("kind", PARALLEL)
def test_all_workers_together_are_the_page_and_a_missing_or_another_one_is_found(kind: str) -> None:
    mappings = parallel_mappings(kind)
    verify_mappings(mappings)
    for rank in range(len(mappings)):
        with pytest.raises(PageMappingError, match="bytes of all workers") as caught:
            verify_mappings(mappings[:rank] + mappings[rank + 1 :])
        assert caught.value.axis == "head"
        doubled = list(mappings)
        doubled[rank] = mappings[rank - 1]
        for wrong in (doubled, [*mappings, mappings[rank]]):
            with pytest.raises(PageMappingError):
                verify_mappings(wrong)


@pytest.mark.parametrize("kind", ["replicated", "latents"])
def test_writers_that_do_not_take_turns_are_found(kind: str) -> None:
    mappings = parallel_mappings(kind)
    wrong: list[dict[str, Any]] = [{"writer_index": 1}, {"num_writers": 1, "writer_index": 0}]
    for fields in wrong:
        with pytest.raises(PageMappingError):
            verify_mappings([replace(mappings[0], **fields), *mappings[1:]])


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("field", ["page_offsets", "local_offsets", "lengths", "blocks"])
@pytest.mark.parametrize("by", [-1, 1, 8, 10**6])
def test_a_corrupted_fragment_is_found(kind: str, field: str, by: int) -> None:
    mappings = parallel_mappings(kind)
    fragments = mappings[1].pages[0]
    for index in {0, len(fragments.lengths) // 2, len(fragments.lengths) - 1}:
        values = getattr(fragments, field).copy()
        values[index] += by
        broken = replace(fragments, **{field: values})
        wrong = [mappings[0], replace(mappings[1], pages=(broken,)), *mappings[2:]]
        with pytest.raises(PageMappingError):
            verify_mappings(wrong)


def test_workers_with_other_pages_or_blocks_are_found() -> None:
    def workers(tokens_per_block: int, tokens_per_page: int) -> list[PageMapping]:
        tokens = {"tokens_per_block": tokens_per_block, "tokens_per_page": tokens_per_page}
        return mappings_of("Blocks first, HND", replace(ALONE, tp_size=2), **tokens)

    ours, theirs = workers(16, 16), workers(16, 8)
    for wrong in ([ours[0], theirs[1]], [*ours, theirs[1]]):
        with pytest.raises(PageMappingError):
            verify_mappings(wrong)
    with pytest.raises(PageMappingError, match=r"\[1, 2\] pages per block") as caught:
        verify_mappings([theirs[0], workers(8, 8)[1]])
    assert caught.value.axis == "token"
