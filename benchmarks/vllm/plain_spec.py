"""Plain synchronous offloading spec for vLLM, a contender of `make bench NAME=vllm`.

It is what an engineer writes in an afternoon: slots in tensors of torch, copied on the thread that
submits a job. It verifies nothing, shares nothing and knows one process only.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.offloading import interface as vllm
from kvxfer.integrations.vllm.offloading.interface import CanonicalKVCaches, GPULoadStoreSpec

Key = bytes


@dataclass(frozen=True, slots=True)
class Slots(vllm.LoadStoreSpec):
    """Slots of the chunks of a job, group after group."""

    slots: Sequence[int]


@dataclass(slots=True)
class _Chunk:
    slot: int
    stored: bool = False
    num_loads: int = 0


class PlainOffloadingSpec(vllm.OffloadingSpec):
    """Plain offloading spec; `capacity` in `kv_connector_extra_config` is the bytes of its slots.

    Raises:
        InvalidArgumentError: The engine has several workers.
    """

    def __init__(self, config: vllm.OffloadingConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if config.parallel.world_size > 1:
            raise InvalidArgumentError("workers", config.parallel.world_size, "1")
        chunk_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self._num_slots = int(self.extra_config["capacity"]) // chunk_bytes

    def get_manager(self) -> vllm.OffloadingManager:
        """Make the scheduler's side."""
        return PlainManager(self._num_slots)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> vllm.OffloadingWorker:
        """Make the worker's side."""
        return PlainWorker(kv_caches, self._num_slots, blocks_per_chunk=self.blocks_per_chunk)


class PlainManager(vllm.OffloadingManager):
    """Plain index of the chunks in slots, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.reset_cache()

    def lookup(self, key: Key, req_context: vllm.ReqContext, **_: Any) -> vllm.LookupResult:  # noqa: ARG002
        """Look up a chunk."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return vllm.LookupResult.MISS
        return vllm.LookupResult.HIT if chunk.stored else vllm.LookupResult.HIT_PENDING

    def prepare_load(self, keys: Collection[Key], *_: Any, **__: Any) -> Slots:
        """Keep chunks from eviction until `complete_load`."""
        self.touch(keys)
        for key in keys:
            self._chunks[key].num_loads += 1
        return Slots([self._chunks[key].slot for key in keys])

    def complete_load(self, keys: Collection[Key], *_: Any, **__: Any) -> None:
        """Let chunks be evicted again."""
        for key in keys:
            self._chunks[key].num_loads -= 1

    def touch(self, keys: Collection[Key], *_: Any, **__: Any) -> None:
        """Mark chunks as recently used; the head of a prompt is evicted last."""
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def prepare_store(
        self, keys: Collection[Key], *_: Any, **__: Any
    ) -> vllm.PrepareStoreOutput | None:
        """Find slots for chunks; None if too few can be evicted."""
        new = [key for key in keys if key not in self._chunks]
        wanted, keep = max(0, len(new) - len(self._free)), set(keys)
        idle = (
            key
            for key, chunk in self._chunks.items()
            if chunk.stored and not chunk.num_loads and key not in keep
        )
        evicted = list(islice(idle, wanted))
        if len(evicted) < wanted:
            return None
        self._free += [self._chunks.pop(key).slot for key in evicted]
        for key in new:
            self._chunks[key] = _Chunk(self._free.pop())
        slots = Slots([self._chunks[key].slot for key in new])
        return vllm.PrepareStoreOutput(keys_to_store=new, store_spec=slots, evicted_keys=evicted)

    def complete_store(
        self,
        keys: Collection[Key],
        req_context: vllm.ReqContext,  # noqa: ARG002 - vLLM's signature
        success: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
        **_: Any,
    ) -> None:
        """Make chunks loadable, or forget them."""
        for key in keys:
            if success:
                self._chunks[key].stored = True
            else:
                self._free.append(self._chunks.pop(key).slot)

    def on_new_request(self, *_: Any) -> vllm.RequestOffloadingContext:
        """Offload every new chunk of a request."""
        return vllm.RequestOffloadingContext()

    def reset_cache(self) -> None:
        """Forget every chunk."""
        self._chunks: OrderedDict[Key, _Chunk] = OrderedDict()
        self._free = list(reversed(range(self._num_slots)))


class PlainWorker(vllm.OffloadingWorker):
    """Plain worker, whose jobs have ended when `submit_store` or `submit_load` returns."""

    def __init__(self, caches: CanonicalKVCaches, num_slots: int, *, blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._results: list[vllm.TransferResult] = []
        pairs = []
        for cache in caches.tensors:
            blocks = _as_words(cache.tensor)
            shape = (num_slots * blocks_per_chunk, blocks.shape[1])
            pinned = blocks.device.type != "cpu"
            pairs.append((blocks, torch.zeros(shape, dtype=blocks.dtype, pin_memory=pinned)))
        self._tensors_of_group = [
            [pairs[index] for index in sorted({ref.tensor_idx for ref in refs})]
            for refs in caches.group_data_refs
        ]

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Slots, **_: Any
    ) -> bool:
        """Copy blocks to slots."""
        for cache, blocks, host, rows in self._pairs(src_spec, dst_spec):
            _copy(host, rows, cache, blocks)
        self._results.append(vllm.TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Slots, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        """Copy slots to blocks."""
        for cache, blocks, host, rows in self._pairs(dst_spec, src_spec):
            _copy(cache, blocks, host, rows)
        self._results.append(vllm.TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[vllm.TransferResult]:
        """Return the jobs that ended since the last call."""
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return: every job has ended."""

    def _pairs(self, blocks: GPULoadStoreSpec, placed: Slots) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield each tensor, its blocks, its slots, and the rows of the blocks in them."""
        first_block, first_slot, chunk = 0, 0, self._blocks_per_chunk
        ids, slots = torch.from_numpy(blocks.block_ids).long(), torch.tensor(placed.slots)
        for tensors, size, index in zip(
            self._tensors_of_group, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            if not size:
                continue
            skip = index % chunk
            num_slots = -(-(skip + size) // chunk)
            starts = slots[first_slot : first_slot + num_slots, None] * chunk
            rows = (starts + torch.arange(chunk)).flatten()[skip : skip + size]
            for cache, host in tensors:
                yield cache, ids[first_block : first_block + size], host, rows
            first_block, first_slot = first_block + size, first_slot + num_slots


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """View blocks as 64-bit words if possible, since torch copies bytes one by one."""
    blocks = cache.view(len(cache), -1)
    whole = all(n % 8 == 0 for n in (blocks.shape[1], blocks.stride(0), blocks.data_ptr()))
    return blocks.view(torch.int64) if whole else blocks


def _copy(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """Copy rows in one call of torch if the rows of either side are neighbours, else in two.

    Between a GPU and the host, rows are gathered on one side and scattered on the other.
    """
    if target.device != source.device:
        rows = source[source_rows.to(source.device)].to(target.device)
        target.index_copy_(0, target_rows.to(target.device), rows)
        return
    into, out_of = _neighbours(target, target_rows), _neighbours(source, source_rows)
    if into is None:
        target.index_copy_(0, target_rows, source[source_rows] if out_of is None else out_of)
    elif out_of is None:
        torch.index_select(source, 0, source_rows, out=into)
    else:
        into.copy_(out_of)


def _neighbours(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    first = int(rows[0])
    in_order = torch.equal(rows, torch.arange(first, first + len(rows)))
    return tensor[first : first + len(rows)] if in_order else None
