"""Staging keeps every promise of `Backend`; failed blocks change no memory of a device."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch

from kvxfer import Backend, BlockKey, Descriptors, Namespace, Outcome, Status
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import Copy, CopyEngine
from kvxfer.errors import ClosedError, DeviceError
from kvxfer.kvcache.memory_region import HOST
from kvxfer.storage.backend import DONE, MISSING
from kvxfer.storage.observed_backend import observed
from kvxfer.storage.observer import Observer, Reports
from kvxfer.storage.staging_memory import StagingMemory, touched_by_none
from kvxfer.testing import (
    BackendStateMachine,
    BackendTests,
    BlockMemory,
    DictBackend,
    DictConfig,
    WrapperTests,
)
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer.staged_backend import StagedBackend
from kvxfer.units import ByteSize
from tests.backends.file_store import capacity_of, flip_bit, open_store, path_of
from tests.examples import examples
from tests.tiering.opened_tiers import open_tiers

DEVICE = torch.device("cuda", 0)


async def test_a_buffer_whose_turn_comes_as_its_caller_is_cancelled_goes_to_the_next() -> None:
    staging = StagingMemory(1, 1, touched_by_none)
    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            waiting = asyncio.create_task(staging.hold([1], [0]).__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with staging.hold([1], [0], timeout_s=0.0):
            pass


def on_device(blocks: Descriptors) -> Descriptors:
    """Relabel blocks as if a device held them."""
    return dataclasses.replace(blocks, device=DEVICE)


class PretendedCopyEngine(CopyEngine):
    """Copy engine between a device and the host, which fails on demand."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.begun: list[int] = []
        self._cpu = CPUCopyEngine(num_threads=1)

    def begin(self, source: Descriptors, destination: Descriptors) -> Copy:
        assert {source.device, destination.device} == {HOST, DEVICE}
        self.begun.append(source.num_bytes)
        if self.error is not None:
            raise self.error
        sides = (dataclasses.replace(side, device=HOST) for side in (source, destination))
        return self._cpu.begin(*sides)

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


BLOCK_BYTES = 4096
NUM_BUFFERS = 4
STAGING_BYTES = NUM_BUFFERS * BLOCK_BYTES  # a buffer holds one block
REFUSED = DeviceError(0, "cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE")


class ToldBackend(DictBackend):
    def __init__(self, memory: BlockMemory) -> None:
        super().__init__(DictConfig(), memory.namespace())
        self.given: dict[BlockKey, Outcome] = {}
        self.addresses: list[int] = []

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.addresses += blocks.addresses.tolist()
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.addresses += blocks.addresses.tolist()
        outcomes = await super().load(keys, blocks)
        for index, key in enumerate(keys):
            if key in self.given:
                write_payloads(blocks.select(index, index + 1), [b"?" * BLOCK_BYTES])
        return [self.given.get(key, one) for key, one in zip(keys, outcomes, strict=True)]


class Staged:
    """Pretended device, a backend, and the staging between them."""

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        self.memory = BlockMemory([[BLOCK_BYTES - 96, 96]], num_blocks=32)
        self.inner = ToldBackend(self.memory)
        self.copies = PretendedCopyEngine()
        self.backend = StagedBackend(
            self.inner, self.copies, BLOCK_BYTES, staging_bytes=staging_bytes
        )

    def blocks(self, num_blocks: int) -> Descriptors:
        return on_device(self.memory.describe(0, range(num_blocks)))


@pytest.fixture
async def staged() -> AsyncIterator[Staged]:
    staged = Staged()
    yield staged
    await staged.backend.aclose()


async def test_an_engine_finds_the_observers_of_a_staged_backend() -> None:
    reports, memory = Reports([Mock(Observer)]), BlockMemory([[BLOCK_BYTES]], num_blocks=1)
    inner = observed(ToldBackend(memory), reports)
    async with StagedBackend(inner, PretendedCopyEngine(), BLOCK_BYTES) as backend:
        assert backend.provide(Reports) is inner.provide(Reports) is not None


async def test_what_did_not_arrive_leaves_the_memory_of_the_device_as_it_was() -> None:
    staged, keys = Staged(staging_bytes=1 << 20), make_keys(8)
    payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
    async with staged.backend as backend:
        write_payloads(staged.blocks(8), payloads)
        assert await backend.store(keys, staged.blocks(8)) == [DONE] * 8
        await staged.inner.delete(keys[1:2])
        staged.inner.given = {
            keys[2]: Outcome(Status.CORRUPT, reason="a bit"),
            keys[5]: Outcome(Status.FAILED, reason="a disk"),
            keys[7]: Outcome(Status.TIMED_OUT, memory_safe=False, reason="a peer"),
        }
        staged.memory.fill(0xA5)
        target = on_device(staged.memory.describe(0, [9, 3, 30, 12, 4, 5, 20, 21]))
        outcomes = await backend.load(keys, target)
        assert len(staged.copies.begun) == 2, "one store and one load, of one buffer each"
        expected = [DONE, MISSING, *[DONE] * 5, DONE]
        expected[2], expected[5] = staged.inner.given[keys[2]], staged.inner.given[keys[5]]
        expected[7] = Outcome(Status.TIMED_OUT, reason="a peer")
        assert outcomes == expected
        untouched = b"\xa5" * BLOCK_BYTES
        assert read_payloads(target) == [
            payload if outcome.done else untouched
            for payload, outcome in zip(payloads, outcomes, strict=True)
        ]


