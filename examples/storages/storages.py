"""Storages under test: how each is opened, and which files it creates."""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer import Backend, BlockKey, Namespace
from kvxfer.connect import open_backend
from kvxfer.errors import KVXferError

THIS_RELEASE = "(this release)"


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage in files."""

    name: str
    version: str
    open: Callable[[Path, Namespace], Backend]


def file_of(folder: Path, key: BlockKey) -> Path:
    """Find the file of a block: its name contains the key in hex."""
    (found,) = [each for each in folder.rglob(f"*{key.hex()}*") if each.suffix != ".tmp"]
    return found


def kvxfer_file(folder: Path, namespace: Namespace) -> Backend:
    """Open kvxfer's own store in files."""
    return open_backend(f"file://{folder}?capacity=1GiB", namespace)


def find_storages() -> list[Storage]:
    """Find the storages whose packages are installed; kvxfer's own is the first."""
    found = [Storage("kvxfer `file://`", THIS_RELEASE, kvxfer_file)]
    for name, package, module, function in (
        ("kvxfer in LMCache", "kvxfer", "lmcache_adapters", "kvxfer_adapter"),
        ("LMCache `fs`", "lmcache", "lmcache_adapters", "fs"),
        ("SGLang `HiCacheFile`", "sglang", "sglang_file", "HiCacheFiles"),
    ):
        try:
            opened: Any = getattr(importlib.import_module(f"examples.storages.{module}"), function)
        except (ImportError, KVXferError):
            continue
        version = THIS_RELEASE if package == "kvxfer" else importlib.metadata.version(package)
        found.append(Storage(name, version, opened))
    return found
