"""Pretended device: host memory labelled as a device's, for tests of staging without a GPU."""

import dataclasses
from collections.abc import Sequence

import torch

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.transfer.staged_backend import StagedBackend

DEVICE = torch.device("cuda", 0)


def on_device(blocks: Descriptors) -> Descriptors:
    """Relabel blocks as if a device held them."""
    return dataclasses.replace(blocks, device=DEVICE)


class PretendedCopyEngine(CopyEngine):
    """Copy engine between a device and the host, which fails as it is told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.begun: list[int] = []
        self._cpu = CPUCopyEngine(num_threads=1)

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        assert {source.device, destination.device} == {HOST, DEVICE}
        self.begun.append(source.num_bytes)
        if self.error is not None:
            raise self.error
        sides = (dataclasses.replace(side, device=HOST) for side in (source, destination))
        self._cpu.copy(*sides)

    def close(self) -> None:
        self._cpu.close()


class StagedFromDevice(StagedBackend):
    """Staging for callers that label a device's memory as the host's."""

    def __init__(self, inner: Backend, namespace: Namespace, *, staging_bytes: int) -> None:
        sizes = [namespace.chunk_size_bytes(group) for group in range(len(namespace.groups))]
        self.copy_engine = PretendedCopyEngine()
        super().__init__(inner, self.copy_engine, max(sizes), staging_bytes=staging_bytes)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().store(keys, on_device(blocks))
        assert self.copy_engine.begun, "the backend was given the memory of the device"
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return await super().load(keys, on_device(blocks))
