"""Pretended device: host memory labelled as a device's, for tests of staging without a GPU."""

import dataclasses
import threading
from collections.abc import Sequence

import torch

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.storage.backend import Backend, Outcome
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.transfer.staged_backend import StagedBackend

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 10.0


def on_device(blocks: Descriptors) -> Descriptors:
    """Relabel blocks as if a device held them."""
    return dataclasses.replace(blocks, device=DEVICE)


class PretendedCopyEngine(CopyEngine):
    """Copy engine between a device and the host, with a gate that holds copies, and errors.

    Attributes:
        gate: Event without which no copy begins; set at first.
        error: Raised by every copy, if any.
        begun: Bytes of each copy that has begun, in order.
        host_addresses: Host addresses of these copies.
        attached: Attached regions.
        closed: Whether the engine was closed.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.begun: list[int] = []
        self.host_addresses: list[int] = []
        self.attached: list[MemoryRegion] = []
        self.closed = False
        self._cpu = CPUCopyEngine(num_threads=1)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        self.attached += memory

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        assert not self.closed
        assert {source.device, destination.device} == {HOST, DEVICE}
        staged = source if source.device == HOST else destination
        self.begun.append(source.num_bytes)
        self.host_addresses.append(int(staged.addresses[0]))
        assert self.gate.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        sides = (dataclasses.replace(side, device=HOST) for side in (source, destination))
        self._cpu.copy(*sides)

    def close(self) -> None:
        self.closed = True
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
