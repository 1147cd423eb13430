"""`KVXferL2Adapter`, made by LMCache's own factory and driven as its controllers do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.lmcache.object_keys import object_id_of, object_key_of
from tests.integrations.lmcache_driver import (
    Driver,
    Memory,
    bytes_of,
    make_config,
    make_key,
    make_object,
    plugin,
    until,
)

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


def test_every_field_of_a_key_counts(driver: Driver, memory: Memory) -> None:
    others = [
        make_key(2),
        make_key(1, model_name="some/other"),
        make_key(1, kv_rank=2),
        make_key(1, object_group_id=1),
        make_key(1, cache_salt="tenant"),
        make_key(1, cache_salt="t" * 128),
    ]
    driver.store([make_key(1)], [memory.fill(100, 1)])
    assert driver.lookup([make_key(1), *others]) == [True] + [False] * len(others)
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
    outside = make_object(torch.zeros(100, dtype=torch.uint8))
    inside = memory.fill(100, 1)
    keys = [make_key(1), make_key(2)]
    assert not driver.store(keys, [outside, inside]).is_successful()
    assert driver.lookup(keys) == [False, True]
    assert driver.load(keys, [outside, inside]) == [False, True]
    assert not driver.store(keys, [inside]).is_successful()  # fewer objects than keys
    assert driver.load(keys, [inside]) == [False, False]
    assert not driver.store([make_key(3)], [memory.allocate(0)]).is_successful()
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
    listed, cursor = [], None
    while True:
        page = driver.adapter.list_l2_keys("some/model", 2, cursor)
        listed += [(each.key.to_object_key(), each.size_bytes) for each in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            break
    assert sorted(listed, key=lambda each: each[1]) == [
        (key, 100 + number) for number, key in enumerate(keys[:5])
    ]
    with pytest.raises(ValueError, match="page_size"):
        driver.adapter.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="cursor"):
        driver.adapter.list_l2_keys(cursor="no token")


def test_files_of_before_are_found_counted_and_listed(tmp_path: Path, memory: Memory) -> None:
    keys = [make_key(1, cache_salt="a"), make_key(2, cache_salt="b" * 100)]
    stored = [memory.fill(70_000, 1), memory.fill(100, 2)]
    first = Driver.open(plugin(params_of(tmp_path)), memory)
    first.store(keys, stored)
    first.adapter.close()
    second = Driver.open(plugin(params_of(tmp_path)), memory)
    # Bytes of whole pieces: the last one's are not known before it is loaded.
    until(lambda: second.adapter.get_usage().bytes_by_cache_salt == {"a": 2 * 65_536})
    assert [each.key.to_object_key() for each in second.adapter.list_l2_keys().entries] == keys[:1]
    assert second.lookup(keys) == [True, True]
    loaded = [memory.allocate(70_000), memory.allocate(100)]
    assert second.load(keys, loaded) == [True, True]
    assert bytes_of(loaded) == bytes_of(stored)
    second.adapter.submit_unlock(keys)
    second.adapter.delete(keys)
    assert second.adapter.get_usage().total_bytes_used == 0
    second.adapter.close()


def test_eviction_by_the_backend_is_told(tmp_path: Path, memory: Memory) -> None:
    params = params_of(tmp_path) | {"backend": f"file://{tmp_path}?capacity=400KiB"}
    driver = Driver.open(plugin(params), memory)
    stored = [memory.fill(100_000, number) for number in range(8)]
    for number, each in enumerate(stored):
        driver.store([make_key(number)], [each])
    keys = [make_key(number) for number in range(8)]

    def agrees() -> bool:
        found = driver.lookup(keys)
        driver.adapter.submit_unlock(keys)
        used = driver.adapter.get_usage().total_bytes_used
        return bool(used == 100_000 * sum(found) and 0 < used < 500_000)

    until(agrees)
    driver.adapter.close()


LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 64])], [torch.bfloat16])
OBJECT_BYTES = 2 * 4 * 16 * 64 * 2


@contextmanager
def managed(params: dict[str, Any], **eviction: Any) -> Iterator[StorageManager]:
    """LMCache's own manager: its memory, its controllers, and its eviction from the adapter."""
    memory = L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")
    adapter = make_config(plugin(params, eviction=eviction | {"eviction_ratio": 0.5}))
    manager = StorageManager(
        StorageManagerConfig(
            l1_manager_config=DRAML1ManagerConfig(memory),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=L2AdaptersConfig([adapter]),
        )
    )
    yield manager
    manager.close()


def put(manager: StorageManager, salt: str = "") -> None:
    """Write six objects to LMCache's memory; it stores them by itself."""
    keys: list[ObjectKey] = [make_key(number, cache_salt=salt) for number in range(6)]
    assert len(manager.reserve_write(keys, LAYOUT)) == 6
    manager.finish_write(keys)


def test_quotas_evict_what_is_over_them(tmp_path: Path) -> None:
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0}
    with managed(params_of(tmp_path), **eviction) as manager:
        (adapter,) = manager._l2_adapters.values()
        manager.quota_manager.set_quota("a", 100 * OBJECT_BYTES)
        manager.quota_manager.set_quota("b", 4 * OBJECT_BYTES)
        put(manager, "a")
        put(manager, "b")
        until(lambda: adapter.get_usage().bytes_by_cache_salt.get("a", 0) == 6 * OBJECT_BYTES)
        until(lambda: 0 < adapter.get_usage().bytes_by_cache_salt.get("b", 0) < 4 * OBJECT_BYTES)
        assert manager.report_status()["is_healthy"]


def test_a_capacity_lets_lmcache_evict(tmp_path: Path) -> None:
    params = params_of(tmp_path, capacity=4 * OBJECT_BYTES)
    with managed(params, eviction_policy="LRU", trigger_watermark=0.8) as manager:
        (adapter,) = manager._l2_adapters.values()
        put(manager)
        until(lambda: 0 < adapter.get_usage().total_bytes_used < 4 * OBJECT_BYTES)


def test_ids_tell_their_keys() -> None:
    key = make_key(7, model_name="ä/model", cache_salt="salt", object_group_id=3, kv_rank=1 << 40)
    assert object_key_of(object_id_of(key)) == key
    assert object_key_of(object_id_of(make_key(7, cache_salt="s" * 128))) is None
    assert object_key_of(b"") is None


HOST = "host://?capacity=1MiB"
SECRET_URL = "s3://bucket/prefix?secret_access_key=TOPSECRET"
SECRET_MAPPING = {"type": "s3", "address": "bucket", "secret_access_key": "TOPSECRET"}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"backend": None}, "backend"),
        ({"revision": ""}, "revision"),
        ({"backend": "nowhere://"}, "nowhere"),
        *(({"timeout_s": value}, "timeout_s") for value in (0, 1e300, float("inf"), float("nan"))),
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
