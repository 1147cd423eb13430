"""Stores of block files that commands are given: folders, and URLs of buckets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvxfer.backends.object import BucketStore, ObjectConfig
    from kvxfer.pages.maintenance import BlockStore

STORE = "root of the store: a folder, or a bucket such as s3://bucket/prefix?endpoint=URL"


@contextlib.contextmanager
def open_store(argument: str) -> "Iterator[BlockStore]":
    """Open a store.

    Raises:
        InvalidArgumentError: It is a URL, and not one of a bucket.
        BackendUnavailableError: The client of the bucket cannot be opened.
    """
    from kvxfer.backends.file.folder_store import FolderStore

    if "://" not in argument:
        yield FolderStore(Path(argument))
    else:
        with _opened(_bucket(argument)) as store:
            yield store


@contextlib.contextmanager
def open_file(argument: str) -> "Iterator[tuple[BlockStore, str]]":
    """Open the store of a block file, and yield its path below the root, too; errors as above."""
    from kvxfer.backends.file.folder_store import FolderStore
    from kvxfer.pages.maintenance import split_path

    if "://" not in argument:
        root, path = split_path(str(Path(argument).absolute()))
        yield FolderStore(Path(root)), path
    else:
        config = _bucket(argument)
        root, path = split_path(config.path)
        with _opened(msgspec.structs.replace(config, path=root)) as store:
            yield store, path


def _bucket(url: str) -> "ObjectConfig":
    from kvxfer.backends.object import ObjectConfig
    from kvxfer.connect import parse_backend

    _, config = parse_backend(url)
    if not isinstance(config, ObjectConfig):
        kind = url.partition("://")[0]
        raise InvalidArgumentError("path", f"{kind}://", "a folder, or one of s3://, gs://, az://")
    return config


def _opened(config: "ObjectConfig") -> "contextlib.closing[BucketStore]":
    from kvxfer.backends.object import BucketStore

    return contextlib.closing(BucketStore(config))
