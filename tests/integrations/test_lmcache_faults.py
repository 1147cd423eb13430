"""`KVXferL2Adapter` over stores that hang, are late, are stopped, or take no blocks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.distributed.l2_adapters", reason="needs LMCache")


from kvxfer.connect import open_backend
from kvxfer.integrations.lmcache import KVXferL2Adapter
from kvxfer.integrations.lmcache.object_keys import piece_of
from kvxfer.storage.backend import Backend
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Observer, Operation, Reports
from kvxfer.testing import DictBackend, DictConfig, FaultRates
from kvxfer.tiering.tiered_backend import TieredBackend, observe
from tests.integrations.lmcache_driver import (
    Driver,
    FaultyAdapter,
    Memory,
    bytes_of,
    make_key,
    until,
)

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 0.5
PARAMS = {
    "backend": "host://?capacity=1MiB",
    "revision": "commit",
    "piece": "64KiB",
    "staging": "512KiB",
    "timeout_s": TIMEOUT_S,
    "pause_s": 0.2,
    "close_timeout_s": 2.0,
}
KEYS = [make_key(1), make_key(2)]
SIZE = 150_000
GONE = FaultRates(stuck=1.0, operations=frozenset(Operation))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def adapter(memory: Memory, request: pytest.FixtureRequest) -> Iterator[FaultyAdapter]:
    settings = PARAMS | getattr(request, "param", {})
    made = FaultyAdapter(settings, l1_memory_desc=memory.desc)
    yield made
    made.faulty.rates = FaultRates()
    made.faulty.release()
    made.close()


class PartlyAway(DictBackend):
    """Backend some of whose blocks are away, as those of a peer that is gone for a while."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(DictConfig(), namespace)
        self.away: dict[BlockKey, Any] = {}

    def leave(self, is_away: Callable[[int], bool]) -> None:
        """Let the pieces be away whose index within their object is."""
        for key in [key for key in self._blocks if is_away(piece_of(key)[1])]:
            self.away[key] = self._blocks.pop(key)

    def come_back(self) -> None:
        self._blocks |= self.away
        self.away.clear()


class PartlyAwayAdapter(KVXferL2Adapter):
    """Adapter over such a backend, below others."""

    above: tuple[str, ...] = ()
    backend: PartlyAway

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.backend = PartlyAway(namespace)
        tiers = [*(open_backend(url, namespace) for url in self.above), self.backend]
        opened = tiers[0] if len(tiers) == 1 else TieredBackend(tiers, namespace)
        return observe(opened, Reports(observers))


@pytest.fixture
def partly_away(memory: Memory, request: pytest.FixtureRequest) -> Iterator[PartlyAwayAdapter]:
    kind = type("Adapter", (PartlyAwayAdapter,), {"above": getattr(request, "param", ())})
    made = kind(PARAMS | {"timeout_s": 5.0}, l1_memory_desc=memory.desc)
    yield made
    made.close()


@pytest.mark.parametrize(
    "is_away", [lambda index: index == 0, lambda index: index > 0], ids=["first", "others"]
)
def test_an_object_of_which_a_piece_is_away_is_a_miss_and_there_again_with_it(
    partly_away: PartlyAwayAdapter, memory: Memory, is_away: Callable[[int], bool]
) -> None:
    driver = Driver(partly_away)
    stored = [memory.fill(SIZE, 1), memory.fill(SIZE, 2)]
    driver.store(KEYS, stored)
    num_blocks = len(partly_away.backend._blocks)
    partly_away.backend.leave(is_away)
    loaded = [memory.allocate(SIZE) for _ in KEYS]
    assert driver.load(KEYS, loaded) == [False, False]
    assert driver.lookup(KEYS) == [False, False]
    assert partly_away.get_usage().total_bytes_used == 0
    assert partly_away.report_status()["num_objects"] == 0
    partly_away.backend.come_back()
    assert driver.lookup(KEYS) == [True, True]
    assert driver.load(KEYS, loaded) == [True, True]
    assert bytes_of(loaded) == bytes_of(stored)
    assert len(partly_away.backend._blocks) == num_blocks
    assert partly_away.get_usage().total_bytes_used == 2 * SIZE