async def test_copies_that_are_refused_fail_their_blocks_and_keep_no_buffer(staged: Staged) -> None:
    there, new = make_keys(NUM_BUFFERS), make_keys(NUM_BUFFERS, first=50)
    assert await staged.backend.store(there, staged.blocks(NUM_BUFFERS)) == [DONE] * NUM_BUFFERS
    staged.copies.error = REFUSED
    before = staged.memory.snapshot()
    failed = [Outcome(Status.FAILED, reason=str(REFUSED))] * NUM_BUFFERS
    assert await staged.backend.store(new, staged.blocks(NUM_BUFFERS)) == failed
    assert await staged.backend.load(there, staged.blocks(NUM_BUFFERS)) == failed
    assert staged.memory.snapshot() == before
    assert await staged.backend.lookup(new) == [False] * NUM_BUFFERS
    staged.copies.error = None
    assert await staged.backend.store(new, staged.blocks(NUM_BUFFERS)) == [DONE] * NUM_BUFFERS


async def test_copies_that_hang_keep_the_copy_engine_open(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.runtime.threads.CLOSE_TIMEOUT_S", 0.01)
    begun, ends = threading.Event(), threading.Event()

    def hang(*_: Descriptors) -> None:
        begun.set()
        ends.wait()

    monkeypatch.setattr(staged.copies, "copy", hang)
    monkeypatch.setattr(staged.copies, "close", closed := Mock())
    storing = asyncio.create_task(staged.backend.store(make_keys(1), staged.blocks(1)))
    await asyncio.to_thread(begun.wait)
    await staged.backend.aclose()
    ends.set()
    await storing
    assert not closed.called


async def test_while_it_closes_no_call_reaches_the_inner_backend(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_close, keys = asyncio.Event(), make_keys(1)
    monkeypatch.setattr(staged.inner, "aclose", may_close.wait)
    closing = asyncio.create_task(staged.backend.aclose())
    await asyncio.sleep(0)
    backend, blocks = staged.backend, staged.blocks(1)
    calls = [backend.lookup(keys), backend.delete(keys), backend.flush()]
    for call in (*calls, backend.load(keys, blocks), backend.store(keys, blocks)):
        with pytest.raises(ClosedError, match="staged backend"):
            await call
    may_close.set()
    await closing


async def test_blocks_that_the_backend_reaches_go_there_without_a_copy(staged: Staged) -> None:
    blocks = staged.memory.describe(0, [1, 2])
    assert await staged.backend.store(make_keys(2), blocks) == [DONE] * 2
    assert await staged.backend.load(make_keys(2), blocks) == [DONE] * 2
    assert staged.inner.addresses == 2 * blocks.addresses.tolist()
    assert staged.copies.begun == []


FEW_BYTES = 1  # two buffers of the largest block
MANY_BYTES = 1 << 20


class TestStagedDictBackend(BackendTests):
    max_blocks: ClassVar[int | None] = 5
    staging_bytes: ClassVar[int] = MANY_BYTES

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self.stage(DictConfig(), namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return self.stage(DictConfig(max_blocks=self.max_blocks), namespace)

    def stage(self, config: DictConfig, namespace: Namespace) -> Backend:
        inner = DictBackend(config, namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=self.staging_bytes)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, StagedFromDevice)
        assert isinstance(backend.inner, DictBackend)
        backend.inner.corrupt(key)


class TestStagedDictBackendThroughFewBuffers(TestStagedDictBackend):
    """Suite in which a large batch is several to the backend, which may evict one for the next."""

    max_blocks = None
    staging_bytes = FEW_BYTES


class TestStagedFileBackend(BackendTests):
    persistent = True
    max_blocks = 5

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        inner = open_store(self.root, namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=MANY_BYTES)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        inner = open_store(self.root, namespace, capacity=capacity_of(namespace, self.max_blocks))
        return StagedFromDevice(inner, namespace, staging_bytes=MANY_BYTES)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)


class TestStagedTiers(BackendTests):
    """Suite over host memory and files, whose tiers have staging memory of their own."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        # Room for every block of a test: what is evicted before it was written back is lost.
        first = HostBackend(HostConfig(capacity=ByteSize(40 << 20)), namespace)
        tiers = open_tiers([first, open_store(self.root, namespace)], namespace)
        return StagedFromDevice(tiers, namespace, staging_bytes=FEW_BYTES)


class TestStagingAroundABackend(WrapperTests):
    def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
        return StagedFromDevice(inner, namespace, staging_bytes=FEW_BYTES)


class StagedStateMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        inner = DictBackend(DictConfig(), namespace)
        return StagedFromDevice(inner, namespace, staging_bytes=FEW_BYTES)


TestStagedStateMachine = StagedStateMachine.TestCase
TestStagedStateMachine.settings = examples(10, steps=20)
