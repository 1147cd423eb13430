"""Processes that share a folder never harm each other, and keep its bounds together."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvxfer.backends.file.folders import Ledger
from kvxfer.storage.backend import Status
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    on_disk,
    open_store,
    temporary_files,
)
from tests.backends.writer_process import shared_memory

BLOCK_BYTES = 16 << 10
NUM_KEYS = 120
REPOSITORY = Path(__file__).parents[2]
LONG = [pytest.mark.exhaustive, pytest.mark.timeout(180)]


pytestmark = pytest.mark.processes


@contextmanager
def processes(
    name: str, root: Path, *arguments: object, num: int = 2
) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "tests.backends.writer_process", name, str(root)]
    started = [
        subprocess.Popen(
            [*command, *map(str, arguments), *([str(seed)] if name == "hammer" else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for seed in range(num)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def until_ready(started: list["subprocess.Popen[str]"]) -> None:
    for process in started:
        assert process.stdout
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"


def bytes_at_one_moment(root: Path) -> int:
    """Add up the files under the ledger's lock; those with two names count once."""
    with (root / "usage.ledger").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(root):
            for name in names:
                if ".safetensors" in name:
                    try:
                        found = (Path(folder) / name).stat()
                    except FileNotFoundError:  # it has another name now
                        continue
                    sizes[found.st_ino] = on_disk(found.st_size)
        return sum(sizes.values())


def watch_capacity(root: Path, capacity: int, duration_s: float) -> int:
    """Watch a folder all the time; return how often it was full."""
    num_full, pause = 0, threading.Event()
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        if (root / "usage.ledger").exists():
            total = bytes_at_one_moment(root)
            assert total <= capacity, f"{total} bytes, capacity {capacity}"
            num_full += total > capacity - 8 * BLOCK_BYTES
            pause.wait(0.005)  # those who are watched need the lock, too
    return num_full


@pytest.mark.parametrize("duration_s", [5, pytest.param(60, marks=LONG)])
async def test_two_processes_in_one_small_folder_never_err_and_keep_its_capacity(
    tmp_path: Path, duration_s: int
) -> None:
    capacity = NUM_KEYS // 3 * BLOCK_BYTES
    root = tmp_path / "store"
    with processes("hammer", root, capacity, NUM_KEYS) as started:
        await until_ready(started)
        num_full = await asyncio.to_thread(watch_capacity, root, capacity, duration_s)
        ends = [await asyncio.to_thread(process.communicate) for process in started]
        assert [process.returncode for process in started] == [0, 0], ends
    for out, err in ends:
        counts = json.loads(out)
        # Stored by the other one, who was waited for, and evicted before it could be seen.
        assert counts["failed"] == err.count("another process is storing this block\n"), err
        assert counts["failed"] <= counts["stored"] // 100, counts
        assert min(counts["stored"], counts["loaded"], counts["missed"]) > 10, counts
    assert num_full > 3, "the folder was never full"
    memory = shared_memory()
    async with open_store(root, memory.namespace(), capacity=capacity) as backend:
        await backend.wait_indexed()
        assert counted_bytes(root) == bytes_on_disk(root) <= capacity
        assert temporary_files(root) == []
        keys = hashed_keys(NUM_KEYS)
        found = [k for k, there in zip(keys, await backend.lookup(keys), strict=True) if there]
        assert len(found) > 20
        for key in found:
            assert await load_verified(backend, [key], memory.describe(0, [0])) == [Status.DONE]


FORKED = """
import os, signal, sys
from pathlib import Path
from kvxfer.backends.file.folders import Ledger

ledger = Ledger(Path(sys.argv[1]))
with ledger.claimed([b"file"]), ledger.locked():
    if not (child := os.fork()):
        os.close(1)
        signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_keeps_no_lock_of_an_engine_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    child = int(done.stdout)
    try:
        os.kill(child, 0)  # it lives
        with closing(Ledger(tmp_path)) as ledger, ledger.claimed([b"file"]) as taken:
            assert taken == set()
    finally:
        os.kill(child, signal.SIGKILL)