@pytest.mark.parametrize("partly_away", [("host://?capacity=512KiB",)], indirect=True)
def test_what_leaves_host_memory_stays_in_a_tier_that_tells_nothing(
    partly_away: PartlyAwayAdapter, memory: Memory
) -> None:
    driver, keys = Driver(partly_away), [make_key(number) for number in range(5)]
    stored = [memory.fill(3 * (65_536 - 32), number) for number in range(5)]  # of which two fit
    for key, each in zip(keys, stored, strict=True):
        driver.store([key], [each])
        partly_away._objects.ask(partly_away._objects._backend.flush()).result(10)
    assert len(partly_away.backend._blocks) == 15
    for key, each in zip(keys, stored, strict=True):
        assert driver.lookup([key]) == [True]
        expected = bytes_of([each])
        assert driver.load([key], [each]) == [True]
        assert bytes_of([each]) == expected
    assert len(partly_away.backend._blocks) == 15


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (kind, operation)
        for kind in ("hang", "stuck", "late")
        for operation in ("lookup", "store", "load")
        if (kind, operation) != ("late", "lookup")  # nothing is moved by a lookup
    ],
)
@pytest.mark.parametrize("adapter", [{"pause_s": 60.0}], indirect=True, ids=["long pause"])
def test_a_store_that_stops_is_answered_for(
    kind: str, operation: str, adapter: FaultyAdapter, memory: Memory
) -> None:
    driver = Driver(adapter)
    objects = [memory.fill(SIZE, 1), memory.fill(SIZE, 2)]
    if operation == "load":
        driver.store(KEYS, objects)
    rates: dict[str, Any] = {kind: 1.0, "operations": frozenset({Operation(operation)})}
    adapter.faulty.rates = FaultRates(**rates)
    if operation == "store":
        assert not driver.store(KEYS, objects).is_successful()
    else:
        ask = driver.lookup if operation == "lookup" else lambda keys: driver.load(keys, objects)
        assert ask(KEYS) == [False, False]
    assert adapter.report_status()["is_healthy"] is False
    num_asked = len(adapter.faulty.injected)
    assert driver.lookup(KEYS) == [False, False]
    assert len(adapter.faulty.injected) == num_asked, "it is not asked now"


@pytest.mark.parametrize("kind", ["stuck", "late"])
def test_a_late_load_does_not_write_to_memory_that_was_answered_for(
    kind: str, adapter: FaultyAdapter, memory: Memory
) -> None:
    driver = Driver(adapter)
    objects = [memory.fill(SIZE, 1), memory.fill(SIZE, 2)]
    driver.store(KEYS, objects)
    adapter.faulty.rates = FaultRates(**{kind: 1.0, "operations": frozenset({Operation.LOAD})})  # type: ignore[arg-type]
    assert driver.load(KEYS, objects) == [False, False]
    memory.buffer.fill_(7)  # LMCache has given it to others
    adapter.faulty.rates = FaultRates()
    adapter.faulty.release()
    until(lambda: adapter.report_status()["is_healthy"])
    again = [memory.allocate(SIZE), memory.allocate(SIZE)]
    assert driver.load(KEYS, again) == [True, True]  # the buffers are there again
    assert bytes_of(objects) == [bytes([7]) * SIZE] * 2


def test_closing_answers_and_ends_in_time(memory: Memory) -> None:
    adapter = FaultyAdapter(PARAMS | {"timeout_s": 3600}, l1_memory_desc=memory.desc)
    adapter.faulty.rates = GONE
    task = adapter.submit_lookup_and_lock_task(KEYS, {})
    adapter.close()
    found = adapter.query_lookup_and_lock_result(task)
    assert found is not None
    assert [found.test(0), found.test(1)] == [False, False]
    assert adapter.report_status()["is_healthy"] is False
    later = adapter.submit_load_task(KEYS, [memory.fill(10, 1)] * 2)
    assert not adapter.query_load_result(later)
    adapter.close()
    adapter.faulty.release()


def test_an_open_circuit_breaker_is_no_health(memory: Memory) -> None:
    class Broken(KVXferL2Adapter):
        def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
            Reports(observers).of("file").watch(self.gauges)
            return DictBackend(DictConfig(), namespace)

        def gauges(self) -> dict[Gauge, float]:
            return {Gauge.BREAKER_OPEN: self.is_open}

        is_open = 0.0

    adapter = Broken(PARAMS, l1_memory_desc=memory.desc)
    assert adapter.report_status()["is_healthy"] is True
    adapter.is_open = 1.0
    assert adapter.report_status()["is_healthy"] is False
    adapter.close()
