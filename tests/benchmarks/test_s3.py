"""`make bench NAME=s3`: its rows, with small batches on its own server."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from benchmarks import s3
from benchmarks.command import PROGRAM, main
from benchmarks.report import time_in_turn
from benchmarks.s3 import BLOCK_BYTES
from kvxfer.backends.object import S3Backend
from kvxfer.cli.command_line import INTERRUPTED, run_command
from kvxfer.storage.backend import DONE, PAUSED, Outcome
from kvxfer.storage.keys import BlockKey
from tests.backends.object_servers import ObjectServer, seaweedfs

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with seaweedfs() as started:
        yield started


@pytest.fixture(autouse=True)
def _one_server(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "seaweedfs", lambda **_: nullcontext(server))


def test_rows_are_stores_and_loads_against_the_plain_client_and_larger_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "time_in_turn", lambda calls, *, rounds: time_in_turn(calls, rounds=1))
    before = os.environ.copy()
    rows = s3.run(quick=True, num_bytes=BLOCK_BYTES)
    assert os.environ.copy() == before
    assert [row.case for row in rows if row.goal] == [
        "store 1 x 2048 KiB, against the plain client",
        "load 1 x 2048 KiB, against the plain client",
    ]
    assert {row.goal for row in rows} == {">= 0.9", ""}
    assert len(rows) == 3 + 2 * 4 + 1 + 2 * 2
    assert sum("sealed against fast" in row.case for row in rows) == 4
    assert all(row.value > 0 < row.baseline for row in rows)


def test_blocks_that_are_there_already_are_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "_places", itertools.repeat("one for all"))
    with pytest.raises(RuntimeError, match="were there already"):
        s3.run(quick=True, num_bytes=16 * BLOCK_BYTES)


def commands_naming(text: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return [each for each in found if text.encode() in each]


def test_a_benchmark_that_is_terminated_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "s3"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}) as bench:
        try:
            while not commands_naming(f"{tmp_path}/kvxfer-weed"):
                assert bench.poll() is None
                time.sleep(0.05)
        finally:
            bench.terminate()
        assert bench.wait(timeout=15) == INTERRUPTED
    assert not commands_naming(f"{tmp_path}/kvxfer-weed")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("move", "outcome", "words"),
    [("store", PAUSED, "a block was not done"), ("load", DONE, "not those that were stored")],
)
def test_a_backend_that_moves_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, move: str, outcome: Outcome, words: str
) -> None:
    async def nothing(_self: object, keys: list[BlockKey], _blocks: object) -> list[Outcome]:
        return [outcome] * len(keys)

    monkeypatch.setattr(S3Backend, move, nothing)
    with pytest.raises(RuntimeError, match=words):
        s3.run(quick=True, num_bytes=BLOCK_BYTES)


def test_without_its_packages_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.s3")
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert run_command(PROGRAM, lambda: main(["s3"])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("benchmarks s3 needs the package obstore: pip install 'kvxfer[bench]'")
