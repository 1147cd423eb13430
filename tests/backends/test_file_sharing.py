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

import numpy as np
import pytest

from kvxfer.backends.file import BlockTree, FileBackend, Space
from kvxfer.backends.file.folders import Ledger, NamespaceFolder
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.eviction.policies import LRU
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    flip_bit,
    hashed_keys,
    load_verified,
    on_disk,
    one_page_memory,
    open_store,
    path_of,
    store,
    store_batch,
    temporary_files,
    unlock_as_if_dead,
)
from tests.backends.writer_process import shared_memory

BLOCK_BYTES = 16 << 10
NUM_KEYS = 120
REPOSITORY = Path(__file__).parents[2]
LONG = [pytest.mark.exhaustive, pytest.mark.timeout(180)]


pytestmark = pytest.mark.processes


def open_small_store(root: Path, memory: BlockMemory) -> FileBackend:
    """Open a store of four files that walks again at once, however busy the machine is."""
    return open_store(root, memory.namespace(), capacity=4 * 8192, rescan_factor=0)


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


async def test_two_processes_that_store_the_same_keys_write_each_once(tmp_path: Path) -> None:
    root, num_keys = tmp_path / "store", 200
    with processes("store_once", root, num_keys) as started:
        await until_ready(started)
        for process in started:
            assert process.stdin
            process.stdin.write("now\n")
            process.stdin.flush()
        ends = [await asyncio.to_thread(process.communicate) for process in started]
    done, written = zip(*(map(int, out.split()) for out, _ in ends), strict=True)
    assert done == (num_keys, num_keys)
    assert sum(written) == num_keys
    assert len(list(root.rglob("*.safetensors"))) == num_keys


async def test_a_block_stored_since_it_was_looked_for_is_not_written_again(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(1)
    async with (
        open_store(tmp_path, memory.namespace()) as ours,
        open_store(tmp_path, memory.namespace()) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        batch = store_batch(ours, keys, memory.describe(0, [1]))
        batch.make_room()  # it is not there
        await store(theirs, keys, memory.describe(0, [0]), version=1)
        inode = path_of(tmp_path, memory.namespace(), keys[0]).stat().st_ino
        (outcome,) = batch.write(0, 1)
        assert outcome, "to be asked for again: another process has it"
        assert outcome.reason == "another process is storing this block"
        assert path_of(tmp_path, memory.namespace(), keys[0]).stat().st_ino == inode
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
        assert temporary_files(tmp_path) == []


def taken_from(ledger: Ledger, files: str) -> str:
    """Claim files for a moment; return those that other processes have claimed."""
    with ledger.claimed([file.encode() for file in files]) as taken:
        return b"".join(sorted(taken)).decode()


def test_a_file_is_claimed_by_one_living_process_at_a_time(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ours, closing(Ledger(tmp_path)) as theirs:
        with ours.claimed([b"a"]), ours.claimed([b"b", b"c"]):
            with theirs.claimed([b"x", b"b"]):
                assert taken_from(ours, "xy") == "x"
                assert taken_from(theirs, "abcde") == "abc"
            assert taken_from(ours, "xy") == ""
        assert taken_from(theirs, "abcde") == ""
        with ours.claimed([b"c"]):
            unlock_as_if_dead(tmp_path / f"{ours.owner}.claim")
            assert taken_from(theirs, "c") == ""
        with ours.claimed([b"c"]):  # it lives, and has seen that its file was removed
            assert taken_from(theirs, "c") == "c"


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


def test_what_another_process_reserved_outlives_a_recount(tmp_path: Path) -> None:
    ours, theirs = (
        Space(
            BlockTree(tmp_path),
            NamespaceFolder(tmp_path, one_page_memory().namespace().fingerprint),
            Ledger(tmp_path),
            LRU(4),
            capacity_bytes=4 * 8192,
            min_free_bytes=0,
            rescan_factor=0,
        )
        for _ in range(2)
    )
    keys = hashed_keys(4)
    ours.scan()
    theirs.scan()
    assert theirs.reserve(keys[:3], [8192] * 3) == 3
    ours.scan()
    assert counted_bytes(tmp_path) == 3 * 8192
    assert ours.reserve(keys[3:], [8192]) == 1
    assert ours.reserve(hashed_keys(1, first=9), [8192]) == 0
    theirs.settle(keys[:3], stored=[False] * 3)
    assert ours.reserve(hashed_keys(3, first=9), [8192] * 3) == 3


async def test_files_of_others_are_found_and_evicted_when_ours_are_gone(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(8)
    async with (
        open_small_store(tmp_path, memory) as ours,
        open_small_store(tmp_path, memory) as theirs,
    ):
        await store(theirs, keys[:4], memory.describe(0, range(4)))
        outcomes = await store(ours, keys[4:], memory.describe(0, range(4)))
        assert all(outcome.done for outcome in outcomes)
        assert await theirs.lookup(keys) == [False] * 4 + [True] * 4
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 4 * 8192


@pytest.mark.parametrize("first", ["whole", "part"])
async def test_an_evicted_file_counts_as_what_it_is_although_others_replaced_it(
    tmp_path: Path, first: str
) -> None:
    """Another process may have stored a part of a chunk anew, or the whole of it."""
    memory = np.zeros(4 * 4096, np.uint8)
    namespace = Namespace(
        model="m", groups=(GroupIdentity(page_sizes_bytes=(4096,)),), blocks_per_chunk=4
    )
    part, whole = (
        Descriptors.of_pieces(
            np.array([memory.ctypes.data], np.uint64), np.array([size], np.uint64), owners=(memory,)
        )
        for size in (4096, memory.nbytes)
    )
    sizes = {"whole": (whole, part), "part": (part, whole)}[first]
    capacity = 6 * (memory.nbytes + 4096)
    async with (
        open_store(tmp_path, namespace, capacity=capacity) as ours,
        open_store(tmp_path, namespace, capacity=capacity) as theirs,
    ):
        await ours.wait_indexed()
        await theirs.wait_indexed()
        keys = hashed_keys(30)
        for key in keys[:4]:
            await ours.store([key], sizes[0])
            await theirs.delete([key])
            await theirs.store([key], sizes[1])
        for key in keys[4:]:
            await ours.store([key], whole)
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) <= capacity


async def test_what_others_put_in_quarantine_is_counted_and_goes_first(tmp_path: Path) -> None:
    memory, keys = one_page_memory(), hashed_keys(6)
    async with (
        open_small_store(tmp_path, memory) as ours,
        open_small_store(tmp_path, memory) as theirs,
    ):
        await store(theirs, keys[:4], memory.describe(0, range(4)))
        flip_bit(path_of(tmp_path, memory.namespace(), keys[0]), 8 * 4100)
        assert await load_verified(ours, keys[:1], memory.describe(0, [5])) == [Status.CORRUPT]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
        outcomes = await store(ours, keys[4:5], memory.describe(0, [0]))
        assert all(outcome.done for outcome in outcomes)
        assert await ours.lookup(keys) == [False, True, True, True, True, False]
        assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path) == 4 * 8192
