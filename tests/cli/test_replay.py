"""`kvxfer replay`: its tables, the same as JSON and as a picture, and what it refuses."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.replay import replay_real
from kvxfer.units import format_size
from tests.replay.traces import FOLDER, needs_mooncake

ROOT = Path(__file__).parents[2]
CHATS = ["replay", "--synthetic", "multi-turn", "--set", "requests=300", "--seed", "7"]
SIZED = [*CHATS, "--bytes-per-token", "4096"]
LISTS = ["--backend", "host://?capacity=64MiB", "file:///kv?capacity=1GiB"]


@pytest.mark.slow
def test_tables_fit_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *("--bytes-per-token", "131072", "--prefill-tokens-per-s", "12345.6"),
        *("--backend", "host://?capacity=2GiB&eviction=arc"),
        *(
            "--backend",
            "host://?capacity=2GiB&eviction=arc",
            "file:///var/cache/kv?capacity=200GiB",
        ),
        *("--budget", "host=4GiB,file=1TiB"),
    ]
    assert main([*CHATS, *arguments]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for part in ("ceiling", "lru hits", "arc saves", "written a day", '"backend": ["host://'):
        assert part in printed


PRICES = ["--prices", "put=0.005,get=0.0004,gib-egress=0.09,gib-month=0.023"]
BUCKET = ["--backend", "host://?capacity=64MiB", "s3://bucket/prefix?endpoint=http://10.0.0.1:1"]


def test_costs_of_object_storage_stand_beside_hits_and_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sized = [*CHATS, "--bytes-per-token", "131072", "--prefill-tokens-per-s", "12345.6"]
    assert main([*sized, *BUCKET, *PRICES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (paid,) = (index for index, line in enumerate(lines) if line.startswith("1,000 prompts cost "))
    assert re.match(r"[\d.]+ % of the blocks are hits, a first token \S+ m?s", lines[paid - 1])
    begins = ("requests ", "bytes    ", "cost     ", "object  none")
    assert all(any(line.startswith(begin) for line in lines) for begin in begins)
    assert any("0.005 for 1,000 PUT or LIST" in line for line in lines)
    assert main([*sized, *BUCKET]) == 0
    assert "cost" not in capsys.readouterr().out


def fleet_on_page() -> tuple[list[str], str]:
    """Read the command of the simulator on its page, and what it prints."""
    page = (ROOT / "docs/fleets.md").read_text().partition("## The simulator")[2]
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    return shlex.split(command)[1:], shown


def names_of_rows(printed: str) -> list[str]:
    """Names in the first column, which two spaces end."""
    return [re.split(r"  +", line)[0] for line in printed.splitlines()]


@pytest.mark.slow
def test_the_page_of_fleets_has_the_rows_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, shown = fleet_on_page()
    few = {"requests=40000": "requests=400", "requests_per_s=2000": "requests_per_s=20"}
    small = "holders=20,engines=50,rack=4,capacity=64MiB,engine_capacity=16MiB"
    assert main([*(few.get(word, word) for word in command[:-1]), small]) == 0
    assert names_of_rows(capsys.readouterr().out) == names_of_rows(shown)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_page_of_fleets_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, shown = fleet_on_page()
    assert main(command) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "heading", ["Policies, capacities and tiers at once", "What object storage costs"]
)
def test_the_page_shows_what_tiers_give_and_cost(
    heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/replay.md").read_text().partition(f"## {heading}\n")[2]
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{shown}")


def test_object_storage_is_not_replayed_for_real(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*SIZED, *BUCKET, "--real", str(tmp_path)]) == 2
    assert "tiers of host memory and files only" in capsys.readouterr().err


def test_json_has_all_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", *LISTS, "--budget", "host=64MiB", "--prefill-tokens-per-s", "1e4"]
    assert main([*SIZED, *arguments, "--capacities", "16MiB,32MiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trace"]["num_requests"] == 300
    assert report["machine"]["bytes_per_token"] == 4096
    rows = [(row["policy"], row["capacity_bytes"]) for row in report["capacities"]]
    assert rows == [(p, size << 20) for p in ("lru", "arc") for size in (16, 32)]
    (tiers,) = report["lists"]
    assert tiers["backend"] == LISTS[1:]
    assert [tier["medium"] for tier in tiers["tiers"]] == ["host", "file"]
    assert sum(tier["num_hits"] for tier in tiers["tiers"]) == tiers["num_hits"]
    assert tiers["tiers"][1]["bytes_written_per_day"] > tiers["tiers"][1]["bytes_written"] > 0
    assert report["recommendation"]["row"]["backend"]
    assert report["real"] == []


BELOW = ["--below", "file:///kv?capacity=1GiB", "--below", "file:///kv?capacity=8MiB", "s3://b/p"]


@pytest.mark.slow
def test_the_grid_has_every_policy_and_capacity_above_every_list_of_lower_tiers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chart = tmp_path / "grid.svg"
    asked = [*SIZED, *BELOW, "--capacities", "16MiB,32MiB", "--prefill-tokens-per-s", "12345.6"]
    assert main([*asked, "--chart", str(chart)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert main([*asked, "--json"]) == 0
    grid = json.loads(capsys.readouterr().out)["grid"]
    lists = [BELOW[1:2], BELOW[3:]]
    assert [(row["below"], row["policy"], row["capacity_bytes"]) for row in grid] == [
        (below, policy, size << 20)
        for below in lists
        for policy in ("lru", "arc")
        for size in (16, 32)
    ]
    for row in grid:
        tiers = row["row"]["tiers"]
        assert [tier["medium"] for tier in tiers][1:] == ["file", "object"][: len(row["below"])]
        assert all(tier["bytes_read"] and tier["bytes_written"] for tier in tiers)
        alone = [*SIZED, "--json", "--policies", "lru", "--blocks", "1"]
        assert main([*alone, "--backend", *row["row"]["backend"]]) == 0
        (same,) = json.loads(capsys.readouterr().out)["lists"]
        assert same["tiers"] == tiers
        for tier in tiers:
            assert f" {100 * tier['hit_rate']:.1f} %  " in printed
            assert format_size(tier["bytes_written"]) in printed
    for label in ("lru over file (1)", "arc over file over object (2)"):
        assert label in chart.read_text()


def test_a_trace_without_a_size_of_tokens_is_counted_in_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CHATS, "--blocks", "10,1000", "--policies", "arc"]) == 0
    table = capsys.readouterr().out.partition("Host memory alone")[2].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["blocks", "10", "1,000"]
    assert "lru" not in table[1]


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        assert main([*SIZED, *LISTS, "--chart", str(path)]) == 0
    assert first.read_text() == second.read_text()
    for text in ("ceiling", "lru", "arc", "host over file", "MiB"):
        assert text in first.read_text()


@pytest.mark.slow
def test_a_fleet_fits_a_terminal_and_is_the_same_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "holders=9,engines=20,rack=2,capacity=4MiB,engine_capacity=2MiB,max_connections=5"
    arguments = [*SIZED, "--fleet", f"{sizes},replicas=2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fleet"]["engines"] == 20
    for share in (report["hits_own"], report["hits_holders"], report["refused"]):
        assert f"{100 * share:.1f} % " in printed
    for row in report["holders"] + report["movement"] + report["outages"]:
        assert row.get("name", row.get("event")) in printed


def test_a_fleet_that_cannot_be_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, named in (
        ([*SIZED, "--fleet", "holders=0"], "holders is 0"),
        ([*CHATS, "--fleet", "holders=2,rack=1"], "bytes_per_token"),
    ):
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert named in printed.err
        assert printed.err.count("\n") == 1
        assert not printed.out


def test_a_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)  # by an earlier test
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*CHATS, "--chart", str(tmp_path / "chart.svg")]) == 2
    printed = capsys.readouterr()
    assert "expected matplotlib to draw it: pip install 'kvxfer[chart]'" in printed.err
    assert not printed.out  # before anything is computed


def test_a_synthetic_trace_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.jsonl"
    assert main([*CHATS, "--save", str(path), "--tokens-per-block", "32", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["replay", str(path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["trace"] | {"name": ""} == made["trace"] | {"name": ""}
    assert read["trace"]["tokens_per_block"] == 32
    assert read["capacities"] == made["capacities"]


@needs_mooncake
def test_published_figures_are_those_of_a_cache_that_evicts_heads_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--order", "head-first", "--policies", "lru", "--blocks", "1000,10000,30000"]
    assert main(["replay", str(FOLDER / "conversation.jsonl"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "36.6 % of the blocks are hits when nothing is evicted" in printed
    assert [line.split()[1] for line in printed.splitlines()[-3:]] == ["4.4", "21.1", "32.6"]


@pytest.mark.timeout(60)
def test_real_backends_are_compared_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--backend", "host://?capacity=64MiB", "--backend", *LISTS[1:]]
    few = [
        "replay",
        "--synthetic",
        "multi-turn",
        "--set",
        "requests=60",
        "--bytes-per-token",
        "4096",
    ]
    assert main([*few, *arguments, "--real", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["host", "host"]
    assert all("0.00 %" in row for row in rows)

    def lose_hits(*arguments: object) -> tuple[int, int, float]:
        num_hits, modelled, seconds = replay_real(*arguments)  # type: ignore[arg-type]
        return int(num_hits * 0.98), modelled, seconds

    monkeypatch.setattr("kvxfer.replay.real.replay_real", lose_hits)
    assert main([*few, "--backend", "host://?capacity=64MiB", "--real", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/no/such/trace"], "/no/such/trace: No such file or directory"),
        ([*CHATS[1:], "--set", "turns=x"], "turns is 'x'; expected a number"),
        ([*CHATS[1:], "--set", "docs=3"], "there is no 'docs', only requests"),
        ([*CHATS[1:], "--seed", "-1"], "seed is -1; expected a whole number, 0 or more"),
        (
            [*CHATS[1:], "--tokens-per-block", "1000000"],
            "no request has a block",
        ),
        ([*CHATS[1:], "--host-bandwidth", "lots"], "size is 'lots'; expected a positive size"),
        ([*CHATS[1:], "--blocks", "10,none"], "blocks is 'none'; expected positive integers"),
        ([*CHATS[1:], "--policies", "lru,fifo"], "policies is 'fifo'; expected some of lru, arc"),
        ([*CHATS[1:], "--capacities", "4GiB"], "expected the bytes of a token for sizes"),
        ([*CHATS[1:], *BELOW], "expected the bytes of a token for sizes"),
        ([*SIZED[1:], "--below", "file:///kv"], "capacity"),
        ([*CHATS[1:], "--budget", "host=4GiB"], "expected the bytes of a token for sizes"),
        ([*SIZED[1:], "--budget", "tape=4GiB"], "budget is 'tape=4GiB'; expected host=SIZE"),
        ([*SIZED[1:], "--budget", "host=1KiB"], "capacity is 1024; expected"),
        ([*SIZED[1:], "--backend", "nixl://127.0.0.1:1"], "expected a host://, file://, s3://"),
        ([*SIZED[1:], "--prefill-tokens-per-s", "-1"], "prefill_tokens_per_s is -1.0; expected"),
        ([*CHATS[1:], "--bytes-per-token", "0"], "bytes_per_token is 0; expected a positive"),
        ([*CHATS[1:], "--tokens-per-block", "0"], "tokens_per_block is 0; expected a positive"),
        ([*CHATS[1:], "--model", "/no/such/model"], "/no/such/model: No such file or directory"),
        ([*SIZED[1:], "--chart", "chart.tea"], "chart is 'chart.tea'; expected"),
        ([*CHATS[1:], "--save", "/no/such/folder/t"], "/no/such/folder/t: No such file"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_that_names_it(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvxfer replay: ")
    assert problem in line


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": ["a"]}\n')
    assert main(["replay", str(path)]) == 2
    expected = f"kvxfer replay: {path}, line 1: hash_ids[0] is 'a'; expected a whole number\n"
    assert capsys.readouterr().err == expected
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"kvxfer replay: {path}, line 1: ")


@pytest.mark.parametrize("arguments", [[], ["trace", "--synthetic", "rag"], ["--synthetic", "x"]])
def test_a_call_without_a_trace_or_with_two_ends_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", *arguments])
    said = capsys.readouterr().err
    assert said.startswith("kvxfer replay: ")
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_page_shows_what_the_command_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/replay.md").read_text()
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown
    drawn, committed = (
        re.findall(r"<text [^>]*>(.*?)</text>", path.read_text())
        for path in (tmp_path / "replay.svg", ROOT / "docs/images/replay.svg")
    )
    assert drawn == committed
    assert "ceiling 72.6 %" in drawn
