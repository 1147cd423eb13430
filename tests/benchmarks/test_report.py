"""Benchmark report: its rows, their ratios, and when a ratio meets its goal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import BenchRow, compare, time_in_turn

seconds = st.floats(1e-6, 1e3)


def row(ratio: float, goal: str) -> BenchRow:
    return BenchRow(case="a", value=1.0, unit="s", baseline=1.0, ratio=ratio, spread=0.0, goal=goal)


@pytest.mark.parametrize(
    ("ratio", "goal", "meets"),
    [
        (0.9, ">= 0.9", True),
        (1.5, ">= 0.9", True),
        (0.89, ">= 0.9", False),
        (1.1, "<= 1.1", True),
        (0.2, "<= 1.1", True),
        (1.11, "<= 1.1", False),
        (1.02, "= 1 ± 0.02", True),
        (0.99, "= 1 ± 0.02", True),
        (1.03, "= 1 ± 0.02", False),
        (0.97, "= 1 ± 0.02", False),
        (0.0, "", True),
        (float("nan"), ">= 0.9", False),
        (float("nan"), "<= 1.1", False),
        (float("nan"), "= 1 ± 0.02", False),
    ],
)
def test_a_goal_is_met_on_its_own_side_of_the_limit(
    ratio: float, goal: str, *, meets: bool
) -> None:
    assert row(ratio, goal).meets_goal is meets


@pytest.mark.parametrize(("goal", "ratio"), [(">= 1.0", 2.0), ("", 2.0), ("<= 1.0", 0.5)])
def test_half_the_time_is_twice_the_speed_or_half_the_time(goal: str, ratio: float) -> None:
    assert compare("a", [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], unit="s", goal=goal).ratio == ratio


def test_the_ratio_is_the_median_of_rounds_and_not_a_ratio_of_medians() -> None:
    result = compare("a", [1.0, 2.0, 10.0], [3.0, 2.0, 20.0], unit="s", goal=">= 1.0")
    assert result.ratio == 2.0
    assert (result.value, result.baseline) == (2.0, 3.0)


def test_the_spread_is_half_the_distance_between_the_quartiles_of_the_ratio() -> None:
    ratios = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert compare("a", [1.0] * 7, ratios, unit="s").spread == 2.0
    assert compare("a", [1.0] * 7, [3.0] * 7, unit="s").spread == 0.0


@given(pairs=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=9))
def test_faster_than_the_baseline_in_every_round_meets_both_kinds_of_goal(
    pairs: list[tuple[float, float]],
) -> None:
    ours = [min(pair) for pair in pairs]
    theirs = [max(pair) for pair in pairs]
    assert compare("a", ours, theirs, unit="s", goal=">= 1.0").meets_goal
    assert compare("a", ours, theirs, unit="s", goal="<= 1.0").meets_goal


def test_calls_take_turns_and_one_round_is_not_counted() -> None:
    order: list[str] = []
    times = time_in_turn([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert order == ["a", "b"] * 4
    assert [len(each) for each in times] == [3, 3]
    assert all(second >= 0 for each in times for second in each)
