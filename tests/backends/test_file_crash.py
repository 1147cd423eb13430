"""Crashes: a writer killed at any moment leaves whole blocks, or files that are collected."""

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    open_store,
    sealed,
    temporary_files,
)
from tests.backends.writer_process import crash_memory

KEYS_PER_KILL = 200
SLOW = [pytest.mark.slow, pytest.mark.timeout(120)]
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.processes

# Starts writers by forking, so that a kill costs no start of an interpreter: see `writers`.
ZYGOTE = """
import os, sys, asyncio
from pathlib import Path
from tests.backends.writer_process import write_on
for line in sys.stdin:
    root, first, *secrets = line.split()
    child = os.fork()
    if child == 0:
        asyncio.run(write_on(Path(root), int(first), *secrets))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


class Writers:
    """Processes that store blocks, started and killed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    def kill_one(
        self, root: Path, first: int, moment: int, rng: random.Random, *secrets: str
    ) -> None:
        """Start a writer and kill it once `moment` block files, and some bytes, are there."""
        self._stdin.write(" ".join([str(root), str(first), *secrets]) + "\n")
        self._stdin.flush()
        child = int(self._stdout.readline())
        before = len(list(root.rglob("*.safetensors")))
        unfinished = rng.random() < 0.7
        while True:
            found = list(root.rglob("*.safetensors*"))
            temporary = [path for path in found if path.suffix == ".tmp"]
            if len(found) - before >= moment and (temporary or not unfinished):
                break
        os.kill(child, signal.SIGKILL)
        assert self._stdout.readline() == "dead\n"
        for path in temporary_files(root):
            # The kernel closes what io_uring had in hand a moment after the process is gone.
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def writers() -> Iterator[Writers]:
    process = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        yield Writers(process)
    finally:
        process.kill()
        process.communicate()


async def check(backend: FileBackend, keys: list[BlockKey]) -> int:
    """Check that all found blocks are whole; return their number."""
    found = [k for k, there in zip(keys, await backend.lookup(keys), strict=True) if there]
    memory = crash_memory()
    for start in range(0, len(found), 16):
        batch = found[start : start + 16]
        statuses = await load_verified(backend, batch, memory.describe(0, range(len(batch))))
        assert set(statuses) == {Status.DONE}
    return len(found)


@pytest.mark.parametrize(
    ("num_kills", "secrets"), [(8, []), (4, ["secret"]), pytest.param(50, [], marks=SLOW)]
)
async def test_a_writer_killed_at_any_moment_leaves_whole_blocks_only(
    tmp_path: Path, num_kills: int, secrets: list[str]
) -> None:
    rng = random.Random(num_kills)
    num_unfinished = num_whole = 0
    with writers() as started:
        for kill in range(num_kills):
            root = tmp_path / f"store-{kill % 4}"  # those killed last have left something there
            keys = hashed_keys(KEYS_PER_KILL, first=KEYS_PER_KILL * kill)
            first = KEYS_PER_KILL * kill
            moment = rng.randrange(12)
            await asyncio.to_thread(started.kill_one, root, first, moment, rng, *secrets)
            num_unfinished += len(temporary_files(root))
            fields = sealed(root, *secrets) if secrets else {}
            async with open_store(root, crash_memory().namespace(), **fields) as backend:
                num_whole += await check(backend, keys)
                await backend.wait_indexed()
                assert temporary_files(root) == []
                assert counted_bytes(root) == bytes_on_disk(root)
                assert len(list(root.glob("*.claim"))) == 1, "only our own is left"
    assert num_unfinished > num_kills // 10, "too few were killed while they wrote"
    assert num_whole > num_kills
