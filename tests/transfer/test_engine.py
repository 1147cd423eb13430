"""Transfer engine: one outcome per block, whatever the backend does."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import (
    BackendUnavailableError,
    BlockIdError,
    ClosedError,
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import DONE, Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.testing import BlockMemory, DictBackend, DictConfig, FaultRates, FaultyBackend
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId

PAGE_BYTES = 1024


class GatedBackend(DictBackend):
    """Backend that holds every call at a gate, in order of arrival, and counts bytes in flight.

    A call that is cancelled leaves only when its gate opens, as a thread in a copy would.
    """

    def __init__(self, memory: BlockMemory) -> None:
        super().__init__(DictConfig(), memory.namespace())
        self.calls: list[tuple[str, list[BlockKey]]] = []
        self.gate = asyncio.Event()
        self.bytes_in_flight = 0
        self.most_bytes_in_flight = 0

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await self._pass("store", keys, blocks)
        return await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await self._pass("load", keys, blocks)
        return await super().load(keys, blocks)

    async def _pass(self, name: str, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        self.calls.append((name, list(keys)))
        self.bytes_in_flight += blocks.num_bytes
        self.most_bytes_in_flight = max(self.most_bytes_in_flight, self.bytes_in_flight)
        cancelled = False
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                cancelled = True
        self.bytes_in_flight -= blocks.num_bytes
        if cancelled:
            raise asyncio.CancelledError


class ShortBackend(DictBackend):
    """Backend that omits the outcome of the last block."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return (await super().store(keys, blocks))[:-1]


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[PAGE_BYTES - 24, 24]], num_blocks=64)


@pytest.fixture
async def gated(memory: BlockMemory) -> GatedBackend:
    return GatedBackend(memory)


@pytest.fixture
async def engine(memory: BlockMemory) -> AsyncIterator[TransferEngine]:
    async with TransferEngine(memory.caches, make_backend(memory)) as engine:
        yield engine


def make_backend(memory: BlockMemory) -> Backend:
    return DictBackend(DictConfig(), memory.namespace())


def keys_of(count: int, *, group: int = 0, first: int = 0) -> list[BlockKey]:
    return [make_block_key(f"block-{first + n}".encode(), group) for n in range(count)]


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until a condition holds; the test's time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - other threads change it, too
        await asyncio.sleep(0)


async def collect(engine: TransferEngine, count: int) -> dict[JobId, FinishedJob]:
    finished: list[FinishedJob] = []

    def enough() -> bool:
        finished.extend(engine.get_finished())
        return len(finished) >= count

    await until(enough)
    assert len(finished) == count
    return {job.job_id: job for job in finished}


def statuses(outcomes: Sequence[Outcome]) -> set[Status]:
    return {outcome.status for outcome in outcomes}


def fill(memory: BlockMemory, keys: Sequence[BlockKey], ids: Sequence[int]) -> list[bytes]:
    payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in keys]
    write_payloads(memory.describe(0, ids), payloads)
    return payloads


async def test_blocks_come_back_where_they_were_asked_for(
    memory: BlockMemory, engine: TransferEngine
) -> None:
    keys = keys_of(8)
    payloads = fill(memory, keys, range(8))
    assert statuses(await engine.store(keys, [range(8)])) == {Status.DONE}
    assert await engine.lookup([*keys, *keys_of(1, first=99)]) == [True] * 8 + [False]
    memory.fill(0)
    ids = [40, 3, 17, 5, 21, 22, 23, 60]
    assert statuses(await engine.load(keys, [ids])) == {Status.DONE}
    assert read_payloads(memory.describe(0, ids)) == payloads


async def test_a_batch_of_two_groups_may_leave_one_empty() -> None:
    memory = BlockMemory([[64], [32, 8]], num_blocks=8)
    async with TransferEngine(memory.caches, make_backend(memory)) as engine:
        both = [*keys_of(2, group=0), *keys_of(1, group=1)]
        assert len(await engine.store(both, [[1, 2], [3]])) == 3
        assert statuses(await engine.load(keys_of(1, group=1), [[], [4]])) == {Status.DONE}


