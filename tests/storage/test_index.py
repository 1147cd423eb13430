"""BlockIndex: its order of eviction, and what it refuses."""

import pytest

from kvxfer.errors import DuplicateError, InvalidArgumentError
from kvxfer.storage.eviction.policies import ARC, LRU
from kvxfer.storage.index import BlockIndex, BlockState
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


def test_an_index_without_slots_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_slots is 0"):
        BlockIndex(0, LRU(0))


def test_the_tail_of_a_prefix_is_evicted_before_its_head(index: BlockIndex) -> None:
    plan = index.begin_store([A, B, C, D])
    index.finish_store(plan.keys, stored=True)
    assert store(index, E) == [D]


def test_storing_a_prefix_again_leaves_its_tail_as_the_first_to_go(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    assert index.begin_store([A, B, C, D]).present == [A, B, C, D]
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


def test_touching_a_prefix_leaves_its_tail_as_the_first_to_go(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    index.touch([A, B, C, D, F])
    assert store(index, E) == [D]


def test_a_batch_that_does_not_fit_is_accepted_up_to_where_it_fits(index: BlockIndex) -> None:
    store(index, A, B)
    index.pin([A])
    plan = index.begin_store([C, D, B, E, F])
    assert (plan.keys, plan.present, plan.refused) == ([C, D], [B], [E, F])
    assert plan.evicted == []


def test_a_key_twice_in_a_batch_is_refused_and_changes_nothing(index: BlockIndex) -> None:
    with pytest.raises(DuplicateError):
        index.begin_store([A, B, A])
    assert len(index) == 0
    index.begin_store([A])
    with pytest.raises(DuplicateError):
        index.finish_store([A, A], stored=False)
    assert index.state(A) is BlockState.STORING
