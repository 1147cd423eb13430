"""Conformance suite: it catches each faulty backend, and the backends for tests pass it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import xxhash

from kvxfer import Backend, BlockKey, Descriptors, Namespace, Outcome, Status, make_block_key
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import DONE, MISSING, WrappingBackend
from kvxfer.storage.call_guard import CallGuard
from kvxfer.testing import (
    BackendStateMachine,
    BackendTests,
    BlockMemory,
    DictBackend,
    DictConfig,
    Fault,
    FaultRates,
    FaultyBackend,
    InjectedFault,
    Operation,
    WrapperTests,
    backend_tests,
)
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import (
    copy_blocks,
    flip_bit,
    make_payload,
    read_payloads,
    write_payloads,
)
from tests.examples import examples


class Unordered(DictBackend):
    """Faulty backend that returns outcomes and answers in the order of the keys' bytes."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await super().lookup(sorted(keys))


class Windowed(DictBackend):
    """Faulty backend that stores 16 blocks at a time, and always the first 16."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if blocks.num_blocks == len(keys) > 16:
            blocks = blocks.take([index % 16 for index in range(len(keys))])
        return await super().store(keys, blocks)


class Overrunning(DictBackend):
    """Faulty backend that writes whole pages, padding included."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        last = int(blocks.addresses[-1] + blocks.lengths[-1])
        write_payloads(Descriptors.of_pieces(np.array([last], np.uint64), [1]), [b"!"])
        return outcomes


class Scribbling(DictBackend):
    """Faulty backend that clears the memory of a missing block."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        for index, outcome in enumerate(outcomes):
            if outcome is MISSING:
                block = blocks.select(index, index + 1)
                write_payloads(block, [bytes(block.num_bytes)])
        return outcomes


class Overwriting(DictBackend):
    """Faulty backend that replaces the bytes of a present key."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if blocks.num_blocks == len(keys) and not self._guard.closed:
            for key in keys:
                self._blocks.pop(key, None)
        return await super().store(keys, blocks)


class Shadowing(DictBackend):
    """Faulty backend that keeps a present chunk, whatever part of it is there."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        new = [index for index, key in enumerate(keys) if key not in self._blocks]
        if new:
            await super().store([keys[index] for index in new], blocks.take(new))
        return [DONE] * len(keys)


class Groupless(DictBackend):
    """Faulty backend that ignores the group of a key."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        deleted = await super().delete(keys)
        for key in keys:
            self._blocks.pop(BlockKey(key[:-1] + bytes([key[-1] ^ 1])), None)
        return deleted


class Saltless(DictBackend):
    """Faulty backend that identifies blocks by their place in a prompt, whatever its salt."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await super().lookup(make_keys(len(keys)))

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return await super().store(make_keys(len(keys)), blocks)


class Sweeping(DictBackend):
    """Faulty backend that purges all blocks, whatever the prefix."""

    async def purge(self, prefix: bytes = b"") -> None:
        self._blocks.clear()


class Headless(DictBackend):
    """Faulty backend that ignores the place of a block in its chunk."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        blocks.payload_starts[:] = 0
        return await super().load(keys, blocks)


class Trusting(DictBackend):
    """Faulty backend that does not check a batch before it moves it."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._guard = NoGuard("trusting backend")


class NoGuard(CallGuard):
    def check(self) -> None:
        pass

    def check_batch(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        pass


class Shared(DictBackend):
    """Faulty backend that keeps the blocks of all namespaces in one place."""

    everything: ClassVar[dict[BlockKey, object]] = {}

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self._blocks = self.everything  # type: ignore[assignment]


class Hoarding(DictBackend):
    """Faulty backend that keeps every descriptor."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.hoard: list[Descriptors] = []

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.hoard.append(blocks)
        return await super().load(keys, blocks)


