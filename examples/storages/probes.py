"""Probes: how a storage handles damaged files, killed processes, and blocks of other engines."""

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.storages.storages import Storage, file_of
from kvxfer import Backend, BlockKey, GroupIdentity, Namespace, Outcome, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

SIZE = 64 << 10
LARGE = 16 << 20
LIMIT_S = 5.0
ROUNDS = 6
KEYS = [make_block_key(bytes([number]) * 32, 0) for number in range(4)]

GOOD, RIGHT, WRONG = "a miss", "its bytes", "**wrong bytes, reported as loaded**"


Run = Callable[[Storage, Path], Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe of a storage.

    Attributes:
        what: Damage that is done, as the table says it.
        run: Does the damage in a folder; returns the result, in bold if it is wrong.
    """

    what: str
    run: Run


class Caches:
    """Caches of one block size, and the namespace of a model."""

    def __init__(
        self, num_bytes: int = SIZE, *, dtype: str = "bfloat16", revision: str = "a"
    ) -> None:
        self.memory = BlockMemory([[num_bytes]], num_blocks=8, padding_bytes=0)
        self.num_bytes = num_bytes
        groups = (GroupIdentity(page_sizes_bytes=(num_bytes,)),)
        self.namespace = Namespace(model="model", revision=revision, dtype=dtype, groups=groups)

    async def store(self, backend: Backend, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Store made-up bytes."""
        self.write(keys)
        return await backend.store(keys, self.memory.describe(0, range(len(keys))))

    async def load(self, backend: Backend, keys: Sequence[BlockKey]) -> list[str]:
        """Load blocks; describe the result of each."""
        self.write([])
        outcomes = await backend.load(keys, self.memory.describe(0, range(len(keys))))
        found = self.compare(keys, outcomes)
        return [
            each if outcome.done else GOOD for each, outcome in zip(found, outcomes, strict=True)
        ]

    def write(self, keys: Sequence[BlockKey]) -> None:
        """Write the made-up bytes of each key to a block, and zeros to the others."""
        payloads = [make_payload(key, self.num_bytes) for key in keys]
        payloads += [bytes(self.num_bytes)] * (self.memory.num_blocks - len(keys))
        write_payloads(self.memory.describe(0, range(self.memory.num_blocks)), payloads)

    def compare(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> list[str]:
        """Describe each block: its own bytes, other bytes, or its status if it is not done."""
        payloads = read_payloads(self.memory.describe(0, range(len(keys))))
        return [
            (RIGHT if payload == make_payload(key, self.num_bytes) else WRONG)
            if outcome.done
            else outcome.status.value.replace("_", " ")
            for key, outcome, payload in zip(keys, outcomes, payloads, strict=True)
        ]


def damaged(
    damage: Callable[[Path, Path], None],
) -> Run:
    """Make a probe that damages the file of one block of two, and loads both."""

    async def run(storage: Storage, folder: Path) -> str:
        caches = Caches()
        async with storage.open(folder, caches.namespace) as backend:
            await caches.store(backend, KEYS[:2])
            damage(file_of(folder, KEYS[0]), file_of(folder, KEYS[1]))
            found, whole = await caches.load(backend, KEYS[:2])
            again = await backend.lookup(KEYS[:1])
        assert whole in {RIGHT, GOOD, WRONG}
        kept = found == GOOD and again == [True]
        return f"{found}, and found again" if kept else found

    return run


def flip(file: Path, _: Path) -> None:
    """Flip a bit."""
    content = bytearray(file.read_bytes())
    content[-SIZE // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path, _: Path) -> None:
    """Cut off the end."""
    os.truncate(file, file.stat().st_size - SIZE // 2)


def empty(file: Path, _: Path) -> None:
    """Truncate the file to nothing."""
    os.truncate(file, 0)


def swap(file: Path, other: Path) -> None:
    """Put another file in its place."""
    shutil.copyfile(other, file)


def other_namespace(theirs: Caches, ours: Caches) -> Run:
    """Make a probe that stores blocks as one engine and loads them as another one."""

    async def run(storage: Storage, folder: Path) -> str:
        async with storage.open(folder, theirs.namespace) as backend:
            await theirs.store(backend, KEYS[:1])
        async with storage.open(folder, ours.namespace) as backend:
            [found] = await ours.load(backend, KEYS[:1])
            # Even bytes that happen to be equal are those of another engine.
            return GOOD if found == GOOD else WRONG

    return run


async def partly_missing(storage: Storage, folder: Path) -> str:
    """Load four blocks, two of them missing."""
    caches = Caches()
    async with storage.open(folder, caches.namespace) as backend:
        await caches.store(backend, KEYS[::2])
        found = await caches.load(backend, KEYS)
    right = found == [RIGHT, GOOD, RIGHT, GOOD]
    return "the others are loaded" if right else "**the others are not loaded**"


async def blocked(storage: Storage, folder: Path) -> str:
    """Put a pipe in place of the file: opening it blocks, as on a file server that is gone."""
    caches = Caches()
    backend = storage.open(folder, caches.namespace)
    await caches.store(backend, KEYS[:2])
    file = file_of(folder, KEYS[0])
    file.unlink()
    os.mkfifo(file)
    load = asyncio.ensure_future(caches.load(backend, KEYS[:2]))
    await asyncio.wait([load], timeout=LIMIT_S)
    hung = not load.done()
    while not load.done():
        with open(os.open(file, os.O_RDWR | os.O_NONBLOCK), "wb"):  # noqa: ASYNC230, PTH123
            await asyncio.sleep(0.05)
    file.unlink(missing_ok=True)
    await backend.aclose()
    return "**no answer**" if hung else "a miss, at once"


async def killed(storage: Storage, folder: Path) -> str:
    """Kill a process in the middle of a store."""
    caches = Caches(LARGE)
    if not await asyncio.to_thread(_kill_in_store, storage, folder):
        return "could not be killed in a store"
    keys = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(32)]
    async with storage.open(folder, caches.namespace) as backend:
        found = set()
        for key in keys:
            found.update(await caches.load(backend, [key]))
        await caches.store(backend, KEYS[1:2])
    text = "whole blocks or none" if WRONG not in found else WRONG
    return f"{text}; **its file is left behind**" if unfinished(folder) else text


def _kill_in_store(storage: Storage, folder: Path) -> bool:
    """Kill a process while it is writing a file of a store; return whether that succeeded."""
    context = multiprocessing.get_context("spawn")
    for _ in range(ROUNDS):
        storing = context.Process(target=_store_large, args=(storage, folder))
        storing.start()
        while storing.is_alive() and not unfinished(folder):
            time.sleep(0.0005)
        storing.kill()
        storing.join()
        if unfinished(folder):
            return True
    return False


def unfinished(folder: Path) -> list[Path]:
    """Find files that are being written."""
    return [each for each in folder.rglob("*") if each.name.endswith(".tmp")]


def _store_large(storage: Storage, folder: Path) -> None:
    caches = Caches(LARGE)

    async def store() -> None:
        async with storage.open(folder, caches.namespace) as backend:
            for number in range(32):
                await caches.store(backend, [make_block_key(number.to_bytes(32, "big"), 0)])

    asyncio.run(store())


async def two_writers(storage: Storage, folder: Path) -> str:
    """Store different bytes under one key at once, as engines whose results differ in a bit do."""
    results = set()
    for number in range(ROUNDS):
        key, ready = make_block_key(bytes([100 + number]) * 32, 0), threading.Barrier(2)
        writers = [
            asyncio.to_thread(_store_filled, storage, folder, key, byte, ready) for byte in (1, 2)
        ]
        outcomes = await asyncio.gather(*writers)
        caches = Caches(LARGE)
        async with storage.open(folder, caches.namespace) as backend:
            blocks = caches.memory.describe(0, [1])
            [loaded] = await backend.load([key], blocks)
            content = set(read_payloads(blocks)[0])
        results.add("**a mixture**" if loaded.done and len(content) > 1 else "one of them")
        if not all(outcomes):
            results.add("**a store is reported as failed**")
    return "; ".join(sorted(results, reverse=True))


def _store_filled(
    storage: Storage, folder: Path, key: BlockKey, byte: int, ready: threading.Barrier
) -> bool:
    """Store a block filled with one byte, once both writers are ready."""
    caches = Caches(LARGE)

    async def store() -> bool:
        async with storage.open(folder, caches.namespace) as backend:
            blocks = caches.memory.describe(0, [0])
            write_payloads(blocks, [bytes([byte]) * LARGE])
            ready.wait(LIMIT_S)
            return all(each.done for each in await backend.store([key], blocks))

    return asyncio.run(store())


PROBES = (
    Probe("a bit of the file is flipped", damaged(flip)),
    Probe("the file is truncated", damaged(truncate)),
    Probe("the file is empty", damaged(empty)),
    Probe("the file is that of another block", damaged(swap)),
    Probe("stored with blocks of twice the size", other_namespace(Caches(2 * SIZE), Caches())),
    Probe("stored with another data type", other_namespace(Caches(dtype="float16"), Caches())),
    Probe(
        "stored with other weights of the model", other_namespace(Caches(revision="b"), Caches())
    ),
    Probe("a process is killed in the middle of a store", killed),
    Probe("two writers store different bytes under one key", two_writers),
    Probe("a block of the batch is missing", partly_missing),
    Probe("opening the file blocks", blocked),
)
"""All probes, in the order of the table."""


def in_folder(run: Callable[[Path], Coroutine[Any, Any, str]]) -> str:
    """Run a probe of a storage in a new folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return asyncio.run(run(Path(folder)))
