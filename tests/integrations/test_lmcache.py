"""`KVXferL2Adapter`, made by LMCache's own factory and driven as its controllers do."""

import asyncio
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
import torch

pytest.importorskip("lmcache.v1.distributed.l2_adapters", reason="needs LMCache")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    DRAML1ManagerConfig,
    EvictionConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdapterConfigBase,
    L2AdaptersConfig,
    get_l2_adapter_config_class,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvxfer import Backend, BlockKey, Descriptors, Namespace, Outcome, TieredBackend
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.lmcache import KVXferL2Adapter
from kvxfer.integrations.lmcache.object_keys import object_id_of, piece_key, piece_of
from kvxfer.integrations.lmcache.residents import Residents
from kvxfer.storage.backend import WrappingBackend
from kvxfer.storage.observer import (
    Added,
    Observable,
    Observer,
    Operation,
    Removal,
    Removed,
    Reports,
)
from kvxfer.telemetry.metrics import Metrics
from kvxfer.testing import DictBackend, DictConfig, FaultRates, FaultyBackend
from kvxfer.tiering import TierTimeouts
from kvxfer.tiering.tiered_backend import observe
from kvxfer.units import ByteSize
from tests.clock import LIMIT_S, until


def plugin(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvxfer.integrations.lmcache",
        "class_name": "KVXferL2Adapter",
        "adapter_params": {"revision": "commit"} | params,
    } | more


def make_config(spec: dict[str, Any]) -> L2AdapterConfigBase:
    config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
    config.eviction_config = L2AdapterConfigBase._parse_eviction_config(spec)
    config.serde_config = L2AdapterConfigBase._parse_serde_config(spec)
    return config


def make_key(number: int, **fields: Any) -> ObjectKey:
    """Key of an object; its chunk's hash is as long as that of SHA-256."""
    given = {"chunk_hash": number.to_bytes(32, "big"), "model_name": "some/model", "kv_rank": 1}
    return ObjectKey(**(given | fields))


class Memory:
    """LMCache's memory: objects side by side in one buffer."""

    def __init__(self, num_bytes: int = 1 << 20) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.desc = L1MemoryDesc(self.buffer.data_ptr(), num_bytes, align_bytes=1)
        self._used = 0

    def allocate(self, num_bytes: int, *, dtype: torch.dtype = torch.uint8) -> TensorMemoryObj:
        start, self._used = self._used, self._used + num_bytes
        assert self._used <= len(self.buffer)
        return make_object(self.buffer[start : self._used], dtype=dtype)

    def fill(self, num_bytes: int, seed: int) -> TensorMemoryObj:
        made = self.allocate(num_bytes)
        random = torch.Generator().manual_seed(seed)
        made.raw_data.random_(0, 256, generator=random)
        return made


