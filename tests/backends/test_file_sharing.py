"""Processes that share a folder never harm each other, and keep its bounds together."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvxfer.backends.file.folders import Ledger
from kvxfer.storage.backend import Status
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    open_store,
    temporary_files,
)
from tests.backends.writer_process import shared_memory

BLOCK_BYTES = 16 << 10
NUM_KEYS = 120
NUM_TURNS = 120
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


def hammer(root: Path, capacity: int) -> Iterator[str]:
    """Let two processes use one folder at once; what each has counted."""
    command = [sys.executable, "-m", "tests.backends.writer_process", "hammer", str(root)]
    command += map(str, (capacity, NUM_KEYS, NUM_TURNS))
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(seed)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=REPOSITORY,
                )
            )
            for seed in range(2)
        ]
        for process in started:
            stack.callback(process.kill)
        for process in started:
            out, err = process.communicate()
            assert process.returncode == 0, err
            yield out


async def test_two_processes_in_one_small_folder_never_err_and_keep_its_capacity(
    tmp_path: Path,
) -> None:
    capacity = NUM_KEYS // 3 * BLOCK_BYTES
    root = tmp_path / "store"
    for out in await asyncio.to_thread(list, hammer(root, capacity)):
        counts = json.loads(out)
        # Stored by the other one, who was waited for, and evicted before it could be seen.
        assert counts["failed"] <= counts["stored"] // 100, counts
        assert min(counts["stored"], counts["loaded"], counts["missed"]) > 10, counts
    memory = shared_memory()
    async with open_store(root, memory.namespace(), capacity=capacity) as backend:
        await backend.wait_indexed()
        assert capacity - 8 * BLOCK_BYTES < bytes_on_disk(root) <= capacity
        assert counted_bytes(root) == bytes_on_disk(root)
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