class Racing(DictBackend):
    """Faulty backend that loads into another task's memory when one comes in between."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.latest = blocks
        await asyncio.sleep(0)
        return await super().load(keys, self.latest if len(self.latest) == len(blocks) else blocks)


class Rigid(DictBackend):
    """Faulty backend that loads only into as many fragments as were stored."""

    _num_fragments = 0

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self._num_fragments = len(blocks)
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if len(blocks) != self._num_fragments:
            return [Outcome(Status.FAILED, reason="another shape")] * len(keys)
        return await super().load(keys, blocks)


class Abandoning(DictBackend):
    """Faulty backend whose task goes on writing after its caller was cancelled."""

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
    """Faulty backend that refuses a block that another task is storing."""

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
    """Faulty backend that reuses the memory of a deleted block while a task loads it."""

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
    """Faulty backend that reports missing blocks as deleted."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        await super().delete(keys)
        return [True] * len(keys)


class Tearing(DictBackend):
    """Faulty backend that makes blocks visible before their bytes are there."""

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
    """Faulty backend that does not verify loaded bytes."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        return [DONE if outcome.status is Status.CORRUPT else outcome for outcome in outcomes]


class Boundless(DictBackend):
    """Faulty backend that ignores its bound."""

    def _make_room(self, batch: Sequence[BlockKey]) -> bool:
        return True


class BitFlipping(DictBackend):
    """Faulty backend that flips a bit of the last block of a load."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        if outcomes[-1].done:
            flip_bit(blocks, len(keys) - 1, 1234)
        return outcomes


class Impatient(DictBackend):
    """Faulty backend whose cancelled calls run on and return."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        try:
            return await super().load(keys, blocks)
        except asyncio.CancelledError:
            return [Outcome(Status.CANCELLED, reason="cancelled")] * len(keys)


class Resentful(DictBackend):
    """Faulty backend that keeps the descriptors of missing blocks."""

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.misses: list[Descriptors] = []

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        self.misses += [] if all(each.done for each in outcomes) else [blocks]
        return outcomes


class Waiting(DictBackend):
    """Faulty backend whose drain never returns."""

    async def drain(self) -> None:
        await asyncio.Event().wait()


class Repetitive(DictBackend):
    """Faulty backend that deletes a key twice."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._blocks.pop(key, None) is not None for key in keys]


class Staying(DictBackend):
    """Faulty backend whose task outlives it."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self._task = asyncio.create_task(asyncio.Event().wait())
        return await super().store(keys, blocks)


class Stranding(DictBackend):
    """Faulty backend whose loads never end once it was closed."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        await (asyncio.Event().wait() if self._guard.closed else asyncio.sleep(0))
        return outcomes


class CaseBlind(DictBackend):
    """Faulty backend whose names of blocks ignore case."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().store(keys, blocks)
        for key in keys:
            if key.swapcase() != key:
                self._blocks.pop(BlockKey(key.swapcase()), None)
        return outcomes


class Leaking(DictBackend):
    """Faulty backend in which a deleted block still counts."""

    _num_deleted = 0

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        deleted = await super().delete(keys)
        self._num_deleted += sum(deleted)
        return deleted

    def _make_room(self, batch: Sequence[BlockKey]) -> bool:
        is_lost = self._max_blocks is not None and self._num_deleted >= self._max_blocks
        return super()._make_room(batch) and not is_lost


class Evicting(DictBackend):
    """Faulty backend that evicts a block while a task loads it."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        there = [key in self._blocks for key in keys]
        outcomes = await super().load(keys, blocks)
        for index, key in enumerate(keys):
            if there[index] and key not in self._blocks:
                outcomes[index] = DONE
        return outcomes


class Partial(DictBackend):
    """Faulty backend that verifies whole chunks only."""

    def _load(self, key: BlockKey, block: Descriptors) -> Outcome:
        stored = self._blocks.get(key)
        if stored is not None and block.num_bytes < len(stored.payload):
            stored.checksum = xxhash.xxh3_64_intdigest(stored.payload)
        return super()._load(key, block)