def make_object(raw: torch.Tensor, *, dtype: torch.dtype = torch.uint8) -> TensorMemoryObj:
    shape = torch.Size([len(raw) // dtype.itemsize])
    kinds: dict[str, Any] = {"shape": shape, "dtype": dtype, "shapes": [shape], "dtypes": [dtype]}
    given = {"address": 0, "phy_size": len(raw), "ref_count": 1, "fmt": MemoryFormat.KV_2LTD}
    return TensorMemoryObj(raw, MemoryObjMetadata(**kinds, **given), parent_allocator=None)


def bytes_of(objects: Sequence[TensorMemoryObj]) -> list[bytes]:
    return [each.raw_data.numpy().tobytes() for each in objects]


class Driver:
    """Controllers in one: submits a task, waits for its event, and takes the answer."""

    def __init__(self, adapter: L2AdapterInterface) -> None:
        self.adapter = adapter

    @classmethod
    def open(cls, spec: dict[str, Any], memory: Memory | None = None) -> "Driver":
        adapter = create_l2_adapter(make_config(spec), None if memory is None else memory.desc)
        adapter.set_backend_identity("kvxfer")
        return cls(adapter)

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> L2StoreResult:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        self._wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        layout = MemoryLayoutDesc([], [])
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {0: layout})
        self._wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None  # given once
        return [found.test(index) for index in range(len(keys))]

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[TensorMemoryObj]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        self._wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        return [loaded.test(index) for index in range(len(keys))]

    def _wait(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(LIMIT_S * 1000), "no answer"
        consume_fd(fd)


SIZES = (1, 4096, 30_001, 4064, 65_536 - 32, 65_536, 200_000)
"""Odd sizes, and those at which an object needs one piece more."""

PIECE = {"piece": "64KiB", "staging": "512KiB"}


def params_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"backend": f"file://{folder}?capacity=64MiB", **PIECE, **more}


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def driver(tmp_path: Path, memory: Memory) -> Iterator[Driver]:
    opened = Driver.open(plugin(params_of(tmp_path)), memory)
    yield opened
    opened.adapter.close()


def test_objects_of_every_size_come_back(driver: Driver, memory: Memory) -> None:
    keys = [make_key(number) for number in range(len(SIZES))]
    stored = [memory.fill(size, seed) for seed, size in enumerate(SIZES)]
    expected = bytes_of(stored)
    result = driver.store(keys, stored)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(SIZES)
    again = driver.store(keys, stored)
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    assert driver.adapter.get_usage().total_bytes_used == sum(SIZES)
    assert driver.lookup(keys) == [True] * len(keys)
    loaded = [memory.allocate(size) for size in SIZES]
    assert driver.load(keys, loaded) == [True] * len(keys)
    assert bytes_of(loaded) == expected


@dataclass(frozen=True)
class LaterKey(ObjectKey):  # type: ignore[misc]
    """Key of a later release, with a field that nobody knows yet."""

    tenant: str = ""
    groups: list[int] = field(default_factory=list, hash=False)


def test_every_field_of_a_key_counts(driver: Driver, memory: Memory) -> None:
    others = [
        make_key(2),
        make_key(1, model_name="some/other"),
        make_key(1, kv_rank=2),
        make_key(1, object_group_id=1),
        make_key(1, cache_salt="tenant"),
        *(make_key(1, cache_salt=salt) for salt in ("t" * 128, "\ud800")),
        LaterKey(**vars(make_key(1)), tenant="another"),
        LaterKey(**vars(make_key(1)), groups=[1]),
    ]
    driver.store([make_key(1)], [memory.fill(100, 1)])
    assert driver.lookup([make_key(1), *others]) == [True] + [False] * len(others)
    assert driver.lookup([LaterKey(**vars(make_key(1)))]) == [True]
    sizes = [100 + number for number in range(len(others))]
    assert driver.store(others, [memory.fill(size, size) for size in sizes]).is_successful()
    loaded = [memory.allocate(size) for size in sizes]
    assert driver.load(others, loaded) == [True] * len(others)
    assert bytes_of(loaded) == bytes_of([Memory().fill(size, size) for size in sizes])


def test_an_object_of_another_size_shape_or_type_is_a_miss(driver: Driver, memory: Memory) -> None:
    wrong = {
        "shorter": memory.allocate(4000),
        "longer": memory.allocate(9000),
        "type": memory.allocate(8192, dtype=torch.float16),
    }
    for number, (name, each) in enumerate(wrong.items()):
        driver.store([make_key(number)], [memory.fill(8192, 1)])
        assert driver.load([make_key(number)], [each]) == [False], name
        assert bytes_of([each]) == [bytes(each.get_size())], name
        until(lambda: driver.lookup([make_key(number)]) == [False])  # noqa: B023 - of no use


def test_what_cannot_be_done_is_answered(driver: Driver, memory: Memory) -> None:
    outside = make_object(torch.zeros(100, dtype=torch.uint8, device="meta"))
    inside = memory.fill(100, 1)
    keys = [make_key(1), make_key(2)]
    assert not driver.store(keys, [outside, inside]).is_successful()
    assert driver.lookup(keys) == [False, True]
    assert driver.load(keys, [outside, inside]) == [False, True]
    assert not driver.store(keys, [inside]).is_successful()  # fewer objects than keys
    assert driver.load(keys, [inside]) == [False, False]
    assert not driver.store([make_key(3)], [memory.allocate(0)]).is_successful()
    elsewhere = [make_object(torch.ones(100, dtype=torch.uint8))]  # in another region of LMCache's
    assert driver.store([make_key(5)], elsewhere).is_successful()
    assert driver.load([make_key(5)], elsewhere) == [True]
    assert driver.store([], []).is_successful()
    assert driver.lookup([]) == driver.load([], []) == []
    twice, stored = [make_key(4)] * 2, [memory.fill(70_000, 1)] * 2
    assert driver.store(twice, stored).is_successful()
    assert driver.lookup(twice) == [True, True]
    loaded = [memory.allocate(70_000), memory.allocate(70_000)]
    assert driver.load(twice, loaded) == [True, True]
    assert bytes_of(loaded) == bytes_of(stored)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_damaged_files_are_misses_and_gone(
    damage: str, driver: Driver, memory: Memory, tmp_path: Path
) -> None:
    keys = [make_key(1), make_key(2)]
    driver.store(keys, [memory.fill(200_000, 1), memory.fill(200_000, 2)])
    expected = bytes_of([memory.fill(200_000, 2)])
    last = max(path for path in tmp_path.rglob("*.safetensors") if is_of(path, keys[0]))
    content = bytearray(last.read_bytes())
    content[-5000] ^= 1
    if damage == "remove":
        last.unlink()
    else:
        kept = {"flip": len(content), "truncate": len(content) - 4096, "empty": 0}[damage]
        last.write_bytes(content[:kept])
    loaded = [memory.allocate(200_000), memory.allocate(200_000)]
    assert driver.load(keys, loaded) == [False, True]
    assert bytes_of(loaded[1:]) == expected
    until(lambda: driver.lookup(keys) == [False, True])
    until(lambda: driver.adapter.get_usage().total_bytes_used == 200_000)
    until(lambda: not any(is_of(path, keys[0]) for path in tmp_path.rglob("*.safetensors")))


def test_found_objects_stay_until_they_are_unlocked_or_nobody_does_for_long(
    driver: Driver, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [make_key(1), make_key(2)]
    driver.store(keys, [memory.fill(100, 1), memory.fill(100, 2)])
    assert driver.lookup(keys[:1]) == [True]
    driver.adapter.delete(keys)
    assert driver.load(keys, [memory.allocate(100), memory.allocate(100)]) == [True, False]
    driver.adapter.submit_unlock(keys)
    driver.adapter.delete(keys)
    assert driver.lookup(keys) == [False, False]
    assert driver.adapter.get_usage().total_bytes_used == 0
    monkeypatch.setattr("kvxfer.integrations.lmcache.adapter.PIN_S", 0.0)
    driver.store(keys[:1], [memory.fill(100, 1)])
    assert driver.lookup(keys[:1]) == [True]
    driver.adapter.delete(keys[:1])
    assert driver.lookup(keys[:1]) == [False]


def test_objects_are_listed_page_by_page(driver: Driver, memory: Memory) -> None:
    keys = [make_key(number) for number in range(5)] + [make_key(9, model_name="other")]
    driver.store(keys, [memory.fill(100 + number, number) for number in range(len(keys))])
    listed: list[Any] = []
    cursor: str | None = ""
    while cursor is not None:
        page = driver.adapter.list_l2_keys("some/model", 2, cursor)
        listed += [(each.key.to_object_key(), each.size_bytes) for each in page.entries]
        cursor = page.next_page_token
    assert sorted(listed, key=lambda each: each[1]) == [
        (key, 100 + number) for number, key in enumerate(keys[:5])
    ]
    for name, wrong in (("page_size", 0), ("page_size", "2"), ("cursor", 2), ("cursor", "2")):
        with pytest.raises(InvalidArgumentError, match=name):
            driver.adapter.list_l2_keys(**{name: wrong})


def test_files_of_before_are_found_counted_and_listed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [make_key(1, cache_salt="a"), make_key(2, cache_salt="b" * 100)]
    stored = [memory.fill(70_000, 1), memory.fill(100, 2)]
    first = Driver.open(plugin(params_of(tmp_path)), memory)
    first.store(keys, stored)
    first.adapter.close()
    bus = Mock()
    monkeypatch.setattr("lmcache.v1.distributed.l2_adapters.base.get_event_bus", lambda: bus)
    second = Driver.open(plugin(params_of(tmp_path)), memory)
    # Bytes of whole pieces: the last one's are not known before it is loaded.
    until(lambda: second.adapter.get_usage().bytes_by_cache_salt == {"a": 2 * 65_536})
    assert [each.key.to_object_key() for each in second.adapter.list_l2_keys().entries] == keys[:1]
    calls = bus.publish.mock_calls
    until(lambda: {each.args[0].metadata["backend"] for each in calls} == {"kvxfer"})
    told: dict[ObjectKey, int] = {}
    listener = Mock(on_l2_keys_stored=lambda *of: told.update(zip(*of, strict=True)))
    second.adapter.register_listener(listener)  # as LMCache's eviction does, after it is made
    assert told == {keys[0]: 2 * 65_536}
    assert second.lookup(keys) == [True, True]
    counted = {"a": 2 * 65_536, "b" * 100: 65_536}  # now that LMCache has named it
    assert second.adapter.get_usage().bytes_by_cache_salt == counted
    listed = [each.key.to_object_key() for each in second.adapter.list_l2_keys().entries]
    assert sorted(listed, key=lambda key: key.cache_salt) == keys
    loaded = [memory.allocate(70_000), memory.allocate(100)]
    assert second.load(keys, loaded) == [True, True]
    assert bytes_of(loaded) == bytes_of(stored)
    second.adapter.submit_unlock(keys)
    second.adapter.delete(keys)
    assert second.adapter.get_usage().total_bytes_used == 0
    second.adapter.close()


def test_an_object_grows_by_the_pieces_that_are_listed_after_its_first() -> None:
    residents, told = Residents(65_536, "fingerprint", Mock()), list[int]()
    pieces = [piece_key(object_id_of(make_key(1)), index) for index in range(3)]

    def deliver() -> None:
        residents.deliver(
            lambda _, sizes: told.extend(sizes), lambda _, sizes: told.extend(-n for n in sizes)
        )

    for each in pieces[:2], pieces[2:]:
        residents.add(each, tier="file")
        deliver()
    assert told == [2 * 65_536, -2 * 65_536, 3 * 65_536]
    residents.discard(pieces[:1], tier="file")
    deliver()
    assert sum(told) == 0


def test_an_object_that_is_stored_in_place_of_a_lost_one_is_whole() -> None:
    residents, key = Residents(65_536, "fingerprint", Mock()), make_key(1)
    pieces = [piece_key(object_id_of(key), index) for index in range(2)]
    residents.add(pieces, tier="file")
    for lost in (pieces[:1], pieces[1:]):  # the second one while its object is being stored
        if lost == pieces[1:]:
            residents.begin_store(key, 100_000)
        residents.discard(lost, tier="file")
    assert residents.take_broken() == []
    residents.add(pieces, tier="file")
    residents.end_store(key)
    assert residents.take_broken() == []
    residents.discard(pieces[1:], tier="file")
    assert residents.take_broken() == pieces[:1]


def test_an_object_that_lost_a_piece_is_not_whole_after_a_store_that_failed() -> None:
    residents, key = Residents(65_536, "fingerprint", Mock()), make_key(1)
    pieces = [piece_key(object_id_of(key), index) for index in range(2)]
    residents.add(pieces, tier="file")
    residents.discard(pieces[1:], tier="file")
    residents.begin_store(key, 100_000)
    residents.end_store(key)
    assert residents.look_for(object_id_of(key), key) == pieces[1:]
    assert residents.take_broken() == pieces[:1]


def test_a_piece_that_a_tier_was_still_writing_when_its_object_went_is_deleted() -> None:
    residents, key = Residents(65_536, "fingerprint", Mock()), make_key(1)
    pieces = [piece_key(object_id_of(key), index) for index in range(2)]
    residents.add(pieces, tier="host")
    residents.discard(pieces, tier="host")
    assert residents.take_broken() == []
    residents.deliver(Mock(), Mock())
    residents.add(pieces[:1], tier="file")  # the next tier, which the piece had been passed to
    assert residents.take_broken() == pieces[:1]
    residents.add(pieces, tier="host")  # stored again
    assert residents.take_broken() == []


def test_only_the_latest_objects_that_are_gone_are_remembered() -> None:
    residents = Residents(65_536, "fingerprint", Mock())
    with patch("kvxfer.integrations.lmcache.residents.MAX_GONE", 2):
        for number in range(4):
            residents.add([piece_key(object_id_of(make_key(number)), 0)], tier="host")
            residents.discard([piece_key(object_id_of(make_key(number)), 0)], tier="host")
            residents.deliver(Mock(), Mock())
    assert [*residents._objects] == [object_id_of(make_key(number)) for number in (2, 3)]


def test_an_object_that_is_gone_before_its_store_has_answered_is_not_told() -> None:
    residents, key, told = Residents(65_536, "fingerprint", Mock()), make_key(1), Mock()
    pieces = [piece_key(object_id_of(key), 0)]
    residents.begin_store(key, 100)
    residents.add(pieces, tier="file")
    residents.discard(pieces, tier="file")
    residents.add(pieces)  # the answer of the store
    residents.end_store(key)
    residents.deliver(told, told)
    assert not told.called


def test_an_object_that_lost_a_piece_nobody_knew_of_is_gone_and_can_be_stored_again(
    tmp_path: Path, memory: Memory
) -> None:
    keys, stored = [make_key(1)], [memory.fill(200_000, 1)]
    first = Driver.open(plugin(params_of(tmp_path)), memory)
    first.store(keys, stored)
    first.adapter.close()
    paths = sorted(path for path in tmp_path.rglob("*.safetensors") if is_of(path, keys[0]))
    paths[2].unlink()
    second = Driver.open(plugin(params_of(tmp_path)), memory)
    until(lambda: second.adapter.get_usage().total_bytes_used == 3 * 65_536)
    loaded = [memory.allocate(200_000)]
    assert second.load(keys, loaded) == [False]
    until(lambda: second.lookup(keys) == [False])
    assert second.store(keys, stored).bytes_transferred() == 200_000
    assert second.load(keys, loaded) == [True]
    assert bytes_of(loaded) == bytes_of(stored)
    second.adapter.close()


def test_an_object_that_evicts_its_own_pieces_is_no_hit(memory: Memory) -> None:
    driver = Driver.open(plugin({"backend": "host://?capacity=128KiB", **PIECE}), memory)
    driver.store([make_key(1)], [memory.fill(150_000, 1)])
    until(lambda: driver.lookup([make_key(1)]) == [False])
    driver.adapter.close()


def test_eviction_by_the_backend_is_told(tmp_path: Path, memory: Memory) -> None:
    params = params_of(tmp_path) | {"backend": f"file://{tmp_path}?capacity=400KiB"}
    driver, keys = Driver.open(plugin(params), memory), [make_key(number) for number in range(8)]
    for number, key in enumerate(keys):
        driver.store([key], [memory.fill(100_000, number)])
    usage = driver.adapter.get_usage
    until(lambda: usage().total_bytes_used == 100_000 * sum(driver.lookup(keys)))
    assert 0 < usage().total_bytes_used < 500_000
    driver.adapter.close()


LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 64])], [torch.bfloat16])
OBJECT_BYTES = 2 * 4 * 16 * 64 * 2


