"""Audited offloading spec: an independent check of every page that vLLM stores and loads.

`AuditedSpec` is used in place of `KVXferOffloadingSpec`. It keeps a digest of each device page
as it was when its store was submitted, and compares it with the page as it is when its load has
finished, both read through vLLM's own canonical tensors. Tokens alone hide a flipped bit.

Results are appended, a JSON line per job, to files in a directory, so that a test can read them
whichever processes the engine has.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, ReqContext

from kvxfer.integrations.vllm import KVXferOffloadingSpec
from kvxfer.integrations.vllm.offloading.interface import group_ids
from tests.e2e.audit import DIRECTORY, Forwarding, Hook, Log, hooks, lines_of

EXPONENT_BIT = 0x40
"""Of the last byte of a little-endian float, of 16 bits or 32."""

Key = bytes


@dataclass(frozen=True, slots=True)
class _NamedSpec(LoadStoreSpec):
    """Spec of the audited manager, with the keys of its blocks."""

    inner: LoadStoreSpec
    keys: Sequence[Key]


class _AuditedManager(Forwarding):
    def prepare_load(self, keys: Collection[Key], req_context: ReqContext) -> LoadStoreSpec:
        return _NamedSpec(self._inner.prepare_load(keys, req_context), list(keys))

    def prepare_store(self, keys: Collection[Key], req_context: ReqContext) -> Any:
        output = self._inner.prepare_store(keys, req_context)
        if output is None:
            return None
        stored = list(output.keys_to_store)
        return replace(output, store_spec=_NamedSpec(output.store_spec, stored))


@dataclass(frozen=True, slots=True)
class _Page:
    """Block of one group: the same block of every layer in it."""

    key: Key
    index_in_chunk: int
    group: int
    block_id: int

    @property
    def name(self) -> tuple[Key, int]:
        return self.key, self.index_in_chunk

    def __str__(self) -> str:
        return f"{self.key.hex()}[{self.index_in_chunk}] in block {self.block_id}"


class _AuditedWorker(Forwarding):
    def __init__(self, inner: Any, caches: Any, spec: "AuditedSpec") -> None:
        super().__init__(inner)
        self._caches = caches
        self._blocks_per_chunk = spec.blocks_per_chunk
        self._group_ids = group_ids(spec.config)
        self._rank = spec.config.parallel.rank
        self._storing_rank = 0 if spec.replicated_layout else self._rank
        self._log = Log(f"rank{self._rank}")
        self._stored = dict(_digests_of(self._rank))
        self._loads: dict[int, list[tuple[_Page, str | None]]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: _NamedSpec, **kwargs: Any
    ) -> bool:
        stored = {page.name: self._digest(page) for page in self._pages(src_spec, dst_spec.keys)}
        self._stored |= stored
        digests = [(key.hex(), index, digest) for (key, index), digest in stored.items()]
        self._log.write("store", digests=digests)
        submitted: bool = self._inner.submit_store(job_id, src_spec, dst_spec.inner, **kwargs)
        return submitted

    def submit_load(
        self, job_id: int, src_spec: _NamedSpec, dst_spec: GPULoadStoreSpec, **kwargs: Any
    ) -> bool:
        if self._storing_rank != self._rank:
            self._stored |= dict(_digests_of(self._storing_rank))
        pages = self._pages(dst_spec, src_spec.keys)
        self._loads[job_id] = [(page, self._stored.get(page.name)) for page in pages]
        submitted: bool = self._inner.submit_load(job_id, src_spec.inner, dst_spec, **kwargs)
        return submitted

    def get_finished(self) -> list[Any]:
        results = list(self._inner.get_finished())
        for result in results:
            self._compare(result.job_id)
        return results

    def wait(self, job_ids: set[int]) -> None:
        self._inner.wait(job_ids)
        for job_id in job_ids:
            self._compare(job_id)

    def _compare(self, job_id: int) -> None:
        load = self._loads.pop(job_id, [])
        if not load:
            return
        if Hook.FLIP_LOADED_BIT in hooks():
            self._flip(load[0][0])
        known = [(page, stored) for page, stored in load if stored is not None]
        self._log.write(
            "load",
            rank=self._rank,
            pages=len(load),
            unknown=[str(page) for page, stored in load if stored is None],
            different=[str(page) for page, stored in known if stored != self._digest(page)],
        )

    def _pages(self, blocks: GPULoadStoreSpec, keys: Sequence[Key]) -> Iterator[_Page]:
        """Pair the blocks of a job with the chunks of its keys, as vLLM's contract says."""
        start = 0
        for group, (num_blocks, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            group_id = self._group_ids[group].to_bytes(4, "big")
            chunks = [key for key in keys if key[-4:] == group_id]
            skip = first % self._blocks_per_chunk
            for index in range(num_blocks):
                chunk, within = divmod(skip + index, self._blocks_per_chunk)
                yield _Page(chunks[chunk], within, group, int(blocks.block_ids[start + index]))
            start += num_blocks

    def _flip(self, page: _Page) -> None:
        """Flip the highest bit of an exponent, as a broken copy would.

        Attention over thousands of values may round a smaller change away, so that no output would
        show the wrong page.
        """
        ref = self._caches.group_data_refs[page.group][-1]
        row = self._caches.tensors[ref.tensor_idx].tensor[page.block_id]
        row[ref.page_size_bytes - 1] ^= EXPONENT_BIT

    def _digest(self, page: _Page) -> str:
        digest = xxhash.xxh3_128()
        for ref in self._caches.group_data_refs[page.group]:
            row = self._caches.tensors[ref.tensor_idx].tensor[page.block_id]
            digest.update(row[: ref.page_size_bytes].cpu().numpy())
        return digest.hexdigest()


class AuditedSpec(KVXferOffloadingSpec):
    """`KVXferOffloadingSpec` under audit."""

    _audited_manager: _AuditedManager | None = None
    _audited_worker: _AuditedWorker | None = None

    def get_manager(self) -> Any:
        if self._audited_manager is None:
            self._audited_manager = _AuditedManager(super().get_manager())
        return self._audited_manager

    def get_worker(self, kv_caches: Any) -> Any:
        if self._audited_worker is None:
            worker: Any = super().get_worker(kv_caches)
            self._audited_worker = _AuditedWorker(worker, kv_caches, self)
        return self._audited_worker


def _digests_of(rank: int) -> Iterator[tuple[tuple[Key, int], str]]:
    """Read the pages that a rank stored, those of an earlier engine included: files keep them."""
    for line in lines_of(Path(os.environ[DIRECTORY]), f"rank{rank}-"):
        for key, index, digest in line.get("digests", ()):
            yield (bytes.fromhex(key), index), digest
