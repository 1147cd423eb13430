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
from kvxfer.backends.file.file_index import file_ids
from kvxfer.backends.file.folders.names import temporary_name
from kvxfer.backends.file.io.file_io import CREATE_FLAGS
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from tests.backends.file_store import (
    GIB,
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    open_store,
    store,
    temporary_files,
    until_scanned,
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
    root, first = line.split()
    child = os.fork()
    if child == 0:
        asyncio.run(write_on(Path(root), int(first)))
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

    def kill_one(self, root: Path, first: int, moment: int, rng: random.Random) -> None:
        """Start a writer and kill it once `moment` block files, and some bytes, are there."""
        self._stdin.write(f"{root} {first}\n")
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


@pytest.mark.parametrize("num_kills", [8, pytest.param(50, marks=SLOW)])
async def test_a_writer_killed_at_any_moment_leaves_whole_blocks_only(
    tmp_path: Path, num_kills: int
) -> None:
    rng = random.Random(num_kills)
    num_unfinished = num_whole = 0
    with writers() as started:
        for kill in range(num_kills):
            root = tmp_path / f"store-{kill % 4}"  # those killed last have left something there
            keys = hashed_keys(KEYS_PER_KILL, first=KEYS_PER_KILL * kill)
            first = KEYS_PER_KILL * kill
            await asyncio.to_thread(started.kill_one, root, first, rng.randrange(12), rng)
            num_unfinished += len(temporary_files(root))
            async with open_store(root, crash_memory().namespace()) as backend:
                num_whole += await check(backend, keys)
                await until_scanned(backend)
                assert temporary_files(root) == []
                assert counted_bytes(backend) == bytes_on_disk(root)
                assert len(list(root.glob("*.claim"))) == 1, "only our own is left"
    assert num_unfinished > num_kills // 10, "too few were killed while they wrote"
    assert num_whole > num_kills


async def test_what_a_living_writer_has_not_finished_is_left_alone(tmp_path: Path) -> None:
    memory, keys = crash_memory(), hashed_keys(2)
    fingerprint = memory.namespace().fingerprint
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys[:1], memory.describe(0, [0]))
        ledger = backend._ledger
        file = backend._folder.locate_new(keys[1], temporary_name(ledger.owner, 1 << 30))
        with ledger.claimed(file_ids(fingerprint, keys[1:2])):
            os.close(os.open(file.temporary, CREATE_FLAGS, dir_fd=file.folder_fd))
            async with open_store(tmp_path, memory.namespace()) as other:
                await until_scanned(other)
                assert len(temporary_files(tmp_path)) == 1
                outcomes = await store(other, keys[1:], memory.describe(0, [0]))
                assert [outcome.status for outcome in outcomes] == [Status.FAILED]
                assert "another process" in outcomes[0].reason
                fcntl.flock(ledger._claim._fd, fcntl.LOCK_UN)  # as if it had died
                outcomes = await store(other, keys[1:], memory.describe(0, [0]))
                assert [outcome.status for outcome in outcomes] == [Status.DONE]
                other._space.scan()
                assert temporary_files(tmp_path) == []


async def test_what_a_dead_process_reserved_is_room_again_after_a_walk(tmp_path: Path) -> None:
    memory, keys = crash_memory(), hashed_keys(1)
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, [0]))
    claim = tmp_path / "0123456789abcdef.claim"
    claim.write_bytes((1 << 20).to_bytes(8, "little"))
    ledger = tmp_path / "usage.ledger"
    record = ledger.read_bytes()
    used = int.from_bytes(record[8:16], "little")
    ledger.write_bytes(record[:8] + (used + (1 << 20)).to_bytes(8, "little") + record[16:])
    async with open_store(tmp_path, memory.namespace(), capacity=GIB) as backend:
        await until_scanned(backend)
        assert counted_bytes(backend) == bytes_on_disk(tmp_path) == used
        assert not claim.exists()
