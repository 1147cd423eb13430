"""Host pool: a slot gives back the bytes that were written for its key, or none."""

from collections.abc import Iterator

import pytest

from kvxfer.backends.host import HostPool, MemoryIntegrity, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

KEY, OTHER = make_block_key(b"one", 0), make_block_key(b"other", 0)
SLOT, NUM_PARTS = 3, 2
MEMORY = BlockMemory([[1000, 24]], num_blocks=8, blocks_per_chunk=2)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    shape = PoolShape(num_slots=4, num_parts=NUM_PARTS, part_size_bytes=4096)
    engine = CPUCopyEngine(num_threads=1)
    pool = HostPool(shape, MEMORY.namespace(), engine, integrity=MemoryIntegrity.FULL)
    yield pool
    pool.close()


def write(pool: HostPool, *, part: int, first_block_index: int = 0) -> bytes:
    blocks = MEMORY.describe(0, [1, 2][first_block_index:], first_block_index=first_block_index)
    payload = make_payload(KEY, int(blocks.block_sizes[0]), version=part)
    write_payloads(blocks, [payload])
    pool.write([SLOT], [KEY], blocks, part=part)
    return payload


def read(
    pool: HostPool, key: BlockKey = KEY, *, part: int = 0, blocks: Descriptors | None = None
) -> tuple[Outcome, bytes]:
    """Read a part of the slot; what is not done must write nothing."""
    blocks = MEMORY.describe(0, [5, 6]) if blocks is None else blocks
    before = MEMORY.snapshot()
    [outcome] = pool.read([SLOT], [key], blocks, part=part)
    assert outcome.done or MEMORY.snapshot() == before
    return outcome, read_payloads(blocks)[0]


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("offset", [0, 1023, 2047])
def test_each_part_gives_back_its_own_bytes_or_says_that_they_changed(
    pool: HostPool, part: int, offset: int
) -> None:
    payloads = [write(pool, part=each) for each in range(NUM_PARTS)]
    assert [read(pool, part=each)[1] for each in range(NUM_PARTS)] == payloads
    assert read(pool, OTHER, part=part)[0].status is Status.MISSING
    pool.slots[SLOT][part, offset] ^= 0x10
    assert pool.verify(SLOT, KEY).status is Status.CORRUPT
    assert read(pool, part=part)[0].status is Status.CORRUPT
    assert read(pool, part=1 - part) == (Outcome(Status.DONE), payloads[1 - part])


def test_bytes_that_were_never_stored_are_a_miss(pool: HostPool) -> None:
    write(pool, part=0, first_block_index=1)
    assert read(pool)[0].status is Status.MISSING
    assert read(pool, blocks=MEMORY.describe(0, [6], first_block_index=1))[0].done
    assert pool.verify(SLOT, KEY).status is Status.MISSING


def test_a_tag_that_cannot_be_tells_no_place(pool: HostPool) -> None:
    write(pool, part=0)
    assert pool.stored([SLOT]) is not None
    for start, stop in ((0, 1 << 40), (5, 5), (1 << 63, 8)):
        pool._tags[SLOT, 0] = (1, start, stop, 0)
        assert pool.stored([SLOT]) is None


async def test_keys_name_their_slot_and_are_checked_like_any_other() -> None:
    shape = PoolShape(num_slots=4, num_parts=1, part_size_bytes=4096)
    pool = HostPool(shape, MEMORY.namespace(), CPUCopyEngine(num_threads=1))
    async with SlotMover(pool, part=0) as slots:
        blocks, target = MEMORY.describe(0, [1, 2, 3, 4]), MEMORY.describe(0, [6, 7, 0, 5])
        named = [slot_key(KEY, 2, 0), slot_key(OTHER, 0, 0)]
        payloads = [make_payload(key, MEMORY.chunk_size_bytes(0)) for key in (KEY, OTHER)]
        write_payloads(blocks, payloads)
        assert all(outcome.done for outcome in await slots.store(named, blocks))
        swapped = [slot_key(OTHER, 2, 0), slot_key(OTHER, 0, 0)]
        outcomes = await slots.load(swapped, target)
        assert [outcome.status for outcome in outcomes] == [Status.MISSING, Status.DONE]
        assert read_payloads(target)[1] == payloads[1]
    for move in (slots.load, slots.store):
        with pytest.raises(ClosedError):
            await move(named, blocks)
