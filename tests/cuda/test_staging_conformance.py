"""Staging keeps every promise of `Backend` with a GPU's copies, too."""

import ctypes
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendTests, DictBackend, DictConfig
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.transfer.staged_backend import StagedBackend
from tests.cuda.simulated_gpu import SimulatedGpu

DEVICE = torch.device("cuda", 0)
ARENA_BYTES = 64 << 20
GAP_BYTES = 24

Move = Callable[[Sequence[BlockKey], Descriptors], Coroutine[Any, Any, list[Outcome]]]


class StagedFromMirror(StagedBackend):
    """Backend that moves a test's blocks, in host memory, by way of a mirror on the device."""

    def __init__(self, gpu: SimulatedGpu, inner: Backend, namespace: Namespace) -> None:
        sizes = [namespace.chunk_size_bytes(group) for group in range(len(namespace.groups))]
        super().__init__(inner, DeviceCopyEngine(), max(sizes), staging_bytes=1 << 18)
        self._gpu = gpu
        self._arena = gpu.allocate(ARENA_BYTES)
        self._used = 0
        self.attach([MemoryRegion(self._arena, ARENA_BYTES, gpu, DEVICE)])

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return await super().store(keys, self._mirror(blocks))

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        mirror = self._mirror(blocks)
        try:
            return await super().load(keys, mirror)
        finally:  # however it ended: what was not loaded is as it was
            self._reflect(mirror, blocks)

    def _mirror(self, blocks: Descriptors) -> Descriptors:
        lengths = blocks.lengths.astype(np.int64) + GAP_BYTES
        if self._used + int(lengths.sum()) > ARENA_BYTES:
            self._used = 0  # whoever was there has long left
        starts = self._arena + self._used + np.cumsum(lengths) - lengths
        self._used += int(lengths.sum())
        for from_, to, length in zip(
            blocks.addresses.tolist(), starts.tolist(), blocks.lengths.tolist(), strict=True
        ):
            self._gpu.write(to, ctypes.string_at(from_, length))
        return replace(blocks, addresses=starts.astype(np.uint64), device=DEVICE)

    def _reflect(self, mirror: Descriptors, blocks: Descriptors) -> None:
        pairs = zip(mirror.addresses.tolist(), mirror.lengths.tolist(), strict=True)
        joined = b"".join(self._gpu.read(address, length) for address, length in pairs)
        if joined == b"".join(read_payloads(blocks)):
            return
        ends = np.cumsum(blocks.block_sizes).tolist()
        sizes = blocks.block_sizes.tolist()
        payloads = [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        write_payloads(blocks, payloads)


class TestStagedBackendOfGpu(BackendTests):
    max_blocks = 5

    @pytest.fixture(autouse=True)
    def _gpu(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    async def make_backend(self, namespace: Namespace) -> Backend:
        return StagedFromMirror(self.gpu, DictBackend(DictConfig(), namespace), namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        inner = DictBackend(DictConfig(max_blocks=self.max_blocks), namespace)
        return StagedFromMirror(self.gpu, inner, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, StagedFromMirror)
        assert isinstance(backend.inner, DictBackend)
        backend.inner.corrupt(key)
