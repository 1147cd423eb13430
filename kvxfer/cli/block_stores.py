"""Stores of block files that commands are given: folders, and URLs of buckets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.backends.file.maintenance import BlockStore

STORE = "root of the store: a folder, or a bucket such as s3://bucket/prefix?endpoint=URL"


@contextlib.contextmanager
def open_store(argument: str) -> "Iterator[BlockStore]":
    """Open a store."""
    from kvxfer.backends.file.maintenance import FolderStore

    yield FolderStore(Path(argument))


@contextlib.contextmanager
def open_file(argument: str) -> "Iterator[tuple[BlockStore, str]]":
    """Open the store of a block file; yields the path of the file in it, too."""
    from kvxfer.backends.file.maintenance import FolderStore, split_path

    root, path = split_path(str(Path(argument).absolute()))
    yield FolderStore(Path(root)), path
