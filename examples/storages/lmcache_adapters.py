"""L2 adapters of LMCache as backends: LMCache's own `fs`, and kvxfer's."""

import select
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from examples.storages.wrapper import WrappedStorage
from kvxfer import BlockKey, Namespace
from kvxfer.integrations.lmcache import KVXferL2Adapter
from kvxfer.storage import group_of

LIMIT_S = 30


class LMCacheAdapter(WrappedStorage):
    """L2 adapter of LMCache, whose keys identify a model by its name alone."""

    def __init__(self, adapter: L2AdapterInterface, folder: Path, namespace: Namespace) -> None:
        super().__init__(folder, namespace)
        self._adapter = adapter
        self._lock = threading.Lock()  # an event does not say which task has ended
        self._dtype = getattr(torch, namespace.dtype) if namespace.dtype else torch.uint8

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        """See `BytesBackend.put`. LMCache answers for a batch as a whole."""
        objects = [_object(bytearray(value), self._dtype) for value in values]
        with self._lock:
            task = self._adapter.submit_store_task(self._keys(names), objects)
            _wait(self._adapter.get_store_event_fd())
            result = self._adapter.pop_completed_store_tasks()[task]
        return [result.is_successful()] * len(names)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `BytesBackend.get`."""
        groups = [group_of(BlockKey(bytes.fromhex(name))) for name in names]
        pages = [bytearray(self.namespace.chunk_size_bytes(group)) for group in groups]
        objects = [_object(page, self._dtype) for page in pages]
        with self._lock:
            task = self._adapter.submit_load_task(self._keys(names), objects)
            _wait(self._adapter.get_load_event_fd())
            loaded = self._adapter.query_load_result(task)
        return [bytes(page) if loaded.test(index) else None for index, page in enumerate(pages)]

    def has(self, names: Sequence[str]) -> list[bool]:
        """See `BytesBackend.has`."""
        with self._lock:
            task = self._adapter.submit_lookup_and_lock_task(
                self._keys(names), {0: MemoryLayoutDesc([], [])}
            )
            _wait(self._adapter.get_lookup_and_lock_event_fd())
            found = self._adapter.query_lookup_and_lock_result(task)
        self._adapter.submit_unlock(self._keys(names))
        return [found.test(index) for index in range(len(names))]

    def remove(self, names: Sequence[str]) -> None:
        """See `BytesBackend.remove`."""
        self._adapter.delete(self._keys(names))

    def close(self) -> None:
        """See `BytesBackend.close`."""
        with self._lock:
            self._adapter.close()

    def _keys(self, names: Sequence[str]) -> list[ObjectKey]:
        return [ObjectKey(bytes.fromhex(name), self.namespace.model, kv_rank=0) for name in names]


def fs(folder: Path, namespace: Namespace) -> LMCacheAdapter:
    """Open LMCache's own adapter for file systems."""
    adapter = FSL2Adapter(FSL2AdapterConfig(base_path=str(folder)))
    return LMCacheAdapter(adapter, folder, namespace)


def kvxfer_adapter(folder: Path, namespace: Namespace) -> LMCacheAdapter:
    """Open kvxfer's adapter over files."""
    backend, revision = f"file://{folder}?capacity=1GiB", namespace.revision or "none"
    adapter = KVXferL2Adapter({"backend": backend, "revision": revision})
    return LMCacheAdapter(adapter, folder, namespace)


def _object(page: bytearray, dtype: torch.dtype) -> TensorMemoryObj:
    chunk = torch.frombuffer(page, dtype=torch.uint8)
    shape = torch.Size([len(chunk) // dtype.itemsize])
    meta = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=len(chunk),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(chunk, meta, parent_allocator=None)


def _wait(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(LIMIT_S * 1000):  # LMCache itself waits for ever
        raise TimeoutError("LMCache's adapter does not answer")
    consume_fd(fd)
