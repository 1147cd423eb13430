"""`kvxfer replay`: its tables, the same as JSON, and what it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvxfer.cli import main

ROOT = Path(__file__).parents[2]
CHATS = ["replay", "--synthetic", "multi-turn", "--set", "requests=60", "--seed", "7"]
SIZED = [*CHATS, "--bytes-per-token", "4096"]
LISTS = ["--backend", "host://?capacity=64MiB", "file:///kv?capacity=1GiB"]


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
    small = "holders=20,engines=50,capacity=64MiB,engine_capacity=16MiB"
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
def test_the_page_shows_what_tiers_give(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/fleets.md").read_text().partition("## Lists of tiers\n")[2]
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{shown}")


def test_json_has_all_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", *LISTS, "--budget", "host=64MiB", "--prefill-tokens-per-s", "1e4"]
    assert main([*SIZED, *arguments, "--capacities", "16MiB,32MiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trace"]["num_requests"] == 60
    assert report["machine"]["bytes_per_token"] == 4096
    rows = [(row["policy"], row["capacity_bytes"]) for row in report["capacities"]]
    assert rows == [(p, size << 20) for p in ("lru", "arc") for size in (16, 32)]
    (tiers,) = report["lists"]
    assert tiers["backend"] == LISTS[1:]
    assert [tier["medium"] for tier in tiers["tiers"]] == ["host", "file"]
    assert sum(tier["num_hits"] for tier in tiers["tiers"]) == tiers["num_hits"]
    assert tiers["tiers"][1]["bytes_written_per_day"] > tiers["tiers"][1]["bytes_written"] > 0
    assert report["recommendation"]["row"]["backend"]


def test_a_fleet_that_cannot_be_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, named in (
        ([*SIZED, "--fleet", "holders=0"], "holders is 0"),
        ([*CHATS, "--fleet", "holders=2"], "bytes_per_token"),
    ):
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert named in printed.err
        assert printed.err.count("\n") == 1
        assert not printed.out


def test_a_synthetic_trace_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.jsonl"
    assert main([*CHATS, "--save", str(path), "--tokens-per-block", "32", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["replay", str(path), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["trace"] | {"name": ""} == made["trace"] | {"name": ""}
    assert read["trace"]["tokens_per_block"] == 32
    assert read["capacities"] == made["capacities"]


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
        ([*CHATS[1:], *LISTS], "expected the bytes of a token for sizes"),
        ([*SIZED[1:], "--backend", "file:///kv"], "capacity"),
        ([*CHATS[1:], "--budget", "host=4GiB"], "expected the bytes of a token for sizes"),
        ([*SIZED[1:], "--budget", "tape=4GiB"], "budget is 'tape=4GiB'; expected host=SIZE"),
        ([*SIZED[1:], "--budget", "host=1KiB"], "capacity is 1024; expected"),
        ([*SIZED[1:], "--backend", "nixl://127.0.0.1:1"], "expected a host://, file://, s3://"),
        ([*SIZED[1:], "--prefill-tokens-per-s", "-1"], "prefill_tokens_per_s is -1.0; expected"),
        ([*CHATS[1:], "--bytes-per-token", "0"], "bytes_per_token is 0; expected a positive"),
        ([*CHATS[1:], "--tokens-per-block", "0"], "tokens_per_block is 0; expected a positive"),
        ([*CHATS[1:], "--model", "/no/such/model"], "/no/such/model: No such file or directory"),
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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/fleets.md").read_text().partition("## Plan the capacity\n")[2]
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown
