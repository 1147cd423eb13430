"""Files of the benchmark: their paths, and the page cache."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvxfer.backends.file import FileConfig
from kvxfer.storage.keys import BlockKey, Namespace

SETTLE_S = 0.5


def block_paths(
    config: FileConfig, namespace: Namespace, keys: Sequence[BlockKey]
) -> Iterator[Path]:
    """List the paths of blocks' files in a `FileBackend`."""
    for key in keys:
        yield block_path(config, namespace, key)


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
    time.sleep(SETTLE_S)


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
