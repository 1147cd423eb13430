"""The suite and the state machine catch backends that are wrong, each by the test for it."""

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, MISSING, Backend, Outcome, Status
from kvxfer.storage.door import Door
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests, DictBackend, DictConfig
from kvxfer.testing.payloads import copy_blocks, flip_bit, read_payloads, write_payloads


class Unordered(DictBackend):
    """Returns outcomes and answers in the order of the keys' bytes."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await super().lookup(sorted(keys))


class Overrunning(DictBackend):
    """Writes whole pages, padding included."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        last = int(blocks.addresses[-1] + blocks.lengths[-1])
        padding = Descriptors(
            np.array([last], np.uint64),
            np.ones(1, np.uint64),
            np.array([0, 1]),
            np.zeros(1, np.int64),
            blocks.device,
        )
        write_payloads(padding, [b"!"])
        return outcomes


class Scribbling(DictBackend):
    """Clears the memory of a block that is not there."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        for index, outcome in enumerate(outcomes):
            if outcome is MISSING:
                block = blocks.select(index, index + 1)
                write_payloads(block, [bytes(block.num_bytes)])
        return outcomes


class Overwriting(DictBackend):
    """Replaces the bytes of a present key."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if blocks.num_blocks == len(keys) and not self._door.closed:
            for key in keys:
                self._blocks.pop(key, None)
        return await super().store(keys, blocks)


class Shadowing(DictBackend):
    """Keeps what is there of a chunk, whatever part of it."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        new = [index for index, key in enumerate(keys) if key not in self._blocks]
        if new:
            await super().store([keys[index] for index in new], blocks.take(new))
        return [DONE] * len(keys)


class Groupless(DictBackend):
    """Forgets which group a key belongs to."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        deleted = await super().delete(keys)
        for key in keys:
            self._blocks.pop(BlockKey(key[:-1] + bytes([key[-1] ^ 1])), None)
        return deleted


class Headless(DictBackend):
    """Ignores where in a chunk a block belongs."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        blocks.payload_starts[:] = 0
        return await super().load(keys, blocks)


class Trusting(DictBackend):
    """Does not look at the batch before it moves it."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._door = OpenDoor("trusting backend")