async def test_a_chunk_is_loaded_from_its_middle_on() -> None:
    memory = BlockMemory([[64, 8]], num_blocks=16, blocks_per_chunk=4)
    backend = make_backend(memory)
    async with TransferEngine(memory.caches, backend, blocks_per_chunk=4) as engine:
        keys = keys_of(2)
        payloads = fill(memory, keys, range(8))
        await engine.store(keys, [range(8)])
        ids = [9, 10, 11, 12, 13, 14]
        outcomes = await engine.load(keys, [ids], first_block_indices=[6])
        assert statuses(outcomes) == {Status.DONE}
        loaded = b"".join(read_payloads(memory.describe(0, ids, first_block_index=6)))
        assert loaded == b"".join(payloads)[2 * 72 :]


@pytest.mark.parametrize(
    ("keys", "block_ids", "error", "named"),
    [
        (keys_of(1), [[64]], BlockIdError, "64"),
        (keys_of(1), [[-1]], BlockIdError, "-1"),
        (keys_of(2), [[3, 3]], DuplicateError, "3"),
        (keys_of(1) * 2, [[3, 4]], DuplicateError, "block-0"),
        (keys_of(3), [[3, 4]], LengthMismatchError, "3"),
        (keys_of(1), [[3], [4]], InvalidArgumentError, "one entry for each of 1 groups"),
        (keys_of(1, group=1), [[3]], InvalidArgumentError, "a key of group 0"),
        ([b"abc"], [[3]], InvalidArgumentError, "abc"),
        ([], [[3]], InvalidArgumentError, "at least one key"),
        (keys_of(1), [[]], LengthMismatchError, "1"),
        (keys_of(1), [[1.5]], InvalidArgumentError, "float"),
        (keys_of(2), [[[1, 2]]], InvalidArgumentError, r"\[\[1, 2\]\]"),
    ],
)
async def test_a_wrong_batch_is_named_and_nothing_is_written(
    memory: BlockMemory,
    gated: GatedBackend,
    keys: list[BlockKey],
    block_ids: list[list[int]],
    error: type[Exception],
    named: str,
) -> None:
    async with TransferEngine(memory.caches, gated) as engine:
        for call in (engine.store, engine.load):
            with pytest.raises(error, match=named):
                await call(keys, block_ids)
        for submit in (engine.submit_store, engine.submit_load):
            with pytest.raises(error, match=named):
                submit(keys, block_ids)
        assert gated.calls == []


def test_a_cache_that_the_backend_cannot_reach_is_refused(memory: BlockMemory) -> None:
    class DeviceOnly(DictBackend):
        memory_kinds = frozenset({"cuda"})

    backend = DeviceOnly(DictConfig(), memory.namespace())
    with pytest.raises(InvalidArgumentError, match="cpu"):
        TransferEngine(memory.caches, backend)


async def test_a_closed_engine_says_so_and_can_be_closed_again(memory: BlockMemory) -> None:
    engine = TransferEngine(memory.caches, make_backend(memory))
    await engine.aclose()
    await engine.aclose()
    for call in (engine.store, engine.load):
        with pytest.raises(ClosedError):
            await call(keys_of(1), [[1]])
    with pytest.raises(ClosedError):
        await engine.lookup(keys_of(1))
    with pytest.raises(ClosedError):
        engine.submit_load(keys_of(1), [[1]])


async def test_loads_that_wait_go_before_stores_that_waited_longer(
    memory: BlockMemory, gated: GatedBackend
) -> None:
    async with TransferEngine(memory.caches, gated, max_bytes_in_flight=PAGE_BYTES) as engine:
        first = asyncio.create_task(engine.store(keys_of(1), [[0]]))
        await until(lambda: gated.calls)
        second = asyncio.create_task(engine.store(keys_of(1, first=1), [[1]]))
        await until(lambda: len(engine._mover._admission._waiting) == 1)
        load = asyncio.create_task(engine.load(keys_of(1, first=2), [[2]]))
        await until(lambda: len(engine._mover._admission._waiting) == 2)
        gated.gate.set()
        await asyncio.gather(first, second, load)
        assert [name for name, _ in gated.calls] == ["store", "load", "store"]


async def test_the_bytes_in_flight_are_bounded(memory: BlockMemory, gated: GatedBackend) -> None:
    bound = 6 * PAGE_BYTES
    async with TransferEngine(memory.caches, gated, max_bytes_in_flight=bound) as engine:
        transfers = [
            asyncio.create_task(engine.store(keys_of(8, first=8 * n), [range(8 * n, 8 * n + 8)]))
            for n in range(8)
        ]
        await until(lambda: gated.bytes_in_flight == bound)
        gated.gate.set()
        for outcomes in await asyncio.gather(*transfers):
            assert statuses(outcomes) == {Status.DONE}
        assert gated.most_bytes_in_flight == bound
        assert engine._mover._admission.bytes_in_flight == 0