def test_a_capacity_lets_lmcache_evict(tmp_path: Path) -> None:
    """LMCache's own manager: its memory, its controllers, and its eviction from the adapter."""
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.5}
    params = params_of(tmp_path, capacity=4 * OBJECT_BYTES)
    manager = StorageManager(
        StorageManagerConfig(
            l1_manager_config=DRAML1ManagerConfig(
                L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")
            ),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=L2AdaptersConfig([make_config(plugin(params, eviction=eviction))]),
        )
    )
    (adapter,) = manager._l2_adapters.values()
    keys = [make_key(number) for number in range(6)]
    assert len(manager.reserve_write(keys, LAYOUT)) == 6
    manager.finish_write(keys)  # it stores them by itself
    until(lambda: 0 < adapter.get_usage().total_bytes_used < 4 * OBJECT_BYTES)
    assert manager.report_status()["is_healthy"]
    manager.close()


HOST = "host://?capacity=1MiB"
SECRET_URL = "s3://bucket/prefix?secret_access_key=TOPSECRET"
SECRET_MAPPING = {"type": "s3", "address": "bucket", "secret_access_key": "TOPSECRET"}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"backend": None}, "backend"),
        ({"revision": ""}, "revision"),
        ({"backend": "nowhere://"}, "nowhere"),
        *(
            ({name: value}, f"{name} is .*; expected a number [<>]")
            for name in ("timeout_s", "pause_s", "close_timeout_s")
            for value in (0, 1e300, float("inf"), float("nan"))
        ),
        ({"piece": 1000}, "piece"),
        ({"staging": "1MiB"}, "staging"),
        ({"treshold": 1}, "treshold"),
        ({"backend": [SECRET_URL], "timeout": 1}, "timeout"),
        ({"backend": [SECRET_MAPPING], "timeout": 1}, "timeout"),
    ],
)
def test_wrong_parameters_are_named_and_no_credential(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named) as refused:
        Driver.open(plugin({"backend": HOST} | params))
    assert "TOPSECRET" not in str(refused.value)


