"""Events that vLLM publishes: an index built from them agrees with all tiers."""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file import BlockTree, FileBackend, refuse_partial_walk
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.storage.observer import Added, Removal, Removed
from tests.backends.file_store import config

pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.events", reason="needs vLLM"
)

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.offloading import interface, lower_tier
from kvxfer.testing.conformance.suite import make_keys
from tests.integrations.test_vllm_tier import Tiers
from tests.integrations.two_tiers import Start, make_namespace, start
from tests.recorder import Recorder

__all__ = ["start"]


class Router:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        self._tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
        )
        self.kept: dict[str, set[BlockKey]] = defaultdict(set)

    def take(self, events: Iterable[Any]) -> None:
        for event in self._tracker.take_events(events):
            kept = self.kept[event.medium]
            keys = {make_block_key(each, event.group_idx) for each in event.block_hashes}
            if isinstance(event, BlockStored):
                kept |= keys
            else:
                kept -= keys


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    return Router(monkeypatch)


def test_a_reset_tells_the_last_blocks_of_a_bucket_that_has_no_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower_tier, "MAX_TOLD", 100)
    events, keys = lower_tier.TierEvents(), make_keys(150)
    events.note(Added("s3", keys))
    events.note(Added("s3", keys[-2:]))
    events.note(Removed("s3", [keys[0], keys[-1]], Removal.DELETED))  # the first one may be known
    told = [(event.removed, event.keys) for event in events.take()]
    assert told == [(False, keys), (True, [keys[0], keys[-1]])]
    events.reset(b"salt")
    assert [(event.removed, event.keys) for event in events.take()] == [(True, keys[50:-1])]


def test_files_of_an_earlier_engine_are_told(start: Start, router: Router, tmp_path: Path) -> None:
    recorder, keys = Recorder(), make_keys(2)
    earlier = start(FileBackend(config(tmp_path), make_namespace()), observers=[recorder])
    earlier.store(keys)
    earlier.manager.shutdown()  # which writes them back
    assert {type(event) for event in recorder.events} == {Added}
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
        blocks = BlockTree(tmp_path, on_error=refuse_partial_walk).blocks()
        assert router.kept["STORAGE"] == set(keys) == {b.key for b in blocks if not b.quarantined}
        assert all([*tmp_path.rglob(f"{key.hex()}.safetensors")] for key in keys)
    finally:
        tiers.manager.shutdown()
