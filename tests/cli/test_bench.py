"""`kvxfer bench`: its raw media, and that it leaves nothing behind."""

import asyncio
import errno
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvxfer.backends.file.folders import NamespaceFolder
from kvxfer.backends.host import HostBackend
from kvxfer.cli.service import STOP_SIGNALS
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import DONE, MISSING, Outcome
from tests.backends.object_servers import BUCKET, CREDENTIALS, seaweedfs
from tests.cli.conftest import Run
from tests.interpreter import run_python

KEYBOARD: Any = signal.default_int_handler
QUICK = ("--size", "8MiB", "--seconds", "0.01s")
SPEED = r"+[0-9.]+ [KMG]iB/s"
ROW = re.compile(rf"^  (?:store|load ) {SPEED}  ([a-z ]+?) {SPEED}  ratio [0-9.]+$", re.MULTILINE)


def test_each_place_is_compared_with_its_raw_medium(tmp_path: Path, run: Run) -> None:
    urls = "host://?capacity=256MiB", f"file://{tmp_path}/kv?capacity=256MiB&min_free=1MiB"
    status, printed, _ = run("bench", *urls, *QUICK)
    assert status == 0
    assert ROW.findall(printed) == ["copy in memory"] * 2 + ["plain files"] * 2
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("kvxfer-bench-*")]


@pytest.mark.processes
def test_object_storage_is_compared_with_a_plain_client(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with seaweedfs() as server:
        url = f"s3://{BUCKET}/bench?endpoint={server.endpoint}"
        status, printed, _ = run("bench", url, *QUICK)
        assert (status, ROW.findall(printed)) == (0, ["plain client"] * 2)
        assert run("ls", url, "--keys")[:2] == (0, "")
        left, put_of_backend = set[str](), obstore.put_async

        async def put(client: Any, path: str, data: Any, **how: Any) -> None:
            if how:
                await put_of_backend(client, path, data, **how)
            elif path.endswith("/0"):
                raise ValueError("broken")
            else:
                await asyncio.sleep(0.1)
                left.add(path)

        async def delete(_client: object, path: str) -> None:
            left.discard(path)
            await asyncio.sleep(0.3)

        monkeypatch.setattr("obstore.put_async", put)
        monkeypatch.setattr("obstore.delete_async", delete)
        assert run("bench", url, *QUICK)[::2] == (2, "kvxfer bench: plain client: ValueError\n")
        assert not left


def test_tiny_blocks_are_of_a_bounded_number(run: Run) -> None:
    status, printed, _ = run("bench", "host://?capacity=256MiB", "--size", "1B", "--seconds", "0s")
    assert status == 0
    assert printed.startswith("host://?capacity=256MiB: 16384 blocks of 1 B, ")


@pytest.mark.parametrize(
    ("move", "outcome", "words"),
    [
        ("store", MISSING, "a block was not stored"),
        ("store", DONE, "a block that was stored is not found"),
        ("load", MISSING, "a block was not loaded"),
        ("load", DONE, "a block was loaded with bytes that were not stored"),
    ],
)
def test_a_place_that_does_not_keep_blocks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, run: Run, move: str, outcome: Outcome, words: str
) -> None:
    async def nothing(_self: object, keys: list[bytes], _blocks: object) -> list[Outcome]:
        return [outcome] * len(keys)

    monkeypatch.setattr(HostBackend, move, nothing)
    status, _, said = run("bench", "host://?capacity=256MiB", *QUICK)
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"kvxfer bench: {words}")


def test_the_cause_of_a_failure_is_shown_though_nothing_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    async def nothing(_self: object, keys: list[bytes], _blocks: object) -> list[Outcome]:
        return [MISSING] * len(keys)

    async def fail(_self: object, _keys: object) -> list[bool]:
        raise BackendUnavailableError("gone")

    monkeypatch.setattr(HostBackend, "store", nothing)
    monkeypatch.setattr(HostBackend, "delete", fail)
    assert "a block was not stored" in run("bench", "host://?capacity=256MiB", *QUICK)[2]

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = run("bench", f"file://{tmp_path}/kv?capacity=256MiB&min_free=1MiB", *QUICK)[2]
    assert said.endswith(": No space left on device\n")


@pytest.mark.parametrize("removed", ["blocks", "plain files"])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_a_removal_leaves_no_block_and_is_the_status(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, removed: str
) -> None:
    remove: Any = shutil.rmtree if removed == "plain files" else NamespaceFolder.remove
    signals = iter([number])

    def remove_and_signal(*arguments: Any) -> Any:
        for each in signals:
            os.kill(os.getpid(), each)
        return remove(*arguments)

    if removed == "plain files":
        monkeypatch.setattr(shutil, "rmtree", remove_and_signal)
    else:
        monkeypatch.setattr(NamespaceFolder, "remove", remove_and_signal)
    handlers = dict.fromkeys(STOP_SIGNALS, lambda *_: None) | {signal.SIGINT: KEYBOARD}
    inherited = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        url = f"file://{tmp_path}/kv?capacity=256MiB&min_free=1MiB"
        assert run("bench", url, "--size", "2MiB", "--seconds", "0s")[0] == 130
    finally:
        for each, handler in inherited.items():
            signal.signal(each, handler)
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("kvxfer-bench-*")]


INTERRUPT_CONNECT = """
import os, signal, sys
from kvxfer.cli import bench, main

class Interrupting:
    def find_spec(self, name, *_):
        if name == "kvxfer.connect":
            os.kill(os.getpid(), signal.SIGINT)
            print("the import goes on")

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["bench", "host://?capacity=1MiB"]))
"""
"""Runs `kvxfer bench`, and interrupts it during its slow imports."""


@pytest.mark.processes
def test_an_interrupt_does_not_wait_for_the_imports() -> None:
    ended = run_python("-c", INTERRUPT_CONNECT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
