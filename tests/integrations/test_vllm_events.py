"""Events that vLLM publishes: an index that is built from them is that of all tiers."""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.backends.file import BlockTree, FileBackend, refuse_partial_walk
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.storage.observer import Added, Removal, Removed
from tests.backends.file_store import config
from tests.cli.stores import flip

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.events", reason="needs vLLM"
)

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.offloading import interface, tier_events
from kvxfer.integrations.vllm.offloading.tier_events import TierEvents
from tests.integrations.test_vllm_tier import Tiers
from tests.integrations.two_tiers import Start, keys_of, make_namespace, start

__all__ = ["start"]
HAS_OWNERS = "ownership" in BlockStored.__struct_fields__


class Router:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        self._tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
        )
        self.kept: dict[str, set[BlockKey]] = defaultdict(set)
        self.owners: set[tuple[str, str | None]] = set()

    def take(self, events: Iterable[Any]) -> None:
        for event in self._tracker.take_events(events):
            kept = self.kept[event.medium]
            self.owners.add((event.medium, getattr(event, "ownership", None)))
            keys = {make_block_key(each, event.group_idx) for each in event.block_hashes}
            if isinstance(event, BlockStored):
                kept |= keys
            else:
                kept -= keys


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    return Router(monkeypatch)


def files_of(root: Path) -> dict[BlockKey, Path]:
    found = BlockTree(root, on_error=refuse_partial_walk).blocks()
    keys = [each.key for each in found if not each.quarantined]
    return {key: next(root.rglob(f"{key.hex()}.safetensors")) for key in keys}


def test_an_index_of_both_tiers_is_the_truth_after_chaos(
    start: Start, router: Router, tmp_path: Path
) -> None:
    chaos, keys = np.random.default_rng(0), keys_of(24)
    backend = FileBackend(config(tmp_path, capacity=10 * 12288 + 4096), make_namespace())
    scheduler = start(backend)
    for turn in range(60):
        first = int(chaos.integers(len(keys) - 3))
        some = keys[first : first + 3]
        match chaos.choice(["store", "resolve", "flip"]):
            case "store":
                scheduler.store(some)
            case "resolve":
                scheduler.resolve(some, f"request {turn}")
                scheduler.manager.on_request_finished(ReqContext(f"request {turn}"))
            case "flip" if files := sorted(files_of(tmp_path).values()):
                flip(files[int(chaos.integers(len(files)))], -1)
            case _:
                pass
        scheduler.settle()
        router.take(scheduler.manager.take_events())
    router.take(scheduler.manager.take_events())
    in_files = set(files_of(tmp_path))
    assert router.kept["CPU"] == set(scheduler.index.keys())
    assert router.kept["STORAGE"] == in_files
    assert router.owners == {("CPU", None), ("STORAGE", "file" if HAS_OWNERS else None)}
    assert in_files


def test_a_reset_tells_the_last_blocks_of_a_bucket_that_has_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_events, "MAX_TOLD", 100)
    events, keys = TierEvents(), keys_of(150)
    events.note(Added("s3", keys))
    events.note(Added("s3", keys[-2:]))
    events.note(Removed("s3", [keys[0], keys[-1]], Removal.DELETED))  # the first one may be known
    told = [(event.removed, event.keys) for event in events.take()]
    assert told == [(False, keys), (True, [keys[0], keys[-1]])]
    events.reset(b"salt")
    assert [(event.removed, event.keys) for event in events.take()] == [(True, keys[50:-1])]


def test_files_of_an_earlier_engine_are_told(start: Start, router: Router, tmp_path: Path) -> None:
    earlier, keys = start(FileBackend(config(tmp_path), make_namespace())), keys_of(2)
    earlier.store(keys)
    earlier.settle()
    scheduler = start(FileBackend(config(tmp_path), make_namespace()))

    def told() -> bool:
        router.take(scheduler.manager.take_events())
        return router.kept == {"STORAGE": set(keys)}

    scheduler.until(told)


def test_a_tier_below_vllms_own_tells_what_it_has(router: Router, tmp_path: Path) -> None:
    try:
        interface.require_tiering()
    except UnsupportedEngineError as exc:
        pytest.skip(str(exc))
    url = f"file://{tmp_path}?capacity=1GiB&min_free=1"
    tiers = Tiers(f"kvxfer-test-{time.time_ns()}", url, emit_events=True)
    try:
        keys = [make_block_key(f"hash-{n}".encode(), 0) for n in range(3)]
        tiers.store(keys)
        router.take(tiers.manager.take_events())
        assert router.kept["STORAGE"] == set(keys) == set(files_of(tmp_path))
    finally:
        tiers.manager.shutdown()
