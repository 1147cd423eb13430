"""BlockIndex: each of its rules, in a case of its own."""

import pytest

from kvxfer.errors import BlockStateError, DuplicateError, InvalidArgumentError
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


def test_a_key_goes_from_absent_through_storing_and_ready_to_loading(index: BlockIndex) -> None:
    states = [index.state(A)]
    plan = index.begin_store([A])
    states.append(index.state(A))
    index.finish_store([A], stored=True)
    states.append(index.state(A))
    assert index.pin([A]) == plan.slots == [index.slot_of(A)]
    states.append(index.state(A))
    index.unpin([A])
    states.append(index.state(A))
    ready = BlockState.READY
    assert states == [None, BlockState.STORING, ready, BlockState.LOADING, ready]


def test_free_slots_are_given_out_before_anything_is_evicted(index: BlockIndex) -> None:
    plan = index.begin_store([A, B, C])
    assert plan.keys == [A, B, C]
    assert plan.slots == [0, 1, 2]
    assert (plan.evicted, plan.refused, plan.present) == ([], [], [])
    assert (len(index), index.num_free_slots, index.num_evictable) == (3, 1, 0)


def test_a_full_index_evicts_the_block_used_the_longest_time_ago(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    slot = index.slot_of(A)
    plan = index.begin_store([E])
    assert (plan.keys, plan.slots, plan.evicted) == ([E], [slot], [A])
    assert A not in index


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


def test_a_pinned_block_is_never_evicted(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    index.pin([A, B, C, D])
    assert index.begin_store([E]).refused == [E]
    index.unpin([C])
    assert index.begin_store([E]).evicted == [C]


def test_a_block_that_is_being_stored_is_never_evicted(index: BlockIndex) -> None:
    index.begin_store([A, B, C, D])
    assert index.begin_store([E]).refused == [E]


def test_storing_counts_as_a_use_of_what_is_present(index: BlockIndex) -> None:
    store(index, A, B, C, D)
    assert index.begin_store([A]).present == [A]
    assert store(index, E) == [B]


def test_a_dropped_store_frees_its_slot(index: BlockIndex) -> None:
    plan = index.begin_store([A])
    index.finish_store([A], stored=False)
    assert A not in index
    assert index.num_free_slots == NUM_SLOTS
    assert index.begin_store([B]).slots == plan.slots


def test_finishing_what_is_not_being_stored_changes_nothing(index: BlockIndex) -> None:
    store(index, A)
    index.begin_store([B])
    for wrong, state in ((A, "ready"), (C, None)):
        with pytest.raises(BlockStateError, match=wrong.hex()) as caught:
            index.finish_store([B, wrong], stored=True)
        assert (caught.value.key, caught.value.state) == (wrong, state)
        assert caught.value.expected == "storing"
    assert index.state(B) is BlockState.STORING


def test_a_key_twice_in_a_batch_is_refused_and_changes_nothing(index: BlockIndex) -> None:
    with pytest.raises(DuplicateError):
        index.begin_store([A, B, A])
    assert len(index) == 0
    index.begin_store([A])
    with pytest.raises(DuplicateError):
        index.finish_store([A, A], stored=False)
    assert index.state(A) is BlockState.STORING


def test_pinning_what_cannot_be_read_pins_nothing(index: BlockIndex) -> None:
    store(index, A)
    index.begin_store([B])
    for wrong in (B, C):
        with pytest.raises(BlockStateError):
            index.pin([A, wrong])
    assert index.state(A) is BlockState.READY
    assert index.num_evictable == 1


def test_a_block_is_evictable_only_when_its_last_pin_is_gone(index: BlockIndex) -> None:
    store(index, A)
    index.pin([A])
    index.pin([A, A])
    index.unpin([A])
    index.unpin([A])
    assert (index.state(A), index.num_evictable) == (BlockState.LOADING, 0)
    index.unpin([A])
    assert (index.state(A), index.num_evictable) == (BlockState.READY, 1)


def test_letting_go_more_than_was_pinned_changes_nothing(index: BlockIndex) -> None:
    store(index, A, B)
    index.pin([A])
    for wrong in ([A, A], [A, B], [A, C]):
        with pytest.raises(BlockStateError, match="expected pinned"):
            index.unpin(wrong)
    assert index.state(A) is BlockState.LOADING


def test_the_slot_of_an_absent_key_is_a_lookup_error(index: BlockIndex) -> None:
    with pytest.raises(LookupError, match=f"block {A.hex()} is absent"):
        index.slot_of(A)


def test_remove_drops_only_what_is_ready_and_not_pinned(index: BlockIndex) -> None:
    store(index, A, B)
    index.pin([B])
    index.begin_store([C])
    assert index.remove([A, A, B, C, D]) == [A]
    assert index.keys() == [B, C]
    assert (index.num_free_slots, index.num_evictable) == (2, 0)


def test_a_quarantined_block_is_invisible_at_once_and_frees_its_slot(index: BlockIndex) -> None:
    store(index, A)
    index.quarantine(A)
    assert (index.state(A), A in index, index.num_free_slots) == (None, False, NUM_SLOTS)


def test_a_quarantined_slot_is_free_only_when_its_last_reader_is_gone(index: BlockIndex) -> None:
    store(index, A)
    [corrupt_slot] = index.pin([A])
    index.pin([A])
    index.quarantine(A)
    index.unpin([A])
    plan = index.begin_store([A, B, C, D])
    assert plan.refused == [D]
    assert corrupt_slot not in plan.slots
    index.unpin([A])
    assert index.begin_store([D]).slots == [corrupt_slot]


def test_a_new_block_of_a_quarantined_key_stays_until_both_are_let_go(index: BlockIndex) -> None:
    store(index, A)
    index.pin([A])
    index.quarantine(A)
    store(index, A)
    index.pin([A])
    index.unpin([A])  # the old reader or the new one: the key does not say
    assert (index.state(A), index.num_free_slots) == (BlockState.LOADING, NUM_SLOTS - 2)
    index.unpin([A])
    assert (index.state(A), index.num_free_slots) == (BlockState.READY, NUM_SLOTS - 1)


def test_two_corrupt_blocks_of_one_key_are_both_kept_for_their_readers(index: BlockIndex) -> None:
    for _ in range(2):
        store(index, A)
        index.pin([A])
        index.quarantine(A)
    assert index.num_free_slots == NUM_SLOTS - 2
    index.unpin([A, A])
    assert index.num_free_slots == NUM_SLOTS


def test_quarantine_spares_a_block_that_is_being_stored_again(index: BlockIndex) -> None:
    index.quarantine(A)
    index.begin_store([A])
    index.quarantine(A)
    assert index.state(A) is BlockState.STORING


def test_clear_forgets_everything_and_begins_a_new_generation(index: BlockIndex) -> None:
    store(index, A, B)
    index.pin([A])
    index.quarantine(A)
    index.begin_store([C])
    index.clear()
    assert (len(index), index.num_free_slots, index.num_evictable) == (0, NUM_SLOTS, 0)
    assert index.generation == 1
    with pytest.raises(BlockStateError):
        index.unpin([A])
    assert sorted(index.begin_store([A, B, C, D]).slots) == [0, 1, 2, 3]
