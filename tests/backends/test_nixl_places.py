"""Places: only whole blocks are read where a lookup found them, and only where a holder has any."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvxfer.backends.nixl.places import MAX_FRAGMENTS, Places
from kvxfer.backends.nixl.wire.messages import Extents, Found
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys

ADDRESS = 1 << 20
SIZE = 256
KEYS = make_keys(1)


@pytest.fixture
def places() -> Places:
    return Places(Regions([(ADDRESS, 8 * SIZE)]))


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


@pytest.mark.parametrize(("size", "start"), [(SIZE - 1, 0), (SIZE - 1, 1), (SIZE, 1)])
def test_a_part_of_what_was_stored_has_no_checksum_and_so_no_place(
    places: Places, size: int, start: int
) -> None:
    places.note(KEYS, found([(True, 0)]))
    assert places.take(KEYS, wanted(1, size, start)) is None


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
def test_an_answer_that_cannot_be_is_refused_and_changes_nothing(
    places: Places, answer: Found, shown: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=shown):
        places.note(KEYS, answer)
    assert len(places) == 0
