"""Host pool: a slot gives back the bytes that were written for its key, or none."""

from collections.abc import Iterator

import pytest

from kvxfer.backends.host import HostPool, MemoryIntegrity, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

KEY, OTHER = make_block_key(b"one", 0), make_block_key(b"other", 0)
SHAPE = PoolShape(num_slots=4, num_parts=2, part_size_bytes=4096)


class BrokenCopyEngine(CopyEngine):
    """Copy engine that fails in the middle of every copy."""

    def __init__(self) -> None:
        self.inner = CPUCopyEngine(num_threads=1)
        self.broken = False

    def copy(self, source: Descriptors, destination: Descriptors) -> None:
        self.inner.copy(source, destination)
        if self.broken:
            raise OSError("died")

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[1000, 24]], num_blocks=8, blocks_per_chunk=2)


@pytest.fixture
def pool(memory: BlockMemory) -> Iterator[HostPool]:
    engine = CPUCopyEngine(num_threads=1)
    pool = HostPool(SHAPE, memory.namespace(), engine, integrity=MemoryIntegrity.FULL)
    yield pool
    pool.close()


def write(pool: HostPool, memory: BlockMemory, *, part: int, first_block_index: int = 0) -> bytes:
    blocks = memory.describe(0, [1, 2][first_block_index:], first_block_index=first_block_index)
    payload = make_payload(KEY, int(blocks.block_sizes[0]), version=part)
    write_payloads(blocks, [payload])
    pool.write([3], [KEY], blocks, part=part)
    return payload


def test_each_part_gives_back_its_own_bytes(pool: HostPool, memory: BlockMemory) -> None:
    payloads = [write(pool, memory, part=part) for part in (0, 1)]
    for part in (0, 1):
        blocks = memory.describe(0, [5, 6])
        assert [outcome.done for outcome in pool.read([3], [KEY], blocks, part=part)] == [True]
        assert read_payloads(blocks) == [payloads[part]]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("offset", [0, 1023, 2047])
def test_a_flipped_bit_in_any_part_is_found_and_not_read(
    pool: HostPool, memory: BlockMemory, part: int, offset: int
) -> None:
    for each in (0, 1):
        write(pool, memory, part=each)
    pool.slots[3][part, offset] ^= 0x10
    assert pool.verify(3, KEY).status is Status.CORRUPT
    before = memory.snapshot()
    (outcome,) = pool.read([3], [KEY], memory.describe(0, [5, 6]), part=part)
    assert outcome.status is Status.CORRUPT
    assert memory.snapshot() == before


def test_a_slot_that_holds_another_block_is_a_miss_that_writes_nothing(
    pool: HostPool, memory: BlockMemory
) -> None:
    write(pool, memory, part=0)
    before = memory.snapshot()
    (outcome,) = pool.read([3], [OTHER], memory.describe(0, [5, 6]))
    assert outcome.status is Status.MISSING
    assert memory.snapshot() == before


def test_bytes_that_were_never_stored_are_a_miss(pool: HostPool, memory: BlockMemory) -> None:
    write(pool, memory, part=0, first_block_index=1)
    (whole,) = pool.read([3], [KEY], memory.describe(0, [5, 6]))
    assert whole.status is Status.MISSING
    (tail,) = pool.read([3], [KEY], memory.describe(0, [6], first_block_index=1))
    assert tail.done
    assert pool.verify(3, KEY).status is Status.MISSING


def test_a_write_that_dies_leaves_an_empty_slot(memory: BlockMemory) -> None:
    engine = BrokenCopyEngine()
    shape = PoolShape(num_slots=4, num_parts=1, part_size_bytes=4096)
    pool = HostPool(shape, memory.namespace(), engine)
    write(pool, memory, part=0)
    engine.broken = True
    with pytest.raises(OSError, match="died"):
        write(pool, memory, part=0)
    assert not pool.holds(3, KEY)
    assert pool.verify(3, KEY).status is Status.MISSING
    pool.close()


async def test_keys_name_their_slot_and_are_checked_like_any_other(memory: BlockMemory) -> None:
    shape = PoolShape(num_slots=4, num_parts=1, part_size_bytes=4096)
    pool = HostPool(shape, memory.namespace(), CPUCopyEngine(num_threads=1))
    async with SlotMover(pool, part=0) as slots:
        blocks = memory.describe(0, [1, 2, 3, 4])
        named = [slot_key(KEY, 2, 0), slot_key(OTHER, 0, 0)]
        payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in (KEY, OTHER)]
        write_payloads(blocks, payloads)
        assert all(outcome.done for outcome in await slots.store(named, blocks))
        assert [pool.holds(2, KEY), pool.holds(0, OTHER), pool.holds(1, KEY)] == [True, True, False]
        swapped = [slot_key(OTHER, 2, 0), slot_key(OTHER, 0, 0)]
        target = memory.describe(0, [6, 7, 0, 5])
        outcomes = await slots.load(swapped, target)
        assert [outcome.status for outcome in outcomes] == [Status.MISSING, Status.DONE]
        assert read_payloads(target)[1] == payloads[1]
    with pytest.raises(ClosedError):
        await slots.load(named, target)
    with pytest.raises(ClosedError):
        await slots.store(named, blocks)


def test_a_sealed_slot_holds_every_byte_that_was_put_there_and_is_verified(
    pool: HostPool, memory: BlockMemory
) -> None:
    pool.slots[3] = 7
    pool.seal([3], [KEY])
    assert pool.verify(3, KEY).done
    blocks = memory.describe(0, [5, 6])
    assert [outcome.done for outcome in pool.read([3], [KEY], blocks, part=1)] == [True]
    assert read_payloads(blocks) == [b"\7" * 2048]
    pool.slots[3, -1, -1] ^= 1
    assert pool.verify(3, KEY).status is Status.CORRUPT


def test_a_block_larger_than_a_part_is_refused(pool: HostPool) -> None:
    large = BlockMemory([[5000]], num_blocks=2)
    with pytest.raises(InvalidArgumentError, match="5000"):
        pool.write([0], [KEY], large.describe(0, [1]))


def test_a_tag_that_cannot_be_tells_no_place(pool: HostPool, memory: BlockMemory) -> None:
    write(pool, memory, part=0)
    stored = pool.stored([3])
    assert stored is not None
    assert stored[0].num_bytes == memory.chunk_size_bytes(0)
    for start, stop in ((0, 1 << 40), (5, 5), (1 << 63, 8)):
        pool._tags[3, 0] = (1, start, stop, 0)
        assert pool.stored([3]) is None
