"""Object storage in the memory of a test, by obstore's own client, and calls that go elsewhere."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

from obstore.store import MemoryStore, ObjectStore

from kvxfer.backends.object import Bucket, ObjectBackend, ObjectConfig
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


def plant(bucket: Bucket, name: str, call: Callable[..., Any]) -> None:
    """Let a call of obstore go elsewhere, with the client as its first argument."""
    before = bucket._store
    planted = before if isinstance(before, _Planted) else _Planted(before, {})
    calls: dict[str, Callable[..., Any]] = dict(planted.calls) | {
        name: partial(call, planted.store)
    }
    bucket._store = cast("Any", _Planted(planted.store, calls))


class _Planted:
    def __init__(self, store: ObjectStore, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.store = store
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(self.store, name)
