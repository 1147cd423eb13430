"""Shim with which SGLang runs whole on a CPU, hierarchical cache included.

Streams do nothing, copies between pools are torch's, host memory is not pinned. Imported first, by
the main module; a process that the engine spawns imports it again. For the I/O backend "direct".
"""

import types
from collections.abc import Callable
from typing import Any

import torch

import tests.sglang.import_stubs  # noqa: F401 - before SGLang

from sglang.srt import utils  # isort: skip
from sglang.srt.utils import common  # isort: skip


class Event(torch.cpu.Event):
    """Event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream(torch.cpu.Stream):
    """Stream on which everything has happened when it is called."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return event or Event()


class DeviceModule(types.ModuleType):
    Event = Event
    Stream = Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_stream(self, *args: object) -> object:
        return Stream()


DEVICE_MODULE = DeviceModule("device_module")
common.get_device_module = lambda: DEVICE_MODULE
utils.get_device_module = common.get_device_module

from sglang.srt.mem_cache.allocator import paged  # noqa: E402
from sglang.srt.mem_cache.pool_host import base, mha, mla  # noqa: E402 - uses what was replaced
from sglang.srt.mem_cache.pool_host import common as pool_common  # noqa: E402

for module in (pool_common, base):
    module._cuda_host_register = lambda *args, **kwargs: None
    module._cuda_host_unregister = lambda *args, **kwargs: None
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def transfer_kv_direct(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Copy tokens of all layers, of K and then of V, to pages `(pages, layers, tokens, ...)`."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for index, source in enumerate(src_ptrs):
        part, layer = divmod(index, num_layers)
        dst_ptrs[part][pages, layer] = source[src_indices].view(-1, page_size, *source.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices[::page_size] // page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[pages, layer_id].reshape(-1, *destination.shape[1:])


for module in (mha, mla):
    for copy in (
        transfer_kv_direct,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    ):
        setattr(module, copy.__name__, copy)


class Kernel:
    """Function in the place of a Triton kernel, which is called with a grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


def alloc_extend(
    prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _: int, page: int
) -> None:
    paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page, "cpu")


def alloc_decode(
    seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _: int, page_size: int
) -> None:
    """Choose a slot for one new token of each request: the next one, or that of a free page."""
    is_first = (seq_lens - 1) % page_size == 0
    rank = (torch.cumsum(is_first, 0) - 1).clamp(min=0, max=len(free_pages) - 1)
    out.copy_(torch.where(is_first, free_pages[rank] * page_size, last_loc + 1))


if not hasattr(paged, "alloc_decode_naive"):  # before 0.5.23 there are kernels for GPUs only
    paged.alloc_extend_kernel = Kernel(alloc_extend)
    paged.alloc_decode_kernel = Kernel(alloc_decode)

_make_host_pool = base.HostKVCache.__init__


def _make_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a host pool, unpinned: torch pins no memory without a device."""
    if len(args) > PIN_MEMORY:
        args = (*args[:PIN_MEMORY], False, *args[PIN_MEMORY + 1 :])
    else:
        kwargs["pin_memory"] = False
    _make_host_pool(self, *args, **kwargs)


PIN_MEMORY = 5
"""Position of `pin_memory` in releases that pass it by position."""

base.HostKVCache.__init__ = _make_unpinned