class OpenDoor(Door):
    """Lets everything in, always."""

    def check(self) -> None:
        pass

    def check_batch(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        pass


class Shared(DictBackend):
    """Keeps the blocks of all namespaces in one place."""

    everything: ClassVar[dict[BlockKey, object]] = {}

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._blocks = self.everything  # type: ignore[assignment]


class Hoarding(DictBackend):
    """Keeps every descriptor it was given."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.hoard: list[Descriptors] = []

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.hoard.append(blocks)
        return await super().load(keys, blocks)


class Racing(DictBackend):
    """Loads whatever one key holds when another task came in between."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.latest = blocks
        await asyncio.sleep(0)
        return await super().load(keys, self.latest if len(self.latest) == len(blocks) else blocks)


class Rigid(DictBackend):
    """Loads only into as many fragments as there were."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._num_fragments = 0

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self._num_fragments = len(blocks)
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if len(blocks) != self._num_fragments:
            return [Outcome(Status.FAILED, reason="another shape")] * len(keys)
        return await super().load(keys, blocks)


class Abandoning(DictBackend):
    """Leaves a task behind that goes on writing when its caller was cancelled."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._tasks: list[asyncio.Task[list[Outcome]]] = []

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self._tasks.append(asyncio.create_task(self._load_slowly(keys, blocks)))
        return await asyncio.shield(self._tasks[-1])

    async def _load_slowly(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().load(keys, blocks)

    async def aclose(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().aclose()


class Busy(DictBackend):
    """Refuses a block that another task is storing."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._busy: set[BlockKey] = set()

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if self._busy & set(keys):
            return [Outcome(Status.FAILED, reason="busy")] * len(keys)
        self._busy |= set(keys)
        outcomes = await super().store(keys, blocks)
        self._busy -= set(keys)
        return outcomes


class Underfoot(DictBackend):
    """Reuses the memory of a deleted block that somebody is loading."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        found = [self._blocks.get(key) for key in keys]
        await asyncio.sleep(0)
        for index, stored in enumerate(found):
            if stored is not None:
                write_payloads(blocks.select(index, index + 1), [stored.payload])
        return [MISSING if stored is None else DONE for stored in found]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        for key in self._blocks.keys() & set(keys):
            stored = self._blocks[key]
            stored.payload = bytes(len(stored.payload))
        return await super().delete(keys)


class Boasting(DictBackend):
    """Says that it removed what was not there."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        await super().delete(keys)
        return [True] * len(keys)


class Disorderly(DictBackend):
    """Says what it removed in an order of its own."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return sorted(await super().delete(keys), reverse=True)


class Tearing(DictBackend):
    """Makes blocks visible before their bytes are there."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        half = copy_blocks(blocks)
        write_payloads(half, [bytes(len(payload)) for payload in read_payloads(half)])
        absent = [key for key in keys if key not in self._blocks]
        outcomes = await super().store(keys, half)
        await asyncio.sleep(0)
        for key in absent:
            self._blocks.pop(key, None)
        return await super().store(keys, blocks) if absent else outcomes


class Unchecked(DictBackend):
    """Loads what the medium returns."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        return [DONE if outcome.status is Status.CORRUPT else outcome for outcome in outcomes]


class Forgetful(DictBackend):
    """Loses the block that was stored first when there are four."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().store(keys, blocks)
        if len(self._blocks) > 3:
            del self._blocks[next(iter(self._blocks))]
        return outcomes


class Boundless(DictBackend):
    """Takes no notice of its bound."""

    def _make_room(self, batch: Sequence[BlockKey]) -> bool:
        return True


class BitFlipping(DictBackend):
    """Flips a bit of the last block it loads."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        if outcomes[-1].done:
            flip_bit(blocks, len(keys) - 1, 1234)
        return outcomes


CAUGHT_BY = [
    (Unordered, "test_lookup_answers_in_the_order_of_the_keys"),
    (Overrunning, "test_a_load_writes_nothing_but_its_blocks"),
    (Scribbling, "test_a_miss_is_an_outcome_and_leaves_memory_untouched"),
    (Scribbling, "test_of_a_partly_missing_batch_the_rest_is_loaded"),
    (Overwriting, "test_storing_a_present_key_is_done_and_keeps_the_old_bytes"),
    (Shadowing, "test_a_store_of_more_than_is_there_replaces_it"),
    (Overwriting, "test_a_store_of_less_than_is_there_changes_nothing"),
    (Shadowing, "test_of_two_parts_that_lie_apart_the_last_one_is_there"),
    (Scribbling, "test_of_a_part_asked_as_a_whole_no_memory_is_written"),
    (Busy, "test_tasks_that_store_a_part_and_the_whole_both_learn_what_is_there"),
    (Groupless, "test_blocks_of_two_groups_go_in_one_batch"),
    (Headless, "test_either_end_of_a_stored_chunk_can_be_loaded_alone"),
    (Headless, "test_a_chunk_stored_without_its_head_never_passes_for_a_whole_one"),
    (Forgetful, "test_what_was_stored_is_loaded_bit_for_bit"),
    (BitFlipping, "test_what_was_stored_is_loaded_bit_for_bit"),
    (Boasting, "test_a_deleted_block_is_gone_and_can_be_stored_anew"),
    (Disorderly, "test_a_deleted_block_is_gone_and_can_be_stored_anew"),
    (Underfoot, "test_deleting_a_block_in_use_does_not_harm_who_uses_it"),
    (Rigid, "test_a_block_may_be_stored_from_one_shape_and_loaded_into_another"),
    (Trusting, "test_a_batch_that_cannot_be_is_refused_and_nothing_moves"),
    (Trusting, "test_a_closed_backend_says_so_and_may_be_closed_again"),
    (Shared, "test_namespaces_never_see_each_other"),
    (Hoarding, "test_descriptors_are_forgotten_when_the_call_is_over"),
    (Racing, "test_many_tasks_at_once_never_get_wrong_bytes"),
    (Busy, "test_two_tasks_that_store_one_key_both_learn_that_it_is_there"),
    (Abandoning, "test_memory_is_quiet_after_a_cancelled_load"),
    (Tearing, "test_a_cancelled_store_keeps_whole_blocks_or_none"),
    (Unchecked, "test_corrupt_bytes_are_reported_once_and_then_a_miss"),
    (Boundless, "test_a_full_backend_evicts_and_never_exceeds_its_bound"),
    (Boundless, "test_a_batch_that_does_not_fit_is_stored_up_to_where_it_fits"),
]


class SuiteOf(BackendTests):
    """The suite, run on a backend that should not pass it."""

    max_blocks = 5

    def __init__(self, backend_type: type[DictBackend]) -> None:
        self.backend_type = backend_type

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self.backend_type(None, namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return self.backend_type(DictConfig(max_blocks=self.max_blocks), namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, DictBackend)
        backend.corrupt(key)


@pytest.mark.parametrize(("backend_type", "test"), CAUGHT_BY)
async def test_the_suite_catches_a_wrong_backend(
    backend_type: type[DictBackend], test: str
) -> None:
    with pytest.raises((AssertionError, ExceptionGroup, pytest.fail.Exception)):
        await getattr(SuiteOf(backend_type), test)()


def test_every_test_of_the_suite_catches_something() -> None:
    needs_a_medium = {"test_what_was_stored_outlives_the_backend"}  # see test_dict_backend.py
    tests = {name for name in dir(BackendTests) if name.startswith("test_")}
    assert {test for _, test in CAUGHT_BY} == tests - needs_a_medium


@pytest.mark.parametrize(
    "backend_type",
    [
        BitFlipping,
        Boasting,
        Disorderly,
        Forgetful,
        Groupless,
        Headless,
        Overrunning,
        Overwriting,
        Scribbling,
        Unordered,
    ],
)
@pytest.mark.property
def test_the_state_machine_catches_a_wrong_backend(backend_type: type[DictBackend]) -> None:
    class Machine(BackendStateMachine):
        async def make_backend(self, namespace: Namespace) -> Backend:
            return backend_type(None, namespace)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=200, database=None, phases=[Phase.generate], print_blob=False
            ),
        )


async def test_a_suite_that_cannot_corrupt_skips_and_says_so() -> None:
    class Incorruptible(SuiteOf):
        corrupt = BackendTests.corrupt

    with pytest.raises(pytest.skip.Exception, match="Incorruptible cannot corrupt"):
        await Incorruptible(DictBackend).test_corrupt_bytes_are_reported_once_and_then_a_miss()
