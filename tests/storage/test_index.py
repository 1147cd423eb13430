"""BlockIndex: which block of a prefix it evicts first."""

import pytest

from kvxfer.storage.eviction.policies import ARC, LRU
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import BlockKey, make_block_key

NUM_SLOTS = 4


def key(number: int) -> BlockKey:
    return make_block_key(number.to_bytes(8, "big"), 0)


A, B, C, D, E, F = (key(number) for number in range(6))


@pytest.fixture(params=[LRU, ARC])
def index(request: pytest.FixtureRequest) -> BlockIndex:
    return BlockIndex(NUM_SLOTS, request.param(NUM_SLOTS))


def store(index: BlockIndex, *keys: BlockKey) -> list[BlockKey]:
    """Store keys one by one, the first one first; return what was evicted."""
    evicted = []
    for wanted in keys:
        plan = index.begin_store([wanted])
        index.finish_store(plan.keys, stored=True)
        evicted += plan.evicted
    return evicted


def test_the_tail_of_a_prefix_is_evicted_before_its_head(index: BlockIndex) -> None:
    plan = index.begin_store([A, B, C, D])
    index.finish_store(plan.keys, stored=True)
    assert store(index, E) == [D]


@pytest.mark.parametrize("order", [[A, B, C, D], [D, C, B, A], [C, A, D, B]])
def test_a_used_prefix_has_its_tail_evicted_first_in_whatever_order_it_is_unpinned(
    index: BlockIndex, order: list[BlockKey]
) -> None:
    store(index, A, B, C, D)
    index.pin([A, B, C, D])
    index.touch([A, B, C, D])
    index.unpin(order)
    assert store(index, E) == [D]


def test_a_pin_is_not_a_use(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    index.pin([A, B])
    index.unpin([B, A])
    assert store(index, E, F) == [A, B]