async def test_a_backend_that_raises_fails_the_blocks_and_not_the_caller(
    memory: BlockMemory,
) -> None:
    faulty = FaultyBackend(make_backend(memory), seed=1, rates=FaultRates(error=1.0))
    async with TransferEngine(memory.caches, faulty) as engine:
        outcomes = await engine.store(keys_of(2), [[1, 2]])
        assert statuses(outcomes) == {Status.FAILED}
        assert BackendUnavailableError.__name__ in outcomes[0].reason
        assert all(outcome.memory_safe for outcome in outcomes)


async def test_a_backend_that_forgets_outcomes_fails_the_whole_call(memory: BlockMemory) -> None:
    backend = ShortBackend(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend) as engine:
        outcomes = await engine.store(keys_of(3), [[1, 2, 3]])
        assert statuses(outcomes) == {Status.FAILED}
        assert "2 outcomes for 3 keys" in outcomes[0].reason


def test_the_polled_interface_needs_no_event_loop(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, start = threading.current_thread(), threading.Thread.start
    started: list[threading.Thread] = []  # by this thread: loops of other tests may start some, too

    def note(thread: threading.Thread) -> None:
        if threading.current_thread() is here:
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    engine = TransferEngine(memory.caches, make_backend(memory))
    keys = keys_of(4)
    payloads = fill(memory, keys, range(4))
    store = engine.submit_store(keys, [range(4)])
    (stored,) = engine.wait([store], timeout_s=10)
    assert engine.get_finished() == [stored]
    assert (stored.job_id, stored.done, stored.num_bytes) == (store, True, 4 * PAGE_BYTES)
    load = engine.submit_load(keys, [range(8, 12)])
    missing = engine.submit_load(keys_of(1, first=50), [[20]])
    ended = engine.wait([missing, load, JobId(99)], timeout_s=10)
    assert [job.job_id for job in ended] == [missing, load]
    finished = {job.job_id: job for job in engine.get_finished()}
    assert list(finished.values()) == ended[::-1]
    assert finished[load].done
    assert statuses(finished[missing].outcomes) == {Status.MISSING}
    assert finished[missing].num_bytes == 0
    assert engine.get_finished() == []
    assert read_payloads(memory.describe(0, range(8, 12))) == payloads
    engine.close()
    engine.close()
    assert not [thread.name for thread in started if thread.is_alive()]


def test_an_engine_outlives_the_event_loop_it_was_first_used_on(memory: BlockMemory) -> None:
    engine = TransferEngine(memory.caches, make_backend(memory))
    assert asyncio.run(engine.store(keys_of(1), [[1]])) == [DONE]
    assert asyncio.run(engine.load(keys_of(1), [[2]])) == [DONE]
    engine.close()


def test_a_step_loop_submits_lookups_and_closes_the_engine_at_the_end_of_a_block(
    memory: BlockMemory,
) -> None:
    with TransferEngine(memory.caches, make_backend(memory)) as engine:
        (stored,) = engine.wait([engine.submit_store(keys_of(1), [[1]])], timeout_s=10)
        assert stored.done
        assert engine.submit_lookup(keys_of(2), timeout_s=10).result(10) == [True, False]
        with pytest.raises(InvalidArgumentError, match="keys"):
            engine.submit_lookup([]).result(10)
    with pytest.raises(ClosedError):
        engine.submit_lookup(keys_of(1))


def test_a_block_that_raises_closes_the_engine_too(memory: BlockMemory) -> None:
    engine = TransferEngine(memory.caches, make_backend(memory))
    with pytest.raises(KeyError), engine:
        raise KeyError
    with pytest.raises(ClosedError):
        engine.submit_store(keys_of(1), [[1]])


async def test_the_backend_learns_where_blocks_will_be(memory: BlockMemory) -> None:
    class Attached(DictBackend):
        regions: Sequence[MemoryRegion] = ()

        def attach(self, memory: Sequence[MemoryRegion]) -> None:
            self.regions = memory

    backend = Attached(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend):
        blocks = memory.describe(0, range(4))
        for address, length in zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True):
            assert any(
                region.address <= address and address + length <= region.address + region.num_bytes
                for region in backend.regions
            )


