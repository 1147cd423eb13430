"""FaultyBackend: injects the ordered faults, and no others."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Backend, Status
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import (
    BackendTests,
    BlockMemory,
    DictBackend,
    DictConfig,
    Fault,
    FaultRates,
    FaultyBackend,
    InjectedFault,
    Operation,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

NUM_KEYS = 20
BLOCK_SIZE_BYTES = 48
KEYS = [make_block_key(bytes([number]), 0) for number in range(NUM_KEYS)]
PAYLOADS = [make_payload(key, BLOCK_SIZE_BYTES) for key in KEYS]


class TestFaultyBackendWithoutFaults(BackendTests):
    """Suite on a wrapper without faults, which must pass like the wrapped backend."""

    max_blocks = 5
    rates = FaultRates()

    async def make_backend(self, namespace: Namespace) -> Backend:
        return FaultyBackend(DictBackend(None, namespace), seed=0, rates=self.rates)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        inner = DictBackend(DictConfig(max_blocks=self.max_blocks), namespace)
        return FaultyBackend(inner, seed=0, rates=self.rates)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, FaultyBackend)
        assert isinstance(backend.inner, DictBackend)
        backend.inner.corrupt(key)


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


def num_different_bits(left: bytes, right: bytes) -> int:
    return (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).bit_count()


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
        assert num_different_bits(got, payload) == (key in flipped)
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
