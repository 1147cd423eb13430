"""`python -m benchmarks`: its output and exit status, and which ratios of rows meet their goals."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from benchmarks.command import BENCHES, PROGRAM, main
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.cli.command_line import run_command

ROOT = Path(__file__).parents[2]
KEYS = ["case", "value", "unit", "baseline", "ratio", "spread", "goal"]
GOOD = BenchRow(
    case="good", value=1.5, unit="s", baseline=3.0, ratio=2.0, spread=0.125, goal=">= 0.9"
)
BAD = BenchRow(case="bad", value=4.0, unit="s", baseline=2.0, ratio=0.5, spread=0.0, goal=">= 0.9")
FREE = BenchRow(case="free", value=1234567.0, unit="us", baseline=1.0, ratio=0.01, spread=0.0)


@pytest.fixture
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a benchmark by given results, and restore the environment afterwards."""
    module = ModuleType("benchmarks.copy")
    monkeypatch.setattr(module, "run", lambda *, quick: [GOOD, BAD, FREE], raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks.copy", module)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")


@pytest.mark.usefixtures("_bench")
def test_json_is_a_list_of_objects_with_exactly_the_agreed_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["copy", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [list(each) for each in rows] == [KEYS] * 3
    assert list(rows[0].values()) == ["good", 1.5, "s", 3.0, 2.0, 0.125, ">= 0.9"]
    assert rows[2]["goal"] == ""


@pytest.mark.usefixtures("_bench")
def test_a_table_has_a_line_per_row_and_a_cell_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["copy"])
    assert capsys.readouterr().out.splitlines() == [
        "| case | value | unit | baseline | ratio | spread | goal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| good | 1.5 | s | 3 | 2 | 0.125 | >= 0.9 |",
        "| bad | 4 | s | 2 | 0.5 | 0 | >= 0.9 |",
        "| free | 1.235e+06 | us | 1 | 0.01 | 0 |  |",
    ]


@pytest.mark.usefixtures("_bench")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_missed_goal_fails_only_a_check_and_is_named_on_stderr(
    capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    for arguments, status in ((["copy"], 0), (["copy", "--check"], 1)):
        assert main([*arguments, *form]) == status
        printed = capsys.readouterr()
        assert printed.err == "missed: bad: ratio 0.500, goal >= 0.9\n"
        assert "missed" not in printed.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ""), (["engine_loop"], "choice: 'engine_loop' (choose from "), (["copy", "--slow"], "")],
)
def test_what_is_not_a_benchmark_is_named_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(PROGRAM, lambda: main(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m benchmarks: ")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.processes
def test_the_command_imports_no_torch_and_every_benchmark_is_a_module_without_engine() -> None:
    code = (
        "import importlib, sys\n"
        "import benchmarks.command\n"
        "assert 'torch' not in sys.modules  # its threads would know their wait policy\n"
        f"for name in {[name.replace('-', '_') for name in BENCHES]!r}:\n"
        "    assert callable(importlib.import_module(f'benchmarks.{name}').run)\n"
        "assert 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Rows of a report


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
    assert msgspec.structs.replace(GOOD, ratio=ratio, goal=goal).meets_goal is meets


@pytest.mark.parametrize(("goal", "ratio"), [(">= 1.0", 2.0), ("", 2.0), ("<= 1.0", 0.5)])
def test_half_the_time_is_twice_the_speed_or_half_the_time_in_the_median_of_rounds(
    goal: str, ratio: float
) -> None:
    """The ratio is the median of ratios, not the ratio of medians."""
    result = compare("a", [1.0, 2.0, 10.0], [3.0, 2.0, 20.0], unit="s", goal=goal)
    assert (result.value, result.baseline, result.ratio) == (2.0, 3.0, ratio)


def test_the_spread_is_half_the_distance_between_the_quartiles_of_the_ratio() -> None:
    ratios = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert compare("a", [1.0] * 7, ratios, unit="s").spread == 2.0
    assert compare("a", [1.0] * 7, [3.0] * 7, unit="s").spread == 0.0


def test_calls_take_turns_and_one_round_is_not_counted() -> None:
    order: list[str] = []
    times = time_in_turn([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert order == ["a", "b"] * 4
    assert [len(each) for each in times] == [3, 3]
    assert all(second >= 0 for each in times for second in each)
