"""Processes that share a folder never harm each other, not even one that is killed."""

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvxfer import BlockKey, Status, runtime
from kvxfer.backends.file import FileBackend
from kvxfer.backends.file.folders import Ledger
from kvxfer.pages.names import LEDGER_NAME
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    hashed_keys,
    load_verified,
    open_store,
    sealed,
    temporary_files,
)
from tests.backends.processes import start
from tests.backends.worker_processes import crash_memory, write_on

KEYS_PER_KILL = 200
SLOW = [pytest.mark.slow, pytest.mark.timeout(120)]
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


def write_and_be_killed(
    root: Path, first: int, moment: int, rng: random.Random, *secrets: str
) -> None:
    """Start a writer and kill it once `moment` block files, and some bytes, are there."""
    before = len(list(root.rglob("*.safetensors")))
    unfinished = rng.random() < 0.7
    writer = start(write_on, root, first, *secrets)
    while True:
        found = list(root.rglob("*.safetensors*"))
        temporary = [path for path in found if path.suffix == ".tmp"]
        if len(found) - before >= moment and (temporary or not unfinished):
            break
        assert writer.exitcode is None
    writer.kill()
    writer.join()
    writer.close()
    for path in temporary_files(root):
        # The kernel closes files in use by io_uring a moment after the process has ended.
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


async def require_whole(backend: FileBackend, keys: list[BlockKey], memory: BlockMemory) -> int:
    """Check that all found blocks are whole; return their number."""
    found = [k for k, there in zip(keys, await backend.lookup(keys), strict=True) if there]
    for at in range(0, len(found), 16):
        batch = found[at : at + 16]
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
    for kill in range(num_kills):
        root = tmp_path / f"store-{kill % 4}"  # with leftovers of killed processes
        first, moment = KEYS_PER_KILL * kill, rng.randrange(12)
        await asyncio.to_thread(write_and_be_killed, root, first, moment, rng, *secrets)
        num_unfinished += len(temporary_files(root))
        fields = sealed(root, *secrets) if secrets else {}
        async with open_store(root, crash_memory().namespace(), **fields) as backend:
            keys = hashed_keys(KEYS_PER_KILL, first=first)
            num_whole += await require_whole(backend, keys, crash_memory())
            await backend.wait_indexed()
            assert temporary_files(root) == []
            assert counted_bytes(root) == bytes_on_disk(root)
            assert len(list(root.glob("*.claim"))) == 1, "only our own is left"
    assert num_unfinished > num_kills // 10, "too few were killed while they wrote"
    assert num_whole > num_kills


def test_files_that_are_written_stay_claimed_when_the_count_is_removed(tmp_path: Path) -> None:
    with (
        closing(Ledger(tmp_path)) as ours,
        closing(Ledger(tmp_path)) as others,
        ours.claimed([b"file"]),
    ):
        (tmp_path / LEDGER_NAME).unlink()
        with ours.locked():  # another thread makes a new count
            pass
        with others.claimed([b"file"]) as taken:
            assert taken == {b"file"}


def test_bytes_added_to_a_count_that_is_removed_meanwhile_are_not_reserved(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.recount_blocks([])

        def reserve() -> None:
            with ledger.locked():
                ledger.reserve(5)
                (tmp_path / LEDGER_NAME).unlink()

        with pytest.raises(OSError, match="removed"):
            reserve()
        assert ledger.reserved == 0
        assert not ledger.known


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_walk_changes_no_count_that_was_lost_since_it_began(
    tmp_path: Path, *, is_seen: bool
) -> None:
    with closing(Ledger(tmp_path)) as ours, closing(Ledger(tmp_path)) as others:
        ours.recount_blocks([])
        with ours.locked():
            ours.reserve(5)
        with ours.locked():
            begun = ours.begin_recount()
            ours.reserve(2)
        (tmp_path / LEDGER_NAME).write_bytes(b"")
        if is_seen:
            with ours.locked():
                assert not ours.known
        others.recount_blocks([])
        with others.locked():
            others.reserve(100 if is_seen else 0)
        with ours.locked():
            ours.end_recount(begun, 5)
            assert ours.used == (107 if is_seen else 7)


def test_bytes_moved_while_there_is_no_count_are_not_taken_off_the_next_one(
    tmp_path: Path,
) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        with ledger.locked():
            begun = ledger.begin_recount()
        with ledger.locked():
            ledger.move(10, replaced=0)
        with ledger.locked():
            ledger.end_recount(begun, 30)
            assert ledger.used == 30


def test_a_process_that_was_stopped_while_it_read_a_claim_keeps_no_store_from_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = runtime.disk().flock, list[int]()

    def read_first(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not others:
            others.append(os.open(next(tmp_path.glob("*.claim")), os.O_RDONLY))
            lock(others[0], fcntl.LOCK_SH)
        lock(fd, operation)

    monkeypatch.setattr(runtime.disk(), "flock", read_first)
    opening = runtime.begin_aside("test", partial(Ledger, tmp_path))
    try:
        opening.result(timeout=5).close()
    finally:
        os.close(others[0])
    assert not [*tmp_path.glob("*.claim")]


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
