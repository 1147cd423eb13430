"""Object storage in the memory of a test, by obstore's own client, with some calls replaced."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast
from unittest.mock import Mock

from obstore.store import MemoryStore, ObjectStore

from kvxfer.backends.object import Bucket, BucketStore, ObjectBackend, ObjectConfig
from kvxfer.storage.keys import Namespace


class MemoryConfig(ObjectConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scheme: ClassVar[str] = "memory"

    def open_store(self) -> ObjectStore:
        return MemoryStore()


def open_in_memory(namespace: Namespace, store: MemoryStore | None = None) -> ObjectBackend:
    backend = ObjectBackend(MemoryConfig(address="memory"), namespace)
    if store is not None:
        backend._bucket._store = store
    return backend


@contextlib.contextmanager
def opened_bucket(store: MemoryStore, **fields: Any) -> Iterator[BucketStore]:
    """Open what commands see of the objects of a store."""
    with contextlib.closing(BucketStore(MemoryConfig(address="memory", **fields))) as opened:
        opened.bucket._store = store
        yield opened


async def hang(*_: object, **_fields: object) -> None:
    """Stand in for a call that the server never answers."""
    await asyncio.Event().wait()


def plant(bucket: Bucket, **calls: Callable[..., Any]) -> None:
    """Replace calls of obstore's client."""
    bucket._store = cast("Any", Mock(wraps=bucket._store, **calls))
