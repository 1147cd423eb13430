"""`python -m benchmarks`: its output and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.command import BENCHES, main
from benchmarks.report import BenchRow

ROOT = Path(__file__).parents[2]
KEYS = ["case", "value", "unit", "baseline", "ratio", "spread", "goal"]
GOOD = BenchRow(
    case="good", value=1.5, unit="s", baseline=3.0, ratio=2.0, spread=0.125, goal=">= 0.9"
)
BAD = BenchRow(case="bad", value=4.0, unit="s", baseline=2.0, ratio=0.5, spread=0.0, goal=">= 0.9")
FREE = BenchRow(case="free", value=1234567.0, unit="us", baseline=1.0, ratio=0.01, spread=0.0)


class PretendedBench(ModuleType):
    """Benchmark with given results."""

    def __init__(self, rows: list[BenchRow]) -> None:
        super().__init__("benchmarks.copy")
        self.rows = rows
        self.was_quick: list[bool] = []
        self.wait_policies: list[str | None] = []

    def run(self, *, quick: bool) -> list[BenchRow]:
        self.was_quick.append(quick)
        self.wait_policies.append(os.environ.get("OMP_WAIT_POLICY"))
        return self.rows


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> PretendedBench:
    module = PretendedBench([GOOD, BAD, FREE])
    for name in ("copy", "vllm"):
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    return module


def test_json_is_a_list_of_objects_with_exactly_the_agreed_keys(
    bench: PretendedBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["copy", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [list(each) for each in rows] == [KEYS] * 3
    assert list(rows[0].values()) == ["good", 1.5, "s", 3.0, 2.0, 0.125, ">= 0.9"]
    assert rows[2]["goal"] == ""


def test_a_table_has_a_line_per_row_and_a_cell_per_key(
    bench: PretendedBench, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["copy"])
    assert capsys.readouterr().out.splitlines() == [
        "| case | value | unit | baseline | ratio | spread | goal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| good | 1.5 | s | 3 | 2 | 0.125 | >= 0.9 |",
        "| bad | 4 | s | 2 | 0.5 | 0 | >= 0.9 |",
        "| free | 1.235e+06 | us | 1 | 0.01 | 0 |  |",
    ]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_missed_goal_fails_only_a_check_and_is_named_on_stderr(
    bench: PretendedBench, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    for arguments, status in ((["copy"], 0), (["copy", "--check"], 1)):
        assert main([*arguments, *form]) == status
        printed = capsys.readouterr()
        assert printed.err == "missed: bad: ratio 0.500, goal >= 0.9\n"
        assert "missed" not in printed.out


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["copy", "--slow"]])
def test_what_is_not_a_benchmark_is_named_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith("python -m benchmarks: ")
    assert said.count("\n") == 1


def test_a_name_that_is_nearly_right_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["engine_loop"])
    assert " (did you mean 'engine-loop'?); see python -m" in capsys.readouterr().err


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