def is_of(path: Path, key: Any) -> bool:
    """Whether a file is that of a piece which can be found."""
    is_named = path.name.startswith(object_id_of(key).hex())
    return is_named and path.parent.name != "quarantine"


# Stores that hang, are late, are stopped, or take no blocks.

TIMEOUT_S = 0.5
PARAMS = {
    "backend": "host://?capacity=1MiB", "revision": "commit", "piece": "64KiB", "staging": "512KiB",
    "timeout_s": TIMEOUT_S, "pause_s": 0.2, "close_timeout_s": 2.0,
}  # fmt: skip
KEYS = [make_key(1), make_key(2)]
SIZE = 150_000
GONE = FaultRates(stuck=1.0, operations=frozenset(Operation))


class FaultyAdapter(KVXferL2Adapter):
    """Adapter over a backend that injects faults and reports no events."""

    faulty: FaultyBackend
    observers: Sequence[Observer]

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.observers = observers
        inner = DictBackend(DictConfig(), namespace)
        self.faulty = FaultyBackend(inner, seed=1, rates=FaultRates())
        return self.faulty


@pytest.fixture
def adapter(memory: Memory, request: pytest.FixtureRequest) -> Iterator[FaultyAdapter]:
    settings = PARAMS | getattr(request, "param", {})
    made = FaultyAdapter(settings, l1_memory_desc=memory.desc)
    yield made
    made.faulty.rates = FaultRates()
    made.faulty.release()
    made.close()


