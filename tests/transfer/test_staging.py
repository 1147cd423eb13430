"""Staging: the place of every block at every moment, and after every failure."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from kvxfer.errors import (
    DeviceError,
    DeviceLostError,
    InvalidArgumentError,
)
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer.staged_backend import StagedBackend
from tests.transfer.pretended_device import DEVICE, PretendedCopyEngine, on_device

BLOCK_BYTES = 4096
NUM_BUFFERS = 4
STAGING_BYTES = NUM_BUFFERS * BLOCK_BYTES  # a buffer holds one block
REFUSED = DeviceError(0, "cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE")
LOST = DeviceLostError(0, "cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE")


class HeldBackend(DictBackend):
    """Backend that holds stores and loads at a gate, and returns given outcomes.

    Attributes:
        gate: Event that calls wait for, after they have done their work.
        given: Outcome to return for a key instead of the real one; its memory is overwritten.
        calls: Keys of each call, in order.
        addresses: Addresses of every described block.
    """

    def __init__(self, memory: BlockMemory) -> None:
        super().__init__(DictConfig(), memory.namespace())
        self.gate = asyncio.Event()
        self.gate.set()
        self.given: dict[BlockKey, Outcome] = {}
        self.calls: list[list[BlockKey]] = []
        self.addresses: list[int] = []
        self.attached: list[MemoryRegion] = []

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        self.attached += memory

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await self._pass(keys, blocks)
        return self._say(keys, await super().store(keys, blocks))

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await self._pass(keys, blocks)
        outcomes = await super().load(keys, blocks)
        for index, key in enumerate(keys):
            if key in self.given:
                write_payloads(blocks.select(index, index + 1), [b"?" * BLOCK_BYTES])
        return self._say(keys, outcomes)

    def _say(self, keys: Sequence[BlockKey], outcomes: list[Outcome]) -> list[Outcome]:
        return [self.given.get(key, one) for key, one in zip(keys, outcomes, strict=True)]

    async def _pass(self, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        assert blocks.device.type == "cpu"
        self.calls.append(list(keys))
        self.addresses += blocks.addresses.tolist()
        await self.gate.wait()


class Staged:
    """Pretended device, a backend with a gate, and the staging between them."""

    def __init__(self) -> None:
        self.memory = BlockMemory([[BLOCK_BYTES - 96, 96]], num_blocks=32)
        self.inner = HeldBackend(self.memory)
        self.copies = PretendedCopyEngine()
        self.backend = StagedBackend(
            self.inner, self.copies, BLOCK_BYTES, staging_bytes=STAGING_BYTES
        )

    def blocks(self, num_blocks: int, *, first: int = 0) -> Descriptors:
        return on_device(self.memory.describe(0, range(first, first + num_blocks)))

    async def fill(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Store blocks past the device, which keeps other bytes."""
        payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
        blocks = self.memory.describe(0, range(len(keys)))
        write_payloads(blocks, payloads)
        assert await DictBackend.store(self.inner, keys, blocks) == [DONE] * len(keys)
        self.memory.fill(0xA5)
        return payloads

    def release(self) -> None:
        self.copies.gate.set()
        self.inner.gate.set()


@pytest.fixture
async def staged() -> AsyncIterator[Staged]:
    staged = Staged()
    yield staged
    staged.release()
    await staged.backend.aclose()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until a condition holds; the test's time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - threads change it, too
        await asyncio.sleep(0)


async def settled() -> None:
    """Let the loop turn often enough for every task that can go on."""
    for _ in range(50):
        await asyncio.sleep(0)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


async def assert_all_buffers_work(staged: Staged) -> None:
    """Move more blocks than there are buffers, all of which are in use at one moment."""
    staged.release()
    staged.inner.gate.clear()
    staged.inner.calls.clear()
    keys = make_keys(2 * NUM_BUFFERS, first=1000)
    store = asyncio.create_task(staged.backend.store(keys, staged.blocks(len(keys))))
    await until(lambda: len(staged.inner.calls) == NUM_BUFFERS)
    staged.inner.gate.set()
    assert statuses(await store) == [Status.DONE] * len(keys)


async def test_what_did_not_arrive_leaves_the_memory_of_the_device_as_it_was() -> None:
    memory = BlockMemory([[BLOCK_BYTES - 96, 96]], num_blocks=32)
    inner, copies = HeldBackend(memory), PretendedCopyEngine()
    async with StagedBackend(inner, copies, BLOCK_BYTES, staging_bytes=1 << 20) as backend:
        keys = make_keys(8)
        payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
        blocks = on_device(memory.describe(0, range(8)))
        write_payloads(blocks, payloads)
        assert await backend.store(keys, blocks) == [DONE] * 8
        await inner.delete(keys[1:2])
        inner.given = {
            keys[2]: Outcome(Status.CORRUPT, reason="a bit"),
            keys[5]: Outcome(Status.FAILED, reason="a disk"),
            keys[7]: Outcome(Status.TIMED_OUT, memory_safe=False, reason="a peer"),
        }
        memory.fill(0xA5)
        target = on_device(memory.describe(0, [9, 3, 30, 12, 4, 5, 20, 21]))
        outcomes = await backend.load(keys, target)
        assert len(copies.begun) == 2, "one store and one load, of one buffer each"
        expected = [DONE, MISSING, *[DONE] * 5, DONE]
        expected[2], expected[5] = inner.given[keys[2]], inner.given[keys[5]]
        expected[7] = Outcome(Status.TIMED_OUT, reason="a peer")
        assert outcomes == expected
        untouched = b"\xa5" * BLOCK_BYTES
        found = read_payloads(target)
        assert found == [
            payload if outcome.done else untouched
            for payload, outcome in zip(payloads, outcomes, strict=True)
        ]


