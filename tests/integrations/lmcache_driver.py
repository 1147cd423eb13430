"""Driver of an L2 adapter of LMCache, as its two controllers, and an adapter with faults below."""

import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdapterConfigBase,
    get_l2_adapter_config_class,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

LIMIT_S = 15.0


def plugin(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvxfer.integrations.lmcache",
        "class_name": "KVXferL2Adapter",
        "adapter_params": {"revision": "commit"} | params,
    } | more


def make_config(spec: dict[str, Any]) -> L2AdapterConfigBase:
    config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
    config.eviction_config = L2AdapterConfigBase._parse_eviction_config(spec)
    config.serde_config = L2AdapterConfigBase._parse_serde_config(spec)
    return config


def make_key(number: int, **fields: Any) -> ObjectKey:
    """Key of an object; its chunk's hash is as long as that of SHA-256."""
    given = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "some/model", "kv_rank": 1}
    return ObjectKey(**(given | fields))


class Memory:
    """LMCache's memory: objects side by side in one buffer."""

    def __init__(self, num_bytes: int = 1 << 20) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.desc = L1MemoryDesc(self.buffer.data_ptr(), num_bytes, align_bytes=1)
        self._used = 0

    def allocate(self, num_bytes: int, *, dtype: torch.dtype = torch.uint8) -> TensorMemoryObj:
        start, self._used = self._used, self._used + num_bytes
        assert self._used <= len(self.buffer)
        return make_object(self.buffer[start : self._used], dtype=dtype)

    def fill(
        self, num_bytes: int, seed: int, *, dtype: torch.dtype = torch.uint8
    ) -> TensorMemoryObj:
        made = self.allocate(num_bytes, dtype=dtype)
        random = torch.Generator().manual_seed(seed)
        made.raw_data.random_(0, 256, generator=random)
        return made


def make_object(raw: torch.Tensor, *, dtype: torch.dtype = torch.uint8) -> TensorMemoryObj:
    shape = torch.Size([len(raw) // dtype.itemsize])
    meta = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=len(raw),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, meta, parent_allocator=None)


def bytes_of(objects: Sequence[TensorMemoryObj]) -> list[bytes]:
    return [each.raw_data.numpy().tobytes() for each in objects]


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Driver:
    """Controllers in one: submits a task, waits for its event, and takes the answer."""

    def __init__(self, adapter: L2AdapterInterface) -> None:
        self.adapter = adapter

    @classmethod
    def open(cls, spec: dict[str, Any], memory: Memory | None = None) -> "Driver":
        return cls(create_l2_adapter(make_config(spec), None if memory is None else memory.desc))

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> L2StoreResult:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        self._wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        layout = MemoryLayoutDesc([], [])
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {0: layout})
        self._wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # given once
        return [found.test(index) for index in range(len(keys))]

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        self._wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        return [loaded.test(index) for index in range(len(keys))]

    def _wait(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(LIMIT_S * 1000), "no answer"
        consume_fd(fd)
