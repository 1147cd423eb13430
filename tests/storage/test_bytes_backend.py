"""BytesBackend: four methods over bytes make a verified backend that never waits for a hang."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvxfer import Backend, BlockKey, BytesBackend, Namespace, Status, make_block_key
from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.runtime import threads
from kvxfer.storage.integrity import Integrity
from kvxfer.testing import BackendTests, BlockMemory
from kvxfer.testing.conformance.suite import cancel, store_generated, yield_to_loop
from kvxfer.testing.payloads import read_payloads

KEYS = [make_block_key(b"%d" % index) for index in range(3)]
MEMORY = BlockMemory([[96, 33]], num_blocks=8)
LIMIT_S = 10.0


class Values(BytesBackend):
    """Values in a dictionary, under the names of the base class."""

    def __init__(
        self,
        values: dict[str, bytes],
        namespace: Namespace,
        integrity: Integrity = Integrity.FAST,
        **options: int,
    ) -> None:
        super().__init__(namespace, integrity=integrity, **options)
        self.values = values
        self.num_closed = 0

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        self.values.update(zip(names, values, strict=True))
        return [True] * len(names)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def close(self) -> None:
        self.num_closed += 1


class TestValues(BackendTests):
    persistent = True
    stores_parts = False

    @pytest.fixture(autouse=True)
    def _no_values(self) -> None:
        self.values: dict[str, bytes] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return Values(self.values, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, Values)
        name = backend.name_of(key)
        self.values[name] = bytes([self.values[name][0] ^ 1]) + self.values[name][1:]


async def test_a_value_of_another_block_or_length_is_corrupt_once() -> None:
    values: dict[str, bytes] = {}
    async with Values(values, MEMORY.namespace()) as backend:
        await store_generated(backend, KEYS, MEMORY.describe(0, range(3)))
        first, second, third = map(backend.name_of, KEYS)
        values[first], values[third] = values[second], values[third][:-1]
        for expected in (Status.CORRUPT, Status.MISSING):
            outcomes = await backend.load(KEYS, MEMORY.describe(0, range(4, 7)))
            assert [each.status for each in outcomes] == [expected, Status.DONE, expected]


async def test_without_integrity_a_value_is_the_bytes_alone() -> None:
    values: dict[str, bytes] = {}
    async with Values(values, MEMORY.namespace(), Integrity.OFF) as backend:
        blocks = MEMORY.describe(0, [0])
        await store_generated(backend, KEYS[:1], blocks)
        assert list(values.values()) == read_payloads(blocks)
    with pytest.raises(InvalidArgumentError, match="integrity"):
        Values(values, MEMORY.namespace(), Integrity.SEALED)


@pytest.mark.parametrize(("closes", "timeout_s"), [(False, 10.0), (True, 10.0), (True, 0.0)])
async def test_a_storage_that_hangs_is_left_and_its_late_removal_takes_no_newer_value(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, *, closes: bool
) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", timeout_s)
    may_go_on = threading.Event()

    class Hanging(Values):
        def remove(self, names: Sequence[str]) -> None:
            may_go_on.wait(LIMIT_S)
            super().remove(names)

    backend, blocks = Hanging({}, MEMORY.namespace()), MEMORY.describe(0, range(1))
    await store_generated(backend, KEYS[:1], blocks)
    deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
    await yield_to_loop(5)
    await cancel(deleting)
    assert await backend.lookup(KEYS[:1]) == [True]  # nobody waited for it
    backend.values.clear()
    storing = asyncio.ensure_future(backend.store(KEYS[:1], blocks))
    for _ in range(8):  # turns of the same threads, in which the store could overtake
        await backend.lookup(KEYS[1:])
    closing = asyncio.ensure_future(backend.aclose() if closes else asyncio.sleep(0))
    await yield_to_loop(5)
    may_go_on.set()
    (stored,) = await asyncio.gather(storing, return_exceptions=True)
    assert isinstance(stored, ClosedError if closes else list)
    await closing
    await backend.aclose()  # when all calls have ended
    assert [*backend.values] == [backend.name_of(KEYS[0])][closes:]
    await backend.aclose()
    while not backend.num_closed:  # by the thread of the call that hung
        await yield_to_loop(1)
    assert backend.num_closed == 1


async def test_a_value_that_has_come_is_written_beside_a_call_that_hangs() -> None:
    may_go_on = threading.Event()

    class Hanging(Values):
        def get(self, names: Sequence[str]) -> list[bytes | None]:
            if self.name_of(KEYS[1]) in names:
                may_go_on.wait(LIMIT_S)
            return super().get(names)

    async with Hanging({}, MEMORY.namespace(), num_threads=1) as backend:
        await store_generated(backend, KEYS[:2], MEMORY.describe(0, [0, 1]))
        loads = [
            asyncio.ensure_future(backend.load([key], MEMORY.describe(0, [block])))
            for key, block in zip(KEYS[:2], (4, 5), strict=True)
        ]
        done, _ = await asyncio.wait(loads, timeout=LIMIT_S / 2, return_when="FIRST_COMPLETED")
        assert done == {loads[0]}
        may_go_on.set()
        assert [each.done for load in loads for each in await load] == [True, True]


async def test_a_load_whose_value_comes_after_a_close_began_touches_no_memory() -> None:
    events = [threading.Event() for _ in range(4)]
    copies, may_copy, asks, may_answer = events

    class Slow(Values):
        def get(self, names: Sequence[str]) -> list[bytes | None]:
            if self.name_of(KEYS[1]) in names:
                asks.set()
                may_answer.wait(LIMIT_S)
            return super().get(names)

        def _verified(self, name: str, size: int, value: memoryview) -> memoryview | None:
            copies.set()
            may_copy.wait(LIMIT_S)
            return super()._verified(name, size, value)

    backend = Slow({}, MEMORY.namespace())
    await store_generated(backend, KEYS[:2], MEMORY.describe(0, [0, 1]))
    copying, asking = (
        asyncio.ensure_future(backend.load([key], MEMORY.describe(0, [block])))
        for key, block in zip(KEYS[:2], (4, 5), strict=True)
    )
    while not (copies.is_set() and asks.is_set()):
        await yield_to_loop(1)
    closing = asyncio.ensure_future(backend.aclose())
    await yield_to_loop(5)
    may_answer.set()
    with pytest.raises(ClosedError):
        await asyncio.wait_for(asking, LIMIT_S / 2)
    may_copy.set()
    assert (await copying)[0].done
    await closing


async def test_a_drain_waits_for_a_value_whose_store_was_given_up() -> None:
    may_go_on = threading.Event()

    class Slow(Values):
        def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
            may_go_on.wait(LIMIT_S)
            return super().put(names, values)

    async with Slow({}, MEMORY.namespace()) as backend:
        storing = asyncio.ensure_future(backend.store(KEYS[:1], MEMORY.describe(0, [0])))
        while KEYS[0] not in backend._locks:
            await yield_to_loop(1)
        await cancel(storing)
        draining = asyncio.ensure_future(backend.drain())
        await yield_to_loop(5)
        assert not draining.done()
        may_go_on.set()
        await draining
        assert await backend.lookup(KEYS[:1]) == [True]


async def test_a_corrupt_value_that_cannot_be_removed_keeps_no_other_from_being_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ReadOnly(Values):
        def remove(self, names: Sequence[str]) -> None:
            raise PermissionError("read-only")

    async with ReadOnly({}, MEMORY.namespace()) as backend:
        await store_generated(backend, KEYS[:2], MEMORY.describe(0, range(2)))
        backend.values[backend.name_of(KEYS[0])] = b"damage"
        for _ in range(2):
            outcomes = await backend.load(KEYS[:2], MEMORY.describe(0, range(4, 6)))
            assert [each.status for each in outcomes] == [Status.CORRUPT, Status.DONE]
    assert caplog.text.count("1 corrupt values cannot be removed: ReadOnly: Permission") == 2


async def test_what_a_storage_raises_or_refuses_is_that_of_a_backend() -> None:
    class Full(Values):
        def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
            if len(names) == 1:
                raise OSError("no storage")
            super().put(names[:1], values[:1])
            return [True, *[False] * (len(names) - 1)]

    async with Full({}, MEMORY.namespace()) as backend:
        outcomes = await backend.store(KEYS, MEMORY.describe(0, range(3)))
        assert [each.status for each in outcomes] == [Status.DONE, *[Status.FAILED] * 2]
        assert await backend.lookup(KEYS) == [True, False, False]
        with pytest.raises(BackendUnavailableError, match="Full: OSError"):
            await backend.store(KEYS[1:2], MEMORY.describe(0, [0]))


@pytest.mark.parametrize("method", ["put", "get", "has"])
@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "a NoneType"),
        ([b"value"], "1 answers"),
        ({1: True, 2: False, 3: True}, "a dict"),
        ("yes", "a str"),
        ({1, 2, 3}, "a set"),
    ],
)
async def test_a_storage_that_does_not_answer_for_each_name_is_named(
    method: str, returned: object, found: str
) -> None:
    """What it returned is not shown: it may be the bytes of thousands of blocks."""

    def answer(*_: object) -> object:
        return returned

    answer.__name__ = method
    backend = Values({}, MEMORY.namespace())
    setattr(backend, method, answer)
    async with backend:
        blocks = MEMORY.describe(0, range(3))
        call = backend.load(KEYS, blocks) if method == "get" else backend.store(KEYS, blocks)
        expected = rf"Values: {method}\(\) returned {found}; expected one for each of 3 names"
        with pytest.raises(BackendUnavailableError, match=expected):
            await call


@pytest.mark.parametrize(
    ("method", "answer"), [("get", "text"), ("get", 5), ("has", np.zeros(2)), ("put", np.zeros(2))]
)
async def test_an_answer_of_another_type_is_that_of_a_method_and_no_verdict_on_the_block(
    method: str, answer: object
) -> None:
    backend = Values({}, MEMORY.namespace())
    async with backend:
        blocks = MEMORY.describe(0, range(3))
        if method == "get":
            await store_generated(backend, KEYS, blocks)
        with patch.object(Values, method, autospec=True, return_value=[answer] * 3):
            call = backend.load(KEYS, blocks) if method == "get" else backend.store(KEYS, blocks)
            with pytest.raises(
                BackendUnavailableError, match=rf"Values: an answer of {method}\(\)"
            ):
                await call
        assert len(backend.values) == 3 * (method == "get")


async def test_the_bytes_of_an_array_are_loaded_and_not_taken_for_damage() -> None:
    backend = Values({}, MEMORY.namespace())
    async with backend:
        await store_generated(backend, KEYS, MEMORY.describe(0, range(3)))
        arrays = [np.frombuffer(value, np.uint8) for value in backend.values.values()]
        with patch.object(Values, "get", autospec=True, return_value=arrays):
            outcomes = await backend.load(KEYS, MEMORY.describe(0, range(4, 7)))
        assert all(each.done for each in outcomes)
        assert read_payloads(MEMORY.describe(0, range(4, 7))) == read_payloads(
            MEMORY.describe(0, range(3))
        )


async def test_a_deletion_answers_true_or_false_whatever_the_storage_answers() -> None:
    async with Values({}, MEMORY.namespace()) as backend:
        with patch.object(Values, "has", autospec=True, return_value=[1, 0, "yes"]):
            assert [each is True for each in await backend.delete(KEYS)] == [True, False, True]


@pytest.mark.parametrize("kind", [tuple, np.array, iter, torch.tensor])
async def test_answers_may_be_anything_in_order_and_methods_any_callable(
    kind: Callable[[list[bool]], Sequence[bool]],
) -> None:
    backend = Values({}, MEMORY.namespace())
    vars(backend)["has"] = partial(lambda names: kind([True, False, True]))  # without a name
    async with backend:
        there = await backend.lookup(KEYS)
        assert [each is True for each in there] == [True, False, True], "which can be sent"


async def test_a_storage_that_wants_to_end_the_process_ends_no_event_loop() -> None:
    class Exits(Values):
        def has(self, names: Sequence[str]) -> list[bool]:
            raise SystemExit(len(names))

    async with Exits({}, MEMORY.namespace()) as backend:
        with pytest.raises(BackendUnavailableError, match=r"Exits: SystemExit\(3\)"):
            await backend.lookup(KEYS)