def test_a_lookup_that_times_out_in_the_backend_is_a_miss_and_logged(
    adapter: FaultyAdapter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = AsyncMock(side_effect=TimeoutError("no route"))
    monkeypatch.setattr(adapter.faulty, "lookup", failed)
    assert Driver(adapter).lookup([make_key(0)]) == [False]
    assert "no route" in caplog.text


def test_an_object_that_the_backend_fails_to_move_is_logged_with_the_reason(
    adapter: FaultyAdapter, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    driver, objects = Driver(adapter), [memory.fill(100, 1)]
    adapter.faulty.rates = FaultRates(failure=1.0)
    assert not driver.store([make_key(0)], objects).is_successful()
    assert driver.load([make_key(0)], objects) == [False]
    for name in ("store", "load"):
        text = f"LMCache's store: {name} of 1 of 1 pieces failed: injected failure"
        assert text in caplog.messages


class PartlyAway(DictBackend):
    """Backend some of whose blocks are away, like those of a peer that is down for a while."""

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
    backend: PartlyAway

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.backend = PartlyAway(namespace)
        return observe(self.backend, Reports(observers))


@pytest.fixture
def partly_away(memory: Memory) -> Iterator[PartlyAwayAdapter]:
    made = PartlyAwayAdapter(PARAMS | {"timeout_s": 5.0}, l1_memory_desc=memory.desc)
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


class LateMisses(WrappingBackend):
    """Backend that reports the misses of a load only when it is allowed to."""

    passes_on = frozenset({HostBackend, Observable})

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.has_missed, self.answers = threading.Event(), Future[None]()

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        if not all(each.done for each in outcomes):
            self.has_missed.set()
            await asyncio.shield(asyncio.wrap_future(self.answers))
        return outcomes


class LateMissesAdapter(KVXferL2Adapter):
    late: LateMisses

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.late = LateMisses(HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace))
        return observe(self.late, Reports(observers))


def test_an_object_stays_that_was_stored_while_a_load_did_not_find_it(memory: Memory) -> None:
    adapter = LateMissesAdapter(PARAMS | {"timeout_s": LIMIT_S}, l1_memory_desc=memory.desc)
    driver, stored, loaded = Driver(adapter), memory.fill(SIZE, 1), memory.allocate(SIZE)
    task = adapter.submit_load_task(KEYS[:1], [loaded])
    assert adapter.late.has_missed.wait(LIMIT_S)
    assert driver.store(KEYS[:1], [stored]).is_successful()
    adapter.late.answers.set_result(None)
    driver._wait(adapter.get_load_event_fd())
    missed = adapter.query_load_result(task)
    assert missed is not None
    assert not missed.test(0)
    assert adapter.get_usage().total_bytes_used == SIZE
    assert driver.load(KEYS[:1], [loaded]) == [True]
    assert bytes_of([loaded]) == bytes_of([stored])
    adapter.close()


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

    def is_suspended() -> bool:
        if operation == "store":
            assert not driver.store(KEYS, objects).is_successful()
        elif operation == "load":
            assert driver.load(KEYS, objects) == [False, False]
        else:
            assert driver.lookup(KEYS) == [False, False]
        return not adapter.report_status()["is_healthy"]

    until(is_suspended)  # on a machine that stalls, a task may be over before it asks
    num_asked = len(adapter.faulty.injected)
    assert driver.lookup(KEYS) == [False, False]
    assert len(adapter.faulty.injected) == num_asked, "it is not asked now"


@pytest.mark.parametrize(
    "adapter",
    [{"pause_s": 60.0, "staging": "256KiB", "timeout_s": 2.0}],
    indirect=True,
    ids=["two buffers"],
)
def test_stores_that_wait_for_a_buffer_suspend_no_backend_that_answers(
    adapter: FaultyAdapter, memory: Memory
) -> None:
    operations = frozenset({Operation.STORE})
    adapter.faulty.rates = FaultRates(delay=1.0, delay_s=0.4, operations=operations)
    objects = [memory.fill(1000, number) for number in range(20)]
    for number, each in enumerate(objects):
        adapter.submit_store_task([make_key(number)], [each])
    results: dict[int, L2StoreResult] = {}

    def have_ended() -> bool:
        results.update(adapter.pop_completed_store_tasks())
        return len(results) == len(objects)

    until(have_ended)
    assert {each.is_successful() for each in results.values()} == {True, False}, "some are late"
    assert adapter.report_status()["is_healthy"]


class ThreeTiersAdapter(KVXferL2Adapter):
    tiers: list[FaultyBackend]

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        inner = [DictBackend(DictConfig(), namespace) for _ in range(3)]
        self.tiers = [FaultyBackend(each, seed=1, rates=FaultRates()) for each in inner]
        timeouts = TierTimeouts(lookup_s=1.0, move_s=0.2, pause_s=60.0)
        return TieredBackend([*self.tiers], namespace, timeouts=timeouts)


class MeasuredAdapter(FaultyAdapter):
    """Adapter over a backend that is measured and injects faults."""

    metrics: Metrics

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.metrics = Metrics()
        opened = super().open_backend(namespace, observers)
        return observe(opened, Reports([*observers, self.metrics]))


def test_a_store_that_is_left_alone_is_shown_as_suspended(memory: Memory) -> None:
    given = PARAMS | {"timeout_s": 0.1, "pause_s": 60.0}
    adapter = MeasuredAdapter(given, l1_memory_desc=memory.desc)
    driver, tier = Driver(adapter), {"tier": "faulty"}
    value = partial(adapter.metrics.registry.get_sample_value, "kvxfer_suspended", tier)
    assert value() == 0
    adapter.faulty.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOOKUP}))

    def is_suspended() -> bool:
        assert driver.lookup(KEYS) == [False, False]
        return value() == 1

    until(is_suspended)
    adapter.faulty.release()
    adapter.close()


