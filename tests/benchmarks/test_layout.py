"""`make bench NAME=layout`: published figures of blocks of all layers follow from the shapes."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from benchmarks.free_blocks import BlockIds, assign_blocks
from benchmarks.layout import io_sizes, run
from benchmarks.models import MODELS, PublishedModel
from benchmarks.report import BenchRow

AGREEING = [model for model in MODELS if not model.remark]
DISAGREEING = [model for model in MODELS if model.remark]


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    return run(quick=True)


@pytest.mark.parametrize("model", AGREEING, ids=lambda model: model.name)
def test_the_published_sizes_follow_from_the_published_shapes(model: PublishedModel) -> None:
    registered, allocated = io_sizes(model)
    published = (model.registered_bytes, model.allocated_bytes)
    assert (registered.value * 1024, allocated.value * 1024) == pytest.approx(published, rel=0.02)
    assert registered.meets_goal
    assert allocated.meets_goal


@pytest.mark.parametrize("model", AGREEING, ids=lambda model: model.name)
def test_sizes_that_are_three_percent_off_are_missed(model: PublishedModel) -> None:
    for factor in (0.97, 1.03):
        wrong = replace(
            model,
            registered_bytes=model.registered_bytes * factor,
            allocated_bytes=model.allocated_bytes * factor,
        )
        assert [row.meets_goal for row in io_sizes(wrong)] == [False, False]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_block_is_a_piece_of_each_tensor_or_one(model: PublishedModel) -> None:
    registered, allocated = io_sizes(model)
    count = model.num_layers * (1 if model.name == "DeepSeek-V2-Lite" else 2)
    assert f": {count} descriptors a block, " in registered.case
    assert ": 1 descriptors a block, " in allocated.case
    assert allocated.value == count * registered.value


def test_the_figures_of_one_model_are_those_of_a_head_less_than_it_has() -> None:
    (model,) = DISAGREEING
    assert model.name == "Qwen3-8B"
    for row in io_sizes(model):
        assert row.goal == ""
        assert row.ratio == pytest.approx(8 / 7, rel=0.01)
        assert f"({model.remark})" in row.case
        assert row.case.endswith(f", {row.ratio - 1:+.1%}")
    with_seven = replace(model, spec=replace(model.spec, num_kv_heads=7), remark="")
    assert all(row.goal and row.meets_goal for row in io_sizes(with_seven))


def test_every_model_is_reported_both_ways_and_no_goal_is_missed(rows: list[BenchRow]) -> None:
    assert [row for row in rows if not row.meets_goal] == []
    sizes = [row.case for row in rows if row.unit == "KiB"]
    assert len(sizes) == 2 * len(MODELS) == 20
    assert all(sum(model.name in case for case in sizes) == 2 for model in MODELS)


def test_what_is_published_of_transfers_is_reproduced(rows: list[BenchRow]) -> None:
    in_reused_cache = fmean(num_runs(block_ids) for block_ids in assign_blocks(39789, 128, 640))
    assert 100 < in_reused_cache < 1000
    both_ways = [row for row in rows if row.unit == "descriptors/transfer"]
    assert [(row.value, row.baseline) for row in both_ways] == [
        (56, 56),
        (1, 1),
        (56 * 64, 3528),
        (1, 1),
        (56 * 640, 34000),
        (in_reused_cache, 422),
        (in_reused_cache, 56 * 640),
        (640, 56 * 640),
    ]
    assert [row.goal for row in both_ways[4:]] == ["", "", "<= 0.0124", "<= 0.0179"]


def test_the_time_to_describe_is_beside_that_of_a_tensor_for_each_layer(
    rows: list[BenchRow],
) -> None:
    (row,) = (row for row in rows if row.unit == "us")
    assert row.value > 0
    assert row.baseline > 0


def num_runs(block_ids: BlockIds) -> int:
    return 1 + int((np.diff(block_ids) != 1).sum())
