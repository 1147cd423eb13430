"""Files of benchmarks: the folder that they are in, their paths, and the page cache."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvxfer.backends.file import FileConfig
from kvxfer.storage.keys import BlockKey, Namespace


@contextlib.contextmanager
def bench_folder(name: str) -> Iterator[Path]:
    """Make a folder, below that of `KVXFER_BENCH_DIR`, and remove it at the end."""
    parent = Path(os.environ.get("KVXFER_BENCH_DIR", "build/bench"))
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def block_path(config: FileConfig, namespace: Namespace, key: BlockKey) -> Path:
    """Make the path of a block's file in a `FileBackend`."""
    digits = key.hex()
    return Path(config.path, namespace.fingerprint, digits[:2], f"{digits}.safetensors")


def make_folders(parent: Path) -> None:
    """Make all folders for block files."""
    for byte in range(256):
        (parent / f"{byte:02x}").mkdir(mode=0o700, parents=True, exist_ok=True)


def settle() -> None:
    """Sync the data that the last contender left unwritten, and pause."""
    os.sync()
    time.sleep(0.5)


def empty_files(paths: Iterable[Path]) -> None:
    """Truncate files instead of removing them.

    Without a journal ext4 searches past every inode that was freed in the last minutes when it
    makes a file, which would burden the next contender.
    """
    for path in paths:
        os.truncate(path, 0)


def drop_from_cache(path: Path) -> None:
    """Sync a file, and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