def test_two_tiers_that_hang_leave_a_buffer_to_the_third(memory: Memory) -> None:
    given = PARAMS | {"timeout_s": LIMIT_S, "staging": "256KiB"}
    adapter = ThreeTiersAdapter(given, l1_memory_desc=memory.desc)
    driver, keys = Driver(adapter), [make_key(number) for number in range(3)]
    stored = [memory.fill(1000, number) for number in range(3)]
    driver.store(keys, stored)
    dicts: list[Any] = [tier.inner for tier in adapter.tiers]
    until(lambda: all(len(each._blocks) == 3 for each in dicts))
    for number, each in enumerate(dicts):  # each object is in one tier
        for key in [key for key in each._blocks if piece_of(key)[0] != object_id_of(keys[number])]:
            del each._blocks[key]
    for tier in adapter.tiers[1:]:
        tier.rates = FaultRates(stuck=1.0, operations=frozenset({Operation.LOAD}))
    loaded = [memory.allocate(1000) for _ in keys]
    assert driver.load(keys[1:], loaded[1:]) == [False, False]
    assert driver.load(keys[2:], loaded[2:]) == [False]
    assert driver.load(keys[:1], loaded[:1]) == [True]
    assert bytes_of(loaded[:1]) == bytes_of(stored[:1])
    for tier in adapter.tiers:
        tier.rates = FaultRates()
        tier.release()
    adapter.close()


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


