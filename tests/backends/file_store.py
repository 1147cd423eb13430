"""Helpers for tests of the file backend: real folders and file systems, made-up blocks."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.file.folders.names import file_name
from kvxfer.backends.file.format.group_format import GroupFormat
from kvxfer.backends.file.format.header import padded
from kvxfer.backends.file.io.uring import UringFileIO
from kvxfer.backends.file.store_batch import StoreBatch
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, StoredTensor, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize

GIB = ByteSize(1 << 30)
NOTHING = ByteSize(1)
PAGE_BYTES = 4096
TMPFS = "/dev/shm"  # noqa: S108 - a tmpfs on purpose


def has_uring() -> bool:
    """Whether the kernel permits io_uring."""
    try:
        UringFileIO().close()
    except OSError:
        return False
    return True


_NEEDS = {
    "posix": [],
    "uring": [pytest.mark.skipif(not has_uring(), reason="needs io_uring")],
}
ENGINES = [pytest.param(engine, marks=marks) for engine, marks in _NEEDS.items()]


def places(*sampled: str) -> list[pytest.ParameterSet]:
    """Every engine on every file system, as `uring-ext4`; what is not sampled is exhaustive."""
    return [
        pytest.param(place, marks=marks + ([] if place in sampled else [pytest.mark.exhaustive]))
        for engine, marks in _NEEDS.items()
        for place in (f"{engine}-ext4", f"{engine}-tmpfs")
    ]


def config(path: Path, **fields: object) -> FileConfig:
    """Configure a store with room for everything, unless `fields` say otherwise."""
    defaults = {"capacity": GIB, "min_free": NOTHING}
    return FileConfig(path=str(path), **(defaults | fields))  # type: ignore[arg-type]


def open_store(path: Path, namespace: Namespace, **fields: object) -> FileBackend:
    """Open a backend."""
    return FileBackend(config(path, **fields), namespace)


def store_batch(backend: FileBackend, keys: Sequence[BlockKey], blocks: Descriptors) -> StoreBatch:
    """Begin to store a batch, without a thread."""
    return StoreBatch(backend._files, backend._space, backend._writer, keys, blocks)


def capacity_of(namespace: Namespace, num_blocks: int) -> ByteSize:
    """Compute the capacity in which exactly `num_blocks` chunks of the largest group fit."""
    groups = range(len(namespace.groups))
    file = max(GroupFormat(namespace, group).file_size_bytes for group in groups)
    return ByteSize(num_blocks * padded(file))


def listed(namespace: Namespace, num_tensors: int = 160) -> Namespace:
    """Make a namespace whose chunks are `num_tensors` tensors, or one for each byte.

    160 do not fit into one page of a header.
    """
    groups = []
    for index, group in enumerate(namespace.groups):
        chunk = namespace.chunk_size_bytes(index)
        count = min(num_tensors, chunk)
        ends = [chunk * (number + 1) // count for number in range(count)]
        tensors = tuple(
            StoredTensor(name=f"layers.{number // 2}.{'kv'[number % 2]}", dtype="U8", shape=(size,))
            for number, size in enumerate(np.diff([0, *ends]).tolist())
        )
        groups.append(msgspec.structs.replace(group, tensors=tensors))
    return msgspec.structs.replace(namespace, groups=tuple(groups))


def path_of(root: Path, namespace: Namespace, key: BlockKey) -> Path:
    """Path of a key's file."""
    name = file_name(key)
    return root / namespace.fingerprint / name[:2] / name


def quarantine_of(root: Path, namespace: Namespace, key: BlockKey) -> Path:
    """Path of a key's file in quarantine."""
    return root / namespace.fingerprint / "quarantine" / file_name(key)


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file, in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def hashed_keys(num_keys: int, *, group: int = 0, first: int = 0) -> list[BlockKey]:
    """Make up keys that are spread over the folders of a namespace."""
    names = [f"block-{first + n}".encode() for n in range(num_keys)]
    return [make_block_key(xxhash.xxh3_128_digest(name), group) for name in names]


def bytes_on_disk(root: Path) -> int:
    """Count the bytes of all block files below a root, unfinished and quarantined ones included."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if ".safetensors" in name:
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    total += padded((Path(folder) / name).stat().st_size)
    return total


def temporary_files(root: Path) -> list[Path]:
    """List temporary files, which have not got their names yet."""
    return sorted(root.rglob("*.safetensors.tmp"))


def counted_bytes(backend: FileBackend) -> int:
    """Read the bytes that the ledger counts."""
    with backend._ledger.locked():
        return backend._ledger.used


async def until_scanned(backend: FileBackend) -> None:
    """Wait until the backend has scanned its store."""
    await asyncio.wrap_future(backend._scan)


async def store(
    backend: Backend, keys: Sequence[BlockKey], blocks: Descriptors, *, version: int = 0
) -> list[Outcome]:
    """Store made-up bytes; ignore the outcomes."""
    sizes = blocks.block_sizes.tolist()
    payloads = [make_payload(k, size, version=version) for k, size in zip(keys, sizes, strict=True)]
    write_payloads(blocks, payloads)
    return await backend.store(keys, blocks)


async def load_verified(
    backend: Backend, keys: Sequence[BlockKey], blocks: Descriptors, *, version: int = 0
) -> list[Status]:
    """Load blocks, and check the bytes of those that are `DONE`."""
    outcomes = await backend.load(keys, blocks)
    loaded = read_payloads(blocks)
    for key, outcome, payload in zip(keys, outcomes, loaded, strict=True):
        assert outcome.memory_safe
        if outcome.done:
            assert payload == make_payload(key, len(payload), version=version), f"{key!r}: wrong"
    return [outcome.status for outcome in outcomes]


def one_page_memory(num_blocks: int = 64) -> BlockMemory:
    """Caches of one group whose block files are two pages: header and data."""
    return BlockMemory([[PAGE_BYTES]], num_blocks=num_blocks)


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[Path]:
    """Mount a file system on a new folder; skips the test where that is not permitted."""
    folder = tempfile.mkdtemp(prefix="kvxfer-mount-")
    try:
        done = subprocess.run(["mount", *arguments, folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    finally:
        Path(folder).rmdir()


@contextlib.contextmanager
def tmpfs(num_bytes: int) -> Iterator[Path]:
    """Mount a small file system in memory."""
    with mounted("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs") as folder:
        yield folder


@contextlib.contextmanager
def temporary_folder(file_system: str) -> Iterator[Path]:
    """Make a folder on a disk or, for `tmpfs`, in memory."""
    folder = tempfile.mkdtemp(prefix="kvxfer-test-", dir=TMPFS if file_system == "tmpfs" else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder that an open store writes to, as a repeated `rm -r` would."""
    for _ in range(100):
        with contextlib.suppress(OSError):  # what was written meanwhile is in the way
            shutil.rmtree(folder)
            return
    shutil.rmtree(folder)