CAUGHT_BY = [
    (Impatient, "test_memory_is_quiet_after_a_cancelled_load"),
    (Resentful, "test_descriptors_are_forgotten_when_the_call_is_over"),
    (Waiting, "test_a_closed_backend_raises_and_may_be_closed_again"),
    (Repetitive, "test_an_invalid_batch_is_refused_and_nothing_moves"),
    (Staying, "test_calls_end_when_their_backend_is_closed_and_nothing_is_left"),
    (Stranding, "test_calls_end_when_their_backend_is_closed_and_nothing_is_left"),
    (CaseBlind, "test_keys_that_look_alike_and_those_of_tenants_are_different_blocks"),
    (Leaking, "test_room_is_given_back_and_what_is_there_needs_none"),
    (Evicting, "test_a_block_that_is_evicted_while_it_is_loaded_is_whole_or_missing"),
    (Partial, "test_either_end_of_a_corrupt_chunk_is_never_wrong"),
    (Unordered, "test_lookup_answers_in_the_order_of_the_keys"),
    (Overrunning, "test_a_load_writes_nothing_but_its_blocks"),
    (Scribbling, "test_a_miss_is_an_outcome_and_leaves_memory_untouched"),
    (Overwriting, "test_storing_a_present_key_is_done_and_keeps_the_old_bytes"),
    (Shadowing, "test_of_two_parts_the_last_one_is_stored_where_it_has_more"),
    (Overwriting, "test_a_store_of_a_smaller_part_changes_nothing"),
    (Scribbling, "test_loading_the_whole_of_a_stored_part_writes_no_memory"),
    (Groupless, "test_blocks_of_two_groups_go_in_one_batch"),
    (Headless, "test_either_end_of_a_stored_chunk_can_be_loaded_alone"),
    (Headless, "test_a_chunk_stored_without_its_head_never_passes_for_a_whole_one"),
    (BitFlipping, "test_stored_blocks_are_loaded_bit_for_bit"),
    (Windowed, "test_stored_blocks_are_loaded_bit_for_bit"),
    (Boasting, "test_a_deleted_block_is_gone_and_can_be_stored_anew"),
    (Underfoot, "test_deleting_a_block_in_use_does_not_harm_its_reader"),
    (Rigid, "test_a_block_may_be_stored_from_one_shape_and_loaded_into_another"),
    (Trusting, "test_an_invalid_batch_is_refused_and_nothing_moves"),
    (Trusting, "test_a_closed_backend_raises_and_may_be_closed_again"),
    (Sweeping, "test_a_purge_takes_the_blocks_of_a_prefix_and_no_others"),
    (Saltless, "test_keys_that_look_alike_and_those_of_tenants_are_different_blocks"),
    (Shared, "test_namespaces_never_see_each_other"),
    (Hoarding, "test_descriptors_are_forgotten_when_the_call_is_over"),
    (Racing, "test_many_tasks_at_once_never_get_wrong_bytes"),
    (Busy, "test_concurrent_stores_of_one_key_are_all_done"),
    (Abandoning, "test_memory_is_quiet_after_a_cancelled_load"),
    (Tearing, "test_a_cancelled_store_keeps_whole_blocks_or_none"),
    (DictBackend, "test_stored_blocks_outlive_a_persistent_backend"),
    (Unchecked, "test_corrupt_bytes_are_reported_once_and_then_a_miss"),
    (Boundless, "test_a_full_backend_evicts_and_never_exceeds_its_bound"),
    (Boundless, "test_a_batch_that_does_not_fit_is_stored_up_to_where_it_fits"),
]


