"""Observers get the events of blocks in batches and in order, and never disturb a call."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.connect import connect, open_backend
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.storage import Backend, Namespace, Status, observer
from kvxfer.storage.lending import BlockParts, Lender
from kvxfer.storage.observed_backend import observed
from kvxfer.telemetry.renamed_keys import RenamedKeys
from kvxfer.testing import BackendTests, BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.transfer import TransferEngine
from tests.recorder import Failing, Recorder, keys_of
from tests.tiering.opened_tiers import open_host

KEYS = make_keys(8)
DONE, MISSING = Status.DONE, Status.MISSING


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def told(events: Sequence[observer.Moved]) -> list[tuple[str, str, str, list[Status]]]:
    """Shorten moves to their tier, operation, cause and statuses."""
    return [
        (each.tier, each.operation, each.cause, [outcome.status for outcome in each.outcomes])
        for each in events
    ]


class TestObservedHostBackend(BackendTests):
    """Suite over a host backend that also moves on the calling thread, with a failing observer."""

    max_blocks = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        return observed(open_host(namespace, 64), observer.Reports([Failing()]))

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return observed(open_host(namespace, 5), observer.Reports([Recorder()]))


async def test_evicted_deleted_and_replaced_blocks_are_told_with_the_reason(
    recorder: Recorder,
) -> None:
    memory = BlockMemory([[64]], num_blocks=16, blocks_per_chunk=2)
    async with observed(open_host(memory.namespace(), 2), observer.Reports([recorder])) as backend:
        await backend.store(KEYS[:1], memory.describe(0, [0]))  # half of a chunk
        await backend.store(KEYS[:1], memory.describe(0, [0, 1]))
        await backend.store(KEYS[1:3], memory.describe(0, [2, 3, 4, 5]))
        await backend.delete(KEYS[1:2])
        gauges = recorder.gauges("host")
    told = [(each.keys, each.reason) for each in recorder.of(observer.Removed)]
    assert told == [
        (KEYS[:1], observer.Removal.REPLACED),
        (KEYS[:1], observer.Removal.EVICTED),
        (KEYS[1:2], observer.Removal.DELETED),
    ]
    assert keys_of(recorder.of(observer.Added)) == [KEYS[0], KEYS[0], KEYS[1], KEYS[2]]
    assert recorder.kept == {"host": {KEYS[2]}}
    assert not recorder.mistakes
    assert gauges[observer.Gauge.STORED_BLOCKS] == 1
    assert gauges[observer.Gauge.USED_BYTES] * 2 == gauges[observer.Gauge.CAPACITY_BYTES]


async def test_an_observer_that_fails_is_told_nothing_more_and_others_are(
    memory: BlockMemory, recorder: Recorder, tmp_path: Path
) -> None:
    failing = Failing()
    tiers = ["host://?capacity=1MiB", f"file://{tmp_path}?capacity=1MiB&min_free=1"]
    opening = open_backend(tiers, memory.namespace(), observers=[failing, recorder])
    async with opening as backend:
        outcomes = await backend.store(KEYS[:2], memory.describe(0, [0, 1]))
        assert await backend.lookup(KEYS[:2]) == [True, True]
    assert [outcome.status for outcome in outcomes] == [DONE, DONE]
    assert len(failing.events) == 1
    assert recorder.of(observer.LookedUp)


def test_an_observer_that_fails_is_told_nothing_more_by_the_engine_either(
    memory: BlockMemory,
) -> None:
    failing, namespace = Failing(), Namespace(model="model")
    opening = connect(
        "host://?capacity=1MiB", memory.caches, namespace=namespace, observers=[failing]
    )
    with opening as engine:
        engine.wait([engine.submit_store(KEYS[:1], [[0]])])
    assert len(failing.events) == 1


def test_an_observer_that_watches_nothing_keeps_no_other_of_other_names_from_it(
    memory: BlockMemory, recorder: Recorder
) -> None:
    class Blind(Recorder):
        def watch(self, tier: str, ask: observer.AskGauges) -> None:
            raise OSError(tier)

    renamed = RenamedKeys([Blind(), recorder], lambda keys: keys)
    host = open_host(memory.namespace(), 4)
    host.observe(observer.Reports([renamed], "host"))
    assert recorder.gauges("host")


async def test_a_batch_that_is_refused_is_named_in_the_error_and_not_told(
    memory: BlockMemory, recorder: Recorder
) -> None:
    async with observed(open_host(memory.namespace(), 4), observer.Reports([recorder])) as backend:
        for move in (backend.store, backend.load):
            with pytest.raises(InvalidArgumentError, match="blocks"):
                await move(KEYS[:1], None)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="keys"):
                await move(None, memory.describe(0, [0]))  # type: ignore[arg-type]
    for move in (backend.store, backend.load):
        with pytest.raises(ClosedError):
            await move(None, None)  # type: ignore[arg-type]
    assert not recorder.of(observer.Moved)


async def test_the_end_of_a_batch_is_told_once_awaited_or_polled(
    memory: BlockMemory, recorder: Recorder
) -> None:
    def opened() -> TransferEngine:
        namespace = Namespace(model="model", revision="1")
        url = "host://?capacity=1MiB"
        return connect(url, memory.caches, namespace=namespace, observers=[recorder])

    async with opened() as engine:
        await engine.store(KEYS[:2], [[0, 1]])
        await engine.load(KEYS[1:3], [[2, 3]])
        assert recorder.gauges(observer.ENGINE) == {
            observer.Gauge.QUEUED_BATCHES: 0,
            observer.Gauge.BYTES_IN_FLIGHT: 0,
        }
    polled = opened()
    job = await asyncio.to_thread(polled.submit_store, KEYS[:1], [[0]])
    await asyncio.to_thread(polled.wait, [job])
    await polled.aclose()
    ended = [
        (each.operation, [outcome.status for outcome in each.outcomes], each.num_bytes)
        for each in recorder.of(observer.Ended)
    ]
    assert ended == [
        (observer.Operation.STORE, [DONE, DONE], 8192),
        (observer.Operation.LOAD, [DONE, MISSING], 4096),
        (observer.Operation.STORE, [DONE], 4096),
    ]
    assert told(recorder.of(observer.Moved)) == [
        ("host", "store", "request", [DONE, DONE]),
        ("host", "load", "request", [DONE, MISSING]),
        ("host", "store", "request", [DONE]),
    ]


async def test_blocks_that_peers_read_and_fill_in_place_are_counted(
    memory: BlockMemory, recorder: Recorder
) -> None:
    backend = observed(open_host(memory.namespace(), 4), observer.Reports([recorder]))
    lender = backend.provide(Lender)
    assert lender is not None
    assert isinstance(backend.provide(HostBackend), HostBackend)
    parts = BlockParts(KEYS[:2], [0, 0], [4096, 4096])
    async with lender.make_room(parts) as room:
        room.arrived[0] = None
    async with lender.lend(parts):
        pass
    assert lender.peek(KEYS[:2]) is not None
    await backend.aclose()
    store, load = recorder.of(observer.Moved)
    assert told([store, load]) == [
        ("host", "store", "request", [DONE, Status.FAILED]),
        ("host", "load", "request", [DONE, MISSING]),
    ]
    assert (store.num_bytes, load.num_bytes) == (4096, 4096)
    assert [each.tiers for each in recorder.of(observer.LookedUp)] == [["host", ""]]
