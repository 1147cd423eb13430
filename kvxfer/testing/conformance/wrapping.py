"""Conformance tests of backends that wrap another backend, with or without staging buffers."""

# ruff: noqa: D102 - the name of a test says what must hold

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import pytest

from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Operation
from kvxfer.testing.conformance.suite import cancel, load_done, make_keys, make_memory, statuses
from kvxfer.testing.dict_backend import DictBackend
from kvxfer.testing.faulty_backend import Fault, FaultRates, FaultyBackend
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

FAULTS = {"late": FaultRates(late=1.0), "unsafe": FaultRates(unsafe=1.0)}


class _Watched(DictBackend):
    """Backend that records the memory of each call."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self.seen: list[Descriptors] = []

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.seen.append(blocks)
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.seen.append(blocks)
        return await super().load(keys, blocks)


@pytest.mark.asyncio
class WrapperTests(ABC):
    """Tests of a wrapper whose inner backend uses memory after its call was cancelled or failed.

    Attributes:
        moving: Calls (`load`, `store`, `lookup`) in which the inner backend moves bytes.
    """

    moving: ClassVar[frozenset[str]] = frozenset({"load", "store"})

    @abstractmethod
    def wrap(self, inner: Backend, namespace: Namespace) -> Backend:
        """Open the backend around `inner`, which must keep all stored blocks."""

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("call", ["load", "store", "lookup"])
    async def test_unsafe_memory_is_not_used_again_before_it_is_drained(
        self, call: str, fault: str
    ) -> None:
        if call not in self.moving:
            pytest.skip(f"{call} of this backend moves no bytes")
        memory = make_memory()
        namespace, keys = memory.namespace(), make_keys(4)
        inner = _Watched(namespace)
        faulty = FaultyBackend(inner, seed=0, rates=FaultRates())
        payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in keys]
        write_payloads(memory.describe(0, range(4)), payloads)
        await inner.store(keys[:2], memory.describe(0, [0, 1]))
        async with self.wrap(faulty, namespace) as backend:
            faulty.rates = FAULTS[fault]
            given = memory.describe(0, [2 if call == "store" else 10])
            first: Coroutine[Any, Any, Sequence[Any]]
            if call == "store":
                first = backend.store(keys[2:3], given)
            elif call == "load":
                first = backend.load(keys[:1], given)
            else:
                first = backend.lookup(keys[:1])
            ended = await _end_when_late(first, faulty)
            is_ours = any(overlap(given, late) for late in faulty.late)
            assert not is_ours or not ended or not ended[0].memory_safe, "reported safe too early"
            faulty.rates = FaultRates()
            inner.seen.clear()
            target = memory.describe(0, [11])
            assert await backend.lookup(keys[1:2]) == [True]
            assert statuses(await backend.load(keys[1:2], target)) == [Status.DONE]
            assert statuses(await backend.store(keys[3:], memory.describe(0, [3]))) == [Status.DONE]
            for seen in inner.seen:
                assert not any(overlap(seen, late) for late in faulty.late), "used before drain"
            drained = asyncio.ensure_future(backend.drain())
            await asyncio.sleep(0)
            assert not drained.done(), "drain returned while memory was in use"
            faulty.release()
            await drained
            assert read_payloads(target) == payloads[1:2]
            again = memory.describe(0, [12, 13, 14])
            del keys[2], payloads[2]
            assert await load_done(backend, keys, again) == payloads


async def _end_when_late(
    call: Coroutine[Any, Any, Sequence[Any]], faulty: FaultyBackend
) -> Sequence[Any]:
    """Await a call hit by `UNSAFE`; cancel a call hit by `LATE`, and return no outcomes."""
    task = asyncio.ensure_future(call)
    await faulty.until_waiting()
    assert faulty.injected[-1].operation in {Operation.LOAD, Operation.STORE}
    if faulty.injected[-1].fault is Fault.UNSAFE:
        return await task
    await cancel(task)
    return []