class TestDictBackend(BackendTests):
    max_blocks = 5
    backend_type: type[DictBackend] = DictBackend

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self.backend_type(None, namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return self.backend_type(DictConfig(max_blocks=self.max_blocks), namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, DictBackend)
        backend.corrupt(key)


class SuiteOf(TestDictBackend):
    """Conformance suite, run on a backend that must not pass it."""

    persistent = True

    def __init__(self, backend_type: type[DictBackend]) -> None:
        self.backend_type = backend_type


@pytest.mark.parametrize(("backend_type", "test"), CAUGHT_BY)
async def test_the_suite_catches_a_wrong_backend(
    backend_type: type[DictBackend], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_tests, "LIMIT_S", 0.1)
    with pytest.raises((AssertionError, ExceptionGroup, TimeoutError, pytest.fail.Exception)):
        await getattr(SuiteOf(backend_type), test)()


def test_every_test_of_the_suite_catches_something() -> None:
    needs_a_medium = "test_a_block_that_another_user_replaces_is_never_loaded_as_the_one_before"
    tests = {name for name in dir(BackendTests) if name.startswith("test_")}
    assert {test for _, test in CAUGHT_BY} == tests - {needs_a_medium}


Blocks = dict[BlockKey, Any]


class KeptBackend(DictBackend):
    """DictBackend that keeps the blocks of a namespace when it is closed."""

    outlives_process = True

    def __init__(self, shelf: dict[str, Blocks], namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self._blocks = shelf.setdefault(namespace.fingerprint, {})

    async def aclose(self) -> None:
        self._blocks = {}
        await super().aclose()


class TestKeptBackend(TestDictBackend):
    persistent = True

    @pytest.fixture(autouse=True)
    def _empty_shelf(self) -> None:
        self.shelf: dict[str, Blocks] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return KeptBackend(self.shelf, namespace)


@dataclass
class Shelf:
    """Places for blocks, which are reused."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    places: dict[BlockKey, int] = field(default_factory=dict)


class Remembering(DictBackend):
    """Faulty backend that loads whatever is now at the place where a lookup found a block."""

    def __init__(self, shelf: Shelf, namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self._shelf = shelf
        self._seen: dict[BlockKey, int] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        places = self._shelf.places
        self._seen |= {key: places[key] for key in keys if key in places}
        return [key in places for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        places = self._shelf.places
        for key, payload in zip(keys, read_payloads(blocks), strict=True):
            if key not in places:
                places[key] = next(at for at in range(99) if at not in places.values())
                self._shelf.payloads[places[key]] = payload
        return [DONE] * len(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await asyncio.sleep(0)
        found = [self._seen.get(key, self._shelf.places.get(key)) for key in keys]
        for index, place in enumerate(found):
            if place is not None:
                write_payloads(blocks.select(index, index + 1), [self._shelf.payloads[place]])
        return [MISSING if place is None else DONE for place in found]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._shelf.places.pop(key, None) is not None for key in keys]


async def test_the_suite_catches_a_backend_that_takes_a_block_for_the_one_before() -> None:
    shelf = Shelf()

    class Late(TestDictBackend):
        persistent = True
        max_blocks = None  # type: ignore[assignment]

        async def make_backend(self, namespace: Namespace) -> Backend:
            return Remembering(shelf, namespace)

    with pytest.raises(AssertionError, match="is wrong"):
        await Late().test_a_block_that_another_user_replaces_is_never_loaded_as_the_one_before()


class Lazy(KeptBackend):
    """Faulty backend whose blocks reach the medium only when it is closed."""

    def __init__(self, shelf: dict[str, Blocks], namespace: Namespace) -> None:
        super().__init__(shelf, namespace)
        self._medium, self._blocks = self._blocks, dict(self._blocks)

    async def aclose(self) -> None:
        self._medium |= self._blocks
        await super().aclose()


class Forgetful(Lazy):
    """Faulty backend that forgets deletions when it is opened again."""

    async def flush(self) -> None:
        self._medium |= self._blocks


@pytest.mark.parametrize("backend_type", [Lazy, Forgetful])
async def test_the_suite_catches_a_wrong_persistent_backend(
    backend_type: type[KeptBackend],
) -> None:
    shelf: dict[str, Blocks] = {}

    class Wrong(TestKeptBackend):
        async def make_backend(self, namespace: Namespace) -> Backend:
            return backend_type(shelf, namespace)

    with pytest.raises(AssertionError):
        await Wrong().test_stored_blocks_outlive_a_persistent_backend()


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
async def test_the_suite_catches_a_backend_that_ignores_a_field_of_the_namespace(
    field: str,
) -> None:
    shelf: dict[str, Blocks] = {}
    ignored = {field: getattr(Namespace(model="any"), field)}

    class Wrong(TestKeptBackend):
        async def make_backend(self, namespace: Namespace) -> Backend:
            return KeptBackend(shelf, msgspec.structs.replace(namespace, **ignored))

    with pytest.raises(AssertionError, match=f"{field} is not part of it"):
        await Wrong().test_namespaces_never_see_each_other()


class Careless(WrappingBackend):
    """Faulty wrapper that reports all memory as safe."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        return [replace(outcome, memory_safe=True) for outcome in outcomes]


class Hasty(WrappingBackend):
    """Faulty wrapper whose drain waits for nothing."""

    async def drain(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrapper_type", "fault"), [(Careless, "unsafe"), (Hasty, "unsafe"), (Hasty, "late")]
)
async def test_the_suite_catches_a_wrong_wrapper(
    wrapper_type: type[WrappingBackend], fault: str
) -> None:
    class Wrong(WrapperTests):
        def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
            return wrapper_type(inner)

    test = Wrong().test_unsafe_memory_is_not_used_again_before_it_is_drained
    with pytest.raises(AssertionError):
        await test("load", fault)


class DictMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(None, namespace)


class BoundedDictMachine(BackendStateMachine):
    bounded = True

    async def make_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(DictConfig(max_blocks=3), namespace)


TestDictMachine = DictMachine.TestCase
TestDictMachine.settings = examples(25, steps=25)
TestBoundedDictMachine = BoundedDictMachine.TestCase
TestBoundedDictMachine.settings = examples(25, steps=25)


NUM_KEYS = 20
BLOCK_SIZE_BYTES = 48
KEYS = [make_block_key(bytes([number]), 0) for number in range(NUM_KEYS)]
PAYLOADS = [make_payload(key, BLOCK_SIZE_BYTES) for key in KEYS]


class TestFaultyBackendWithoutFaults(TestDictBackend):
    """Suite on a wrapper without faults, which must pass like the wrapped backend."""

    async def make_backend(self, namespace: Namespace) -> Backend:
        return FaultyBackend(await super().make_backend(namespace), seed=0, rates=FaultRates())

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        inner = await super().make_bounded_backend(namespace)
        return FaultyBackend(inner, seed=0, rates=FaultRates())

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, FaultyBackend)
        await super().corrupt(backend.inner, key)


@pytest.fixture
def memory() -> BlockMemory:
    memory = BlockMemory([[32, 16]], num_blocks=2 * NUM_KEYS)
    write_payloads(memory.describe(0, range(NUM_KEYS)), PAYLOADS)
    return memory


def faulty(memory: BlockMemory, rates: FaultRates, *, seed: int = 1) -> FaultyBackend:
    return FaultyBackend(DictBackend(None, memory.namespace()), seed=seed, rates=rates)


async def store_and_load(backend: Backend, memory: BlockMemory) -> tuple[list[Status], list[bytes]]:
    """Store all keys, load them elsewhere; return the statuses of the load, and the bytes."""
    await backend.store(KEYS, memory.describe(0, range(NUM_KEYS)))
    target = memory.describe(0, range(NUM_KEYS, 2 * NUM_KEYS))
    outcomes = await backend.load(KEYS, target)
    return [outcome.status for outcome in outcomes], read_payloads(target)


async def test_the_same_seed_does_the_same_and_another_seed_does_not(memory: BlockMemory) -> None:
    rates = FaultRates(failure=0.3, flip=0.3)
    results = []
    for seed in (1, 1, 2):
        backend = faulty(memory, rates, seed=seed)
        results.append((await store_and_load(backend, memory), backend.injected))
    assert results[0] == results[1]
    assert results[0] != results[2]


async def test_a_failed_block_is_not_moved_and_the_others_are(memory: BlockMemory) -> None:
    backend = faulty(memory, FaultRates(failure=0.4, operations=frozenset({Operation.LOAD})))
    statuses, loaded = await store_and_load(backend, memory)
    failed = {fault.key for fault in backend.injected}
    assert 0 < len(failed) < NUM_KEYS
    for key, status, got, payload in zip(KEYS, statuses, loaded, PAYLOADS, strict=True):
        assert status is (Status.FAILED if key in failed else Status.DONE)
        assert got == (bytes(BLOCK_SIZE_BYTES) if key in failed else payload)


@pytest.mark.parametrize("operation", [Operation.STORE, Operation.LOAD])
async def test_a_flip_changes_one_bit_of_the_reported_blocks_and_no_other(
    memory: BlockMemory, operation: Operation
) -> None:
    backend = faulty(memory, FaultRates(flip=0.4, operations=frozenset({operation})))
    statuses, loaded = await store_and_load(backend, memory)
    flipped = {fault.key for fault in backend.injected}
    assert statuses == [Status.DONE] * NUM_KEYS
    assert 0 < len(flipped) < NUM_KEYS
    for key, got, payload in zip(KEYS, loaded, PAYLOADS, strict=True):
        different = int.from_bytes(got, "big") ^ int.from_bytes(payload, "big")
        assert different.bit_count() == (key in flipped)
    source = memory.describe(0, range(NUM_KEYS))
    assert read_payloads(source) == PAYLOADS, "the memory of the caller was changed"


@pytest.mark.parametrize("operation", Operation)
async def test_an_error_is_raised_by_the_operation_it_is_meant_for(
    memory: BlockMemory, operation: Operation
) -> None:
    backend = faulty(memory, FaultRates(error=1.0, operations=frozenset({operation})))
    blocks = memory.describe(0, range(NUM_KEYS))
    calls: dict[Operation, Callable[[], Coroutine[Any, Any, object]]] = {
        Operation.LOOKUP: lambda: backend.lookup(KEYS),
        Operation.STORE: lambda: backend.store(KEYS, blocks),
        Operation.LOAD: lambda: backend.load(KEYS, blocks),
        Operation.DELETE: lambda: backend.delete(KEYS),
    }
    for called, call in calls.items():
        if called is operation:
            with pytest.raises(BackendUnavailableError, match="injected"):
                await call()
        else:
            await call()
    assert backend.injected == [InjectedFault(Fault.ERROR, operation, KEYS[0])]


@pytest.mark.parametrize("operation", [Operation.LOAD, Operation.LOOKUP])
async def test_a_stuck_call_ends_only_when_released_and_is_cancelled_then(
    memory: BlockMemory, operation: Operation
) -> None:
    backend = faulty(memory, FaultRates())
    await store_and_load(backend, memory)
    backend.rates = FaultRates(stuck=1.0, operations=frozenset({operation}))
    target = memory.describe(0, range(NUM_KEYS, 2 * NUM_KEYS))
    write_payloads(target, [bytes(BLOCK_SIZE_BYTES)] * NUM_KEYS)

    async def call() -> None:
        await (backend.load(KEYS, target) if operation is Operation.LOAD else backend.lookup(KEYS))

    running = asyncio.ensure_future(call())
    await backend.until_waiting()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not running.done()
    backend.release()
    with pytest.raises(asyncio.CancelledError):
        await running
    moved = [bytes(BLOCK_SIZE_BYTES)] * NUM_KEYS if operation is Operation.LOOKUP else PAYLOADS
    assert read_payloads(target) == moved


@pytest.mark.parametrize("rates", [FaultRates(stuck=1.0, late=1.0), FaultRates(stuck=1, unsafe=1)])
async def test_a_call_that_was_cancelled_while_it_was_stuck_raises_whatever_else_hits_it(
    memory: BlockMemory, rates: FaultRates
) -> None:
    backend = faulty(memory, FaultRates())
    await store_and_load(backend, memory)
    backend.rates = rates
    target = memory.describe(0, range(NUM_KEYS, 2 * NUM_KEYS))
    loading = asyncio.ensure_future(backend.load(KEYS, target))
    await backend.until_waiting()
    loading.cancel()
    await asyncio.sleep(0)
    backend.release()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await backend.drain()
    assert read_payloads(target) == PAYLOADS