@pytest.mark.parametrize("name", ["store", "load"])
async def test_blocks_of_a_tensor_that_was_freed_fail_by_its_name(
    memory: BlockMemory, gated: GatedBackend, name: str
) -> None:
    gated.gate.set()
    async with TransferEngine(memory.caches, gated) as engine:
        memory.caches.tensors[1].tensor.untyped_storage().resize_(0)
        outcomes = await getattr(engine, name)(keys_of(2), [[1, 2]])
        assert statuses(outcomes) == {Status.FAILED}
        assert all("tensor 1 of the caches" in outcome.reason for outcome in outcomes)
        assert all(outcome.memory_safe for outcome in outcomes)
        assert not gated.calls


@pytest.mark.parametrize(("kind", "reached"), [("xpu", "cpu"), ("cuda", "xpu"), ("xpu", "cuda")])
def test_a_device_that_staging_is_not_for_is_refused(
    memory: BlockMemory, kind: str, reached: str
) -> None:
    class OnDevice(torch.Tensor):
        device = torch.device(kind, 0)

    class Reaching(DictBackend):
        memory_kinds = frozenset({reached})

    (each,) = memory.caches.tensors[:1]
    moved = replace(each, tensor=each.tensor.as_subclass(OnDevice))
    caches = CanonicalKVCaches([moved], [[CanonicalKVCacheRef(0, PAGE_BYTES - 24)]])
    with pytest.raises(InvalidArgumentError, match=rf"device of caches is \['{kind}'\]"):
        TransferEngine(caches, Reaching(DictConfig(), memory.namespace()))


AT_THE_END = """
import atexit, sys, threading
import kvxfer
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, write_payloads

folder, backend, how = sys.argv[1:]
memory = BlockMemory([[4096]], num_blocks=64)
keys = [kvxfer.make_block_key(bytes([number]) * 8, 0) for number in range(40)]
write_payloads(memory.describe(0, range(40)), [make_payload(key, 4096) for key in keys])
files = f"file://{folder}?capacity=64MiB&min_free=1B"
urls = ["host://?capacity=64MiB", files] if backend == "tiers" else files
engine = kvxfer.connect(urls, memory.caches, namespace=kvxfer.Namespace(model="m", revision="1"))
if backend != "unused":
    engine.wait([engine.submit_store(keys, [range(40)])])
    assert all(job.done for job in engine.get_finished())

def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def close():
    if how == "without new threads":  # as Python 3.12 and later
        threading.Thread.start = refuse
    engine.close()

atexit.register(close)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["", "without new threads"])
@pytest.mark.parametrize("backend", ["tiers", "files", "unused"])
def test_an_engine_that_is_closed_when_the_interpreter_ends_loses_nothing(
    tmp_path: Path, backend: str, how: str
) -> None:
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path), backend, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.rglob("*.safetensors"))) == (40 if backend != "unused" else 0)
    assert list(tmp_path.glob("*.claim")) == []


async def test_an_engine_whose_backend_cannot_be_drained_ends_and_says_what_it_left(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(DictBackend):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

        async def drain(self) -> None:
            raise OSError("completion queue is gone")

    async with TransferEngine(memory.caches, Broken(DictConfig(), memory.namespace())) as engine:
        job = engine.submit_load(keys_of(1), [[1]])
        await collect(engine, 1)
    assert "1 transfers are abandoned" in caplog.text
    assert engine.may_touch(job)


@pytest.mark.parametrize("name", ["store", "load", "lookup", "flush"])
async def test_a_backend_that_cancels_itself_has_failed_and_cancels_nobody(
    memory: BlockMemory, name: str
) -> None:
    async def cancel_itself(*_: object) -> Any:
        raise asyncio.CancelledError

    backend = make_backend(memory)
    setattr(backend, name, cancel_itself)
    async with TransferEngine(memory.caches, backend, timeout_s=60) as engine:
        if name in {"store", "load"}:
            [outcome] = await getattr(engine, name)(keys_of(1), [[1]])
            assert outcome.status is Status.FAILED
            assert "its caller was not" in outcome.reason
        else:
            with pytest.raises(BackendUnavailableError, match="its caller was not"):
                await (engine.lookup(keys_of(1)) if name == "lookup" else engine.flush())