async def test_where_a_block_begins_in_its_chunk_is_passed_on() -> None:
    memory = BlockMemory([[64, 8]], num_blocks=16, blocks_per_chunk=4)
    inner = DictBackend(DictConfig(), memory.namespace())
    async with StagedBackend(inner, PretendedCopyEngine(), 4 * 72, staging_bytes=1) as backend:
        keys = make_keys(2)
        payloads = [make_payload(key, 4 * 72) for key in keys]
        source = on_device(memory.describe(0, range(8)))
        write_payloads(source, payloads)
        assert await backend.store(keys, source) == [DONE] * 2
        target = on_device(memory.describe(0, range(9, 14), first_block_index=2))
        assert await backend.load(keys, target) == [DONE] * 2
        assert read_payloads(target) == [payloads[0][2 * 72 :], payloads[1][: 3 * 72]]


async def test_a_lost_device_fails_what_was_copied_and_all_that_comes_later_at_once(
    staged: Staged,
) -> None:
    keys = make_keys(2 * NUM_BUFFERS)
    staged.copies.gate.clear()
    store = asyncio.create_task(staged.backend.store(keys, staged.blocks(len(keys))))
    await until(lambda: len(staged.copies.begun) == NUM_BUFFERS)
    staged.copies.error = LOST
    staged.copies.gate.set()
    outcomes = await store
    assert statuses(outcomes) == [Status.FAILED] * len(keys)
    assert {outcome.reason for outcome in outcomes} == {str(LOST)}
    assert [outcome.memory_safe for outcome in outcomes] == [False] * NUM_BUFFERS + [True] * 4
    num_copies = len(staged.copies.begun)
    for move in (staged.backend.load, staged.backend.store):
        later = await move(keys, staged.blocks(len(keys)))
        assert later == [Outcome(Status.FAILED, reason=str(LOST))] * len(keys)
    assert len(staged.copies.begun) == num_copies, "a buffer was used again"
    assert await staged.backend.lookup(keys) == [False] * len(keys)
    await staged.backend.drain()
    on_host = staged.memory.describe(0, [1])
    assert await staged.backend.store(keys[:1], on_host) == [DONE]
    await staged.backend.aclose()
    assert staged.copies.closed


async def test_what_cannot_be_is_refused_before_anything_moves(staged: Staged) -> None:
    largest = BlockMemory([[BLOCK_BYTES + 1]], num_blocks=2)
    with pytest.raises(InvalidArgumentError, match="bytes of a block is 4097"):
        await staged.backend.store(make_keys(1), on_device(largest.describe(0, [1])))
    assert not staged.copies.begun
    assert not staged.inner.calls
    staged.inner.memory_kinds = frozenset({"cuda"})
    with pytest.raises(InvalidArgumentError, match="'cpu' among them"):
        StagedBackend(staged.inner, staged.copies, BLOCK_BYTES)
    for wrong in ({"largest_block_bytes": 0}, {"largest_block_bytes": 1, "staging_bytes": 0}):
        with pytest.raises(InvalidArgumentError, match="at least 1"):
            StagedBackend(Staged().inner, staged.copies, **wrong)


async def test_blocks_that_the_backend_reaches_go_there_without_a_copy(staged: Staged) -> None:
    blocks = staged.memory.describe(0, [1, 2])
    assert await staged.backend.store(make_keys(2), blocks) == [DONE] * 2
    assert await staged.backend.load(make_keys(2), blocks) == [DONE] * 2
    assert staged.inner.addresses == 2 * blocks.addresses.tolist()
    assert staged.copies.begun == []


async def test_memory_is_attached_where_it_is_used_and_buffers_are_pinned_once(
    staged: Staged,
) -> None:
    (buffers,) = staged.inner.attached
    assert staged.copies.attached == []
    (on_host, *_) = memory_regions(staged.memory.caches)
    devices = [MemoryRegion(4096 * n, 4096, None, DEVICE) for n in (1, 2)]
    staged.backend.attach([on_host, devices[0]])
    staged.backend.attach([devices[1]])
    assert staged.inner.attached == [buffers, on_host]
    assert staged.copies.attached == [devices[0], buffers, devices[1]]
    assert "cuda" in staged.backend.memory_kinds


@pytest.mark.parametrize("name", ["store", "load"])
async def test_who_is_cancelled_while_the_device_copies_leaves_when_it_has_copied(
    staged: Staged, name: str
) -> None:
    keys = make_keys(2)
    if name == "load":
        await staged.fill(keys)
    staged.copies.gate.clear()
    move = staged.backend.store if name == "store" else staged.backend.load
    transfer = asyncio.create_task(move(keys, staged.blocks(2)))
    await until(lambda: len(staged.copies.begun) == 2)
    transfer.cancel()
    await settled()
    transfer.cancel()
    await settled()
    assert not transfer.done()
    staged.copies.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    if name == "store":
        assert not staged.inner.calls, "what was cancelled was stored"
    await assert_all_buffers_work(staged)


async def test_a_copy_that_is_refused_fails_its_blocks_and_nothing_else(staged: Staged) -> None:
    keys = make_keys(2)
    await staged.fill(keys)
    staged.copies.error = REFUSED
    before = staged.memory.snapshot()
    for move, name in ((staged.backend.store, "new"), (staged.backend.load, "there")):
        wanted = keys if name == "there" else make_keys(2, first=50)
        assert (
            await move(wanted, staged.blocks(2))
            == [Outcome(Status.FAILED, reason=str(REFUSED))] * 2
        )
    assert staged.memory.snapshot() == before
    assert await staged.backend.lookup(make_keys(2, first=50)) == [False] * 2
    staged.copies.error = None
    await assert_all_buffers_work(staged)
