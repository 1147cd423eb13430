"""Places: blocks are read where a lookup found them, and verified."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl.places import MAX_FRAGMENTS, Places
from kvxfer.backends.nixl.wire.messages import Extents, Found
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts, LentBlocks
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import read_payloads, write_payloads
from tests.backends.nixl_pair import KEYS, Pair, open_pair

ADDRESS = 1 << 20
SIZE = 256


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[list[BlockKey]]:
    """Keys of everything that holders lent."""
    asked: list[list[BlockKey]] = []
    original = HostBackend.lend

    def lend(
        self: HostBackend, wanted: BlockParts, *, fenced: bool = False
    ) -> AbstractAsyncContextManager[LentBlocks]:
        asked.append(list(wanted.keys))
        return original(self, wanted, fenced=fenced)

    monkeypatch.setattr(HostBackend, "lend", lend)
    return asked


async def load(pair: Pair, keys: Sequence[BlockKey]) -> tuple[list[Status], list[bytes]]:
    target = pair.memory.describe(0, range(8, 8 + len(keys)))
    canaries = [b"\x5a" * int(size) for size in target.block_sizes]
    write_payloads(target, canaries)
    return statuses(await pair.client.load(list(keys), target)), read_payloads(target)


async def test_what_a_lookup_found_is_read_without_asking_again(pins: list[list[BlockKey]]) -> None:
    async with open_pair() as pair:
        absent = make_keys(1, first=90)
        assert await pair.client.lookup([*KEYS, *absent]) == [True] * 4 + [False]
        assert await load(pair, KEYS) == ([Status.DONE] * 4, pair.payloads)
        assert not pins


@pytest.mark.parametrize("grade", ["full", "fenced"])
async def test_a_block_whose_place_was_taken_is_not_called_missing_as_its_memory_was_written(
    pins: list[list[BlockKey]], grade: str
) -> None:
    async with open_pair(integrity=grade) as pair:
        await pair.client.lookup(KEYS)
        await pair.holder.delete([KEYS[2]])
        await store_generated(pair.client, make_keys(1, first=50), pair.memory.describe(0, [12]))
        seen, read = await load(pair, KEYS)
        assert seen == [Status.DONE, Status.DONE, Status.FAILED, Status.DONE]
        assert [read[index] for index in (0, 1, 3)] == [pair.payloads[i] for i in (0, 1, 3)]
        assert pins == [[KEYS[2]]]


async def test_a_block_that_was_deleted_is_missing_although_its_bytes_are_still_there(
    pins: list[list[BlockKey]],
) -> None:
    async with open_pair() as pair:
        await pair.client.lookup(KEYS)
        assert await pair.client.delete(KEYS[:1]) == [True]
        seen, [read] = await load(pair, KEYS[:1])
        assert seen == [Status.MISSING]
        assert read == b"\x5a" * len(read), "a missing block was written"
        assert pins == [KEYS[:1]]


def found(rows: Sequence[tuple[bool, int]], **fields: object) -> Found:
    """Make the answer to a lookup: blocks that are there or not, at some offset."""
    offsets = np.array([offset for there, offset in rows if there], np.uint64)
    extents = Extents(
        regions=np.zeros(len(offsets), np.uint32).tobytes(),
        offsets=offsets.tobytes(),
        lengths=np.full(len(offsets), SIZE, np.uint64).tobytes(),
        block_offsets=np.arange(len(offsets) + 1).tobytes(),
    )
    answer: dict[str, object] = {
        "there": [there for there, _ in rows],
        "starts": [0] * len(offsets),
        "checksums": list(range(len(offsets))),
        "extents": extents,
    }
    return Found(request_id=1, **(answer | fields))  # type: ignore[arg-type]


def empty_places(num_blocks: int = 8, **limits: int) -> Places:
    return Places(Regions([(ADDRESS, num_blocks * SIZE)]), **limits)


def wanted(num_blocks: int, size: int = SIZE, start: int = 0) -> Descriptors:
    memory = BlockMemory([[SIZE]], num_blocks=num_blocks)
    blocks = memory.describe(0, range(num_blocks))
    return Descriptors(
        addresses=blocks.addresses,
        lengths=np.full(num_blocks, size, np.uint64),
        block_offsets=blocks.block_offsets,
        payload_starts=np.full(num_blocks, start, np.int64),
        device=blocks.device,
        owners=(memory,),
    )


def test_places_are_those_of_the_keys_that_were_there() -> None:
    places = empty_places()
    places.note(KEYS[:3], found([(True, SIZE), (False, 0), (True, 5 * SIZE)]))
    assert places.take([KEYS[1]], wanted(1)) is None
    taken = places.take([KEYS[2], KEYS[0]], wanted(2))
    assert taken is not None
    blocks, checksums = taken
    assert blocks.addresses.tolist() == [ADDRESS + 5 * SIZE, ADDRESS + SIZE]
    assert blocks.lengths.tolist() == [SIZE] * 2
    assert checksums == [1, 0]
    assert len(places) == 0


@pytest.mark.parametrize(("size", "start"), [(SIZE - 1, 0), (SIZE - 1, 1), (SIZE, 1)])
def test_a_part_of_what_was_stored_has_no_checksum_and_so_no_place(size: int, start: int) -> None:
    places = empty_places()
    places.note(KEYS[:1], found([(True, 0)]))
    assert places.take(KEYS[:1], wanted(1, size, start)) is None


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (found([(True, 8 * SIZE)]), "region"),
        (found([(True, 0)], starts=[]), r"\(1, 0\)"),
        (found([(True, 0)], checksums=[1, 2]), "checksums is 2"),
        (found([(True, 0)], there=[False]), "0 blocks"),
        (found([(True, 0)] * (MAX_FRAGMENTS + 1)), "fragments is 65537"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_changes_nothing(answer: Found, shown: str) -> None:
    places = empty_places()
    with pytest.raises(InvalidArgumentError, match=shown):
        places.note(KEYS[:1], answer)
    assert len(places) == 0
