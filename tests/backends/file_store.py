"""Helpers for tests of the file backend: real folders and file systems, made-up blocks."""

import contextlib
import fcntl
import fnmatch
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from kvxfer import Backend, BlockKey, Namespace, Outcome, Status, make_block_key, runtime
from kvxfer.backends.file import FileBackend, FileConfig, Integrity
from kvxfer.backends.file.io import FileIO, UringFileIO
from kvxfer.kvcache import Descriptors
from kvxfer.pages.namespace_format import GroupFormat
from kvxfer.storage import StoredTensor
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize

GIB = ByteSize(1 << 30)
NOTHING = ByteSize(1)
PAGE_BYTES = 4096
TMPFS = "/dev/shm"  # noqa: S108 - a tmpfs on purpose


def has_uring() -> bool:
    try:
        UringFileIO().close()
    except OSError:
        return False
    return True


_NEEDS = {"posix": [], "uring": [pytest.mark.skipif(not has_uring(), reason="needs io_uring")]}
ENGINES = [pytest.param(engine, marks=marks) for engine, marks in _NEEDS.items()]


def places(*sampled: str) -> list[pytest.ParameterSet]:
    """Parametrize every engine on every file system, as `uring-ext4`; only `sampled` always run."""
    return [
        pytest.param(place, marks=marks + ([] if place in sampled else [pytest.mark.exhaustive]))
        for engine, marks in _NEEDS.items()
        for place in (f"{engine}-ext4", f"{engine}-tmpfs")
    ]


def config(path: Path, **fields: object) -> FileConfig:
    """Configure a store with room for everything, unless `fields` say otherwise."""
    defaults = {"capacity": GIB, "min_free": NOTHING}
    return FileConfig(path=str(path), **(defaults | fields))  # type: ignore[arg-type]


def open_store(path: Path, namespace: Namespace, **fields: Any) -> FileBackend:
    return FileBackend(config(path, **fields), namespace)


@contextlib.asynccontextmanager
async def indexed_store(
    path: Path, namespace: Namespace, **fields: Any
) -> AsyncIterator[FileBackend]:
    """Open a store, and wait until it knows all of its files."""
    async with open_store(path, namespace, **fields) as backend:
        await backend.wait_indexed()
        yield backend


def secret_of(root: Path, *names: str) -> Path:
    """Write a file beside a store, with a secret for each name."""
    secret = root.with_name("-".join(names))
    secret.touch(0o600)
    secret.write_bytes(b"".join(name.encode().ljust(32) for name in names))
    return secret


def sealed(root: Path, *names: str, tenant: str = "") -> dict[str, Any]:
    """Make the fields of a store that seals blocks, with a secret for each name."""
    secret = str(secret_of(root, *names))
    return {"integrity": Integrity.SEALED, "secret_file": secret, "tenant": tenant}


def record_addresses(engine: FileIO) -> set[int]:
    """Record the addresses of all memory that an I/O engine is given from now on."""
    addresses: set[int] = set()

    def recorded(call: Any, files: Any, *args: Any, **more: Any) -> Any:
        addresses.update(*(file.vector[:, 0].tolist() for file in files))
        return call(files, *args, **more)

    for name in ("read_named", "write_named"):
        setattr(engine, name, partial(recorded, getattr(engine, name)))
    return addresses


def capacity_of(namespace: Namespace, num_blocks: int) -> ByteSize:
    """Compute the capacity in which exactly `num_blocks` chunks of the largest group fit."""
    formats = [GroupFormat(namespace, group) for group in range(len(namespace.groups))]
    return ByteSize(num_blocks * max(on_disk(each.file_size_bytes) for each in formats))


def open_descriptors() -> list[str]:
    """List the descriptors of this process, except those that are closed meanwhile."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(str(path.readlink()) for path in links)


def on_disk(num_bytes: int) -> int:
    """Round the size of a file up to the whole pages that it takes on the disk."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


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
    return root / namespace.fingerprint / key.hex()[:2] / f"{key.hex()}.safetensors"


def quarantine_of(root: Path, namespace: Namespace, key: BlockKey) -> Path:
    return root / namespace.fingerprint / "quarantine" / f"{key.hex()}.safetensors"


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def hashed_keys(num_keys: int, *, first: int = 0) -> list[BlockKey]:
    names = [f"block-{first + n}".encode() for n in range(num_keys)]
    return [make_block_key(xxhash.xxh3_128_digest(name), 0) for name in names]


def bytes_on_disk(root: Path) -> int:
    """Count the bytes of all block files below a root, unfinished and quarantined ones included."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if ".safetensors" in name:
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    total += on_disk((Path(folder) / name).stat().st_size)
    return total


def temporary_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors.tmp"))


def counted_bytes(root: Path) -> int:
    with (root / "usage.ledger").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        return int.from_bytes(ledger.read(16)[8:], "little")


def fail_to(monkeypatch: pytest.MonkeyPatch, call: str, pattern: str, error: Exception) -> None:
    """Let a call of the disk fail for files and folders whose names match."""
    really = getattr(runtime.disk(), call)

    def refuse(path: str | bytes | int | Path, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and fnmatch.fnmatch(Path(os.fsdecode(path)).name, pattern):
            raise error
        return really(path, *args, **kwargs)

    monkeypatch.setattr(runtime.disk(), call, refuse)


async def store(
    backend: Backend, keys: Sequence[BlockKey], blocks: Descriptors, *, version: int = 0
) -> list[Outcome]:
    sizes = blocks.block_sizes.tolist()
    payloads = [make_payload(k, size, version=version) for k, size in zip(keys, sizes, strict=True)]
    write_payloads(blocks, payloads)
    return await backend.store(keys, blocks)


async def load_verified(
    backend: Backend, keys: Sequence[BlockKey], blocks: Descriptors, *, version: int = 0
) -> list[Status]:
    outcomes = await backend.load(keys, blocks)
    loaded = read_payloads(blocks)
    for key, outcome, payload in zip(keys, outcomes, loaded, strict=True):
        assert outcome.memory_safe
        if outcome.done:
            assert payload == make_payload(key, len(payload), version=version), f"{key!r}: wrong"
    return [outcome.status for outcome in outcomes]


def one_page_memory() -> BlockMemory:
    """Caches of one group whose block files are two pages: header and data."""
    return BlockMemory([[PAGE_BYTES]], num_blocks=64)


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
    with mounted("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs") as folder:
        yield folder


@contextlib.contextmanager
def temporary_folder(file_system: str) -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="kvxfer-test-", dir=TMPFS if file_system == "tmpfs" else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder that an open store writes to, like repeated `rm -r`."""
    for _ in range(100):
        with contextlib.suppress(OSError):  # what was written meanwhile is in the way
            shutil.rmtree(folder)
            return
    shutil.rmtree(folder)
