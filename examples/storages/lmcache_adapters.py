"""L2 adapters of LMCache as backends: its own `fs`, and that of kvxfer."""

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

LIMIT_S = 30


class LMCacheAdapter(WrappedStorage):
    """L2 adapter of LMCache, whose keys have the name of the model and no more of it."""

    def __init__(self, adapter: L2AdapterInterface, folder: Path, namespace: Namespace) -> None:
        super().__init__(folder, namespace)
        self._adapter = adapter
        self._lock = threading.Lock()  # whoever waits takes the event of whichever task has ended
        self._dtype = getattr(torch, namespace.dtype) if namespace.dtype else torch.uint8

    def put(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """See `WrappedStorage.put`. LMCache answers for a batch as a whole."""
        objects = [_object(chunk, self._dtype) for chunk in chunks]
        with self._lock:
            task = self._adapter.submit_store_task(self._names(keys), objects)
            _wait(self._adapter.get_store_event_fd())
            result = self._adapter.pop_completed_store_tasks()[task]
        return [result.is_successful()] * len(keys)

    def get(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """See `WrappedStorage.get`."""
        objects = [_object(chunk, self._dtype) for chunk in chunks]
        with self._lock:
            task = self._adapter.submit_load_task(self._names(keys), objects)
            _wait(self._adapter.get_load_event_fd())
            loaded = self._adapter.query_load_result(task)
        return [loaded.test(index) for index in range(len(keys))]

    def has(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `WrappedStorage.has`."""
        with self._lock:
            task = self._adapter.submit_lookup_and_lock_task(
                self._names(keys), {0: MemoryLayoutDesc([], [])}
            )
            _wait(self._adapter.get_lookup_and_lock_event_fd())
            found = self._adapter.query_lookup_and_lock_result(task)
        self._adapter.submit_unlock(self._names(keys))
        return [found.test(index) for index in range(len(keys))]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See `WrappedStorage.remove`."""
        self._adapter.delete(self._names(keys))

    def close(self) -> None:
        """See `WrappedStorage.close`."""
        with self._lock:
            self._adapter.close()

    def _names(self, keys: Sequence[BlockKey]) -> list[ObjectKey]:
        return [ObjectKey(bytes(key), self.namespace.model, kv_rank=0) for key in keys]


def fs(folder: Path, namespace: Namespace) -> LMCacheAdapter:
    """Open LMCache's own adapter for file systems."""
    adapter = FSL2Adapter(FSL2AdapterConfig(base_path=str(folder)))
    return LMCacheAdapter(adapter, folder, namespace)


def kvxfer_adapter(folder: Path, namespace: Namespace) -> LMCacheAdapter:
    """Open kvxfer's adapter over files."""
    backend, revision = f"file://{folder}?capacity=1GiB", namespace.revision or "none"
    adapter = KVXferL2Adapter({"backend": backend, "revision": revision})
    return LMCacheAdapter(adapter, folder, namespace)


def _object(chunk: torch.Tensor, dtype: torch.dtype) -> TensorMemoryObj:
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