@pytest.mark.parametrize("adapter", [{"pause_s": 1.0}], indirect=True, ids=["pause"])
def test_pieces_left_over_go_after_a_pause(adapter: FaultyAdapter, memory: Memory) -> None:
    driver, blocks = Driver(adapter), adapter.faulty.inner._blocks  # type: ignore[attr-defined]
    driver.store(KEYS[:1], [memory.fill(SIZE, 1)])
    pieces = list(blocks)
    adapter.faulty.rates = FaultRates(hang=1.0, operations=frozenset({Operation.LOOKUP}))
    assert driver.lookup(KEYS) == [False, False]
    adapter.observers[0].note(Added("dict", pieces))
    adapter.observers[0].note(Removed("dict", [pieces.pop()], Removal.EVICTED))
    adapter.faulty.rates = FaultRates()
    until(lambda: adapter.report_status()["is_healthy"])
    driver.store(KEYS[1:], [memory.fill(SIZE, 2)])
    until(lambda: not blocks.keys() & {*pieces})


def test_pieces_left_over_that_the_backend_kept_go_later(
    adapter: FaultyAdapter, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, blocks = Driver(adapter), adapter.faulty.inner._blocks  # type: ignore[attr-defined]
    driver.store(KEYS[:1], [memory.fill(SIZE, 1)])
    pieces = list(blocks)
    with monkeypatch.context() as patched:
        kept = AsyncMock(return_value=[False] * (len(pieces) - 1))
        patched.setattr(adapter.faulty.inner, "delete", kept)
        adapter.observers[0].note(Added("dict", pieces))
        adapter.observers[0].note(Removed("dict", [pieces.pop()], Removal.EVICTED))
        until(lambda: kept.called)
    driver.store(KEYS[1:], [memory.fill(SIZE, 2)])
    until(lambda: not blocks.keys() & {*pieces})


def test_an_adapter_that_fails_leaves_no_backend_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock()
    monkeypatch.setattr(KVXferL2Adapter, "open_backend", opened)
    with pytest.raises(InvalidArgumentError, match="staging_bytes is "):
        KVXferL2Adapter(PARAMS | {"staging": 1 << 60})
    assert not opened.called
    monkeypatch.setattr(FaultyBackend, "attach", Mock(side_effect=MemoryError))
    monkeypatch.setattr(FaultyBackend, "aclose", closed := AsyncMock())
    with pytest.raises(MemoryError):
        FaultyAdapter(PARAMS)
    assert closed.call_count == 1


def test_a_backend_that_cannot_be_closed_is_told_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    monkeypatch.setattr(FaultyBackend, "aclose", AsyncMock(side_effect=OSError("no route")))
    FaultyAdapter(PARAMS).close()
    assert "no route" in caplog.text
    until(lambda: {*threading.enumerate()} <= before)


def test_closing_answers_and_ends_in_time(memory: Memory) -> None:
    adapter = FaultyAdapter(PARAMS | {"timeout_s": 3600}, l1_memory_desc=memory.desc)
    adapter.faulty.rates, begin = GONE, adapter._objects.begin
    tasks = [adapter.submit_lookup_and_lock_task(KEYS, {})]

    def begin_late(*work: Any) -> None:
        adapter.close()
        begin(*work)

    adapter._objects.begin = begin_late  # type: ignore[assignment,method-assign]
    tasks.append(adapter.submit_lookup_and_lock_task(KEYS, {}))
    for task in tasks:
        found = adapter.query_lookup_and_lock_result(task)
        assert found is not None
        assert [found.test(0), found.test(1)] == [False, False]
    assert adapter.report_status()["is_healthy"] is False
    later = adapter.submit_load_task(KEYS, [memory.fill(10, 1)] * 2)
    assert not adapter.query_load_result(later)
    adapter.close()
    adapter.delete(KEYS)  # begins no call that nobody awaits
    adapter.faulty.release()
