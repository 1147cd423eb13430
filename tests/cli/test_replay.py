"""`kvxfer replay`: its tables, the same as JSON, and what it refuses."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run

PAGE = (Path(__file__).parents[2] / "docs/fleets.md").read_text()
CHATS = ["--synthetic", "multi-turn,requests=60", "--seed", "7"]
SIZED = [*CHATS, "--bytes-per-token", "4096", "--prefill-tokens-per-s", "1e4"]
HUGE = "9" * 400


@pytest.mark.parametrize(
    "heading",
    [
        pytest.param("Plan the capacity", marks=pytest.mark.slow),
        pytest.param("Lists of tiers", marks=pytest.mark.slow),
        pytest.param("The simulator", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)]),
    ],
)
def test_the_page_shows_what_its_command_prints(heading: str, run: Run) -> None:
    text = PAGE.partition(f"## {heading}\n")[2]
    command, shown = re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[:2]
    status, printed, _ = run(*shlex.split(command)[1:])
    assert status == 0
    assert printed.endswith(f"\n\n{shown}") if heading == "Lists of tiers" else printed == shown


def test_json_has_all_of_the_tables(run: Run) -> None:
    lists = ["--backend", "host://?capacity=64MiB", "file:///kv?capacity=1GiB"]
    arguments = ["--json", *lists, "--budget", "host=64MiB", "--capacities", "16MiB,32MiB"]
    report = json.loads(run("replay", *SIZED, *arguments)[1])
    assert report["trace"]["num_requests"] == 60
    assert report["machine"]["bytes_per_token"] == 4096
    rows = [(row["policy"], row["capacity_bytes"]) for row in report["capacities"]]
    assert rows == [(p, size << 20) for p in ("lru", "arc") for size in (16, 32)]
    (tiers,) = report["lists"]
    assert tiers["backend"] == lists[1:]
    assert [tier["medium"] for tier in tiers["tiers"]] == ["host", "file"]
    assert sum(tier["num_hits"] for tier in tiers["tiers"]) == tiers["num_hits"]
    assert tiers["tiers"][1]["bytes_written_per_day"] > tiers["tiers"][1]["bytes_written"] > 0
    assert report["recommendation"]["row"]["backend"]


def test_capacities_of_equally_many_blocks_have_a_row_each(run: Run) -> None:
    printed = run("replay", *SIZED, "--capacities", "16500KiB,16600KiB")[1]
    assert re.findall(r"^16\.\d MiB", printed, re.MULTILINE) == ["16.1 MiB", "16.2 MiB"]


def test_a_trace_is_read_from_a_file_whatever_its_name(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "chats \udcff.jsonl"  # a name that is not UTF-8
    path.write_text(
        '{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1, 2]}\n'
    )
    read = json.loads(run("replay", path, "--tokens-per-block", "32", "--json")[1])
    assert read["trace"]["tokens_per_block"] == 32
    assert [row["num_slots"] for row in read["capacities"]] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/no/such/trace"], "/no/such/trace: No such file or directory"),
        ([*CHATS, "--synthetic", "multi-turn,docs=3"], "there is no 'docs', only requests"),
        ([*CHATS, "--synthetic", "requests=9"], "expected one of multi-turn, agentic, rag"),
        ([*CHATS, "--seed", "-1"], "seed is -1; expected a whole number, 0 or more"),
        ([*CHATS, "--capacities", "4GiB"], "expected the bytes of a token for sizes"),
        ([*SIZED, "--backend", "file:///kv?capacity=4KiB"], "capacity is 4096; expected"),
        ([*SIZED, "--backend", "nixl://127.0.0.1:1"], "expected a host://, file://, s3://"),
        ([*SIZED, "--budget", "tape=4GiB"], "budget is 'tape=4GiB'; expected host=SIZE"),
        ([*SIZED, "--budget", ""], "budget is ''; expected host=SIZE"),
        ([*SIZED, "--file-bandwidth", ""], "file-bandwidth is ''; expected a positive size"),
        ([*SIZED, "--fleet", "holders=0"], "holders is 0"),
        ([*SIZED, "--fleet", "replicas=9,groups=200"], "replicas is 9"),
        ([*SIZED, "--fleet", "holders=9,holders=3"], "expected each size once"),
        ([*CHATS, "--synthetic", "rag,requests=9,requests=3"], "expected each size once"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_that_names_it(
    arguments: list[str], problem: str, run: Run
) -> None:
    status, printed, said = run("replay", *arguments)
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith("kvxfer replay: ")
    assert problem in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--bytes-per-token", HUGE),
        ("--prefill-tokens-per-s", "1e-320"),
        ("--capacities", "9" * 5000),
        ("--budget", f"file={HUGE}GiB"),
        ("--fleet", "engines=1000000000000"),
        ("--synthetic", "agentic,user_tokens=1000000000000"),
    ],
    ids=lambda text: text[:30],
)
def test_a_number_that_is_none_is_one_line_that_names_it(option: str, value: str, run: Run) -> None:
    status, printed, line = run("replay", *SIZED, f"{option}={value}")
    assert (status, printed, line.count("\n")) == (2, "", 1)
    name, _, number = value.rpartition("=")
    named = name or option.removeprefix("--")
    names = {named, named.replace("-", "_"), "size", "budget", "fleet", "synthetic", "capacity"}
    assert any(f"{each} is " in line for each in names), line
    assert number[:20] in line or f"{float(number):g}"[:20] in line, line
