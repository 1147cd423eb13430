"""Staging: what did not arrive changes no memory of a device, and what cannot be is refused."""

from collections.abc import AsyncIterator, Sequence

import pytest

from kvxfer.errors import DeviceError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, MISSING, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer.staged_backend import StagedBackend
from tests.transfer.pretended_device import PretendedCopyEngine, on_device

BLOCK_BYTES = 4096
NUM_BUFFERS = 4
STAGING_BYTES = NUM_BUFFERS * BLOCK_BYTES  # a buffer holds one block
REFUSED = DeviceError(0, "cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE")


class ToldBackend(DictBackend):
    """Backend that returns given outcomes."""

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


async def test_copies_that_are_refused_fail_their_blocks_and_keep_no_buffer(
    staged: Staged,
) -> None:
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


async def test_blocks_that_the_backend_reaches_go_there_without_a_copy(staged: Staged) -> None:
    blocks = staged.memory.describe(0, [1, 2])
    assert await staged.backend.store(make_keys(2), blocks) == [DONE] * 2
    assert await staged.backend.load(make_keys(2), blocks) == [DONE] * 2
    assert staged.inner.addresses == 2 * blocks.addresses.tolist()
    assert staged.copies.begun == []
