"""Wishes of vLLM's requests of how long their chunks are kept."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.keys import BlockKey
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import ReqContext

from kvxfer.integrations.vllm.offloading import metrics
from tests.integrations.two_tiers import (
    HIT,
    KeepingBackend,
    Scheduler,
    Start,
    keys_of,
    make_namespace,
    read_series,
    schedulers,
)

KEYS = keys_of(3)


@pytest.fixture
def start() -> Iterator[Start]:
    with schedulers() as start:
        yield start


@pytest.fixture
def scheduler(start: Start) -> Scheduler:
    return start(KeepingBackend())


def run(scheduler: Scheduler, req_id: str, keys: Sequence[BlockKey], params: Any = None) -> None:
    """Run a request: look up, load what is there, store the rest."""
    context, manager = ReqContext(req_id, kv_transfer_params=params), scheduler.manager
    manager.on_new_request(context)
    hits = [key for key in keys if manager.lookup(key, context) is HIT]
    if hits:
        manager.prepare_load(hits, context)
        manager.complete_load(hits, context)
    scheduler.step(req_id)
    scheduler.store([key for key in keys if key not in hits], context=context)
    manager.on_request_finished(context)


def test_a_request_that_computed_before_a_reset_stores_nothing_after_it(
    scheduler: Scheduler,
) -> None:
    """VLLM offers its chunks again, also those whose blocks it has given to others since."""
    contexts = [ReqContext("before"), ReqContext("later")]
    for context in contexts:
        scheduler.manager.on_new_request(context)
    scheduler.step("before")
    scheduler.manager.reset_cache()
    assert [scheduler.store(KEYS, context=each) for each in contexts] == [[], KEYS]


def test_a_request_raises_the_priority_of_chunks_that_it_finds(scheduler: Scheduler) -> None:
    wanted = KEYS[:2]  # the share of host memory that may be spared
    run(scheduler, "first", wanted)
    run(scheduler, "second", wanted, {"kvxfer_priority": 1})
    assert all(0.9 < each.priority <= 1 for each in scheduler.index.retentions(wanted))


@pytest.mark.parametrize(
    ("params", "ignored"),
    [
        ({"kvxfer_priority": "high"}, ["kvxfer_priority"]),
        ({"kvxfer_priority": 1e9, "kvxfer_ttl_s": -1}, ["kvxfer_priority", "kvxfer_ttl_s"]),
        ({"kvxfer_ttl_s": [1]}, ["kvxfer_ttl_s"]),
        ({"kvxfer_ttl_s": float("nan")}, ["kvxfer_ttl_s"]),
        ({"kvxfer_priority": True}, ["kvxfer_priority"]),
        ({"kvxfer_priority": None, "other": {}}, []),
        ("no mapping", []),
        (None, []),
    ],
)
def test_a_wrong_wish_is_logged_and_counted_and_stops_nothing(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, params: Any, ignored: list[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        run(scheduler, "wrong", KEYS, params)
    assert scheduler.index.retentions(KEYS) == [NORMAL] * 3
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(ignored)
    assert all(name in text for name, text in zip(ignored, warned, strict=True))
    counted = read_series(scheduler.manager.get_stats())
    assert {labels for name, labels in counted if name == metrics.IGNORED} == {
        (name,) for name in ignored
    }


def test_of_two_wishes_the_right_one_holds(scheduler: Scheduler) -> None:
    run(scheduler, "half", KEYS[:1], {"kvxfer_priority": "high", "kvxfer_ttl_s": 60})
    (retention,) = scheduler.index.retentions(KEYS[:1])
    assert retention.ttl_s is not None
    assert 50 < retention.ttl_s <= 60


def test_copies_in_the_tier_below_take_what_is_left_of_the_wish(
    start: Start, tmp_path: Path
) -> None:
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 20), min_free=ByteSize(1))
    files = FileBackend(config, make_namespace())
    scheduler = start(files)
    run(scheduler, "kept", KEYS[:2], {"kvxfer_priority": 2, "kvxfer_ttl_s": 100})
    run(scheduler, "other", KEYS[2:])
    scheduler.settle()
    copied = files.retentions(KEYS[:2])
    assert all(1.9 < each.priority <= 2 and each.ttl_s is not None for each in copied)
    assert files.retentions(KEYS[2:]) == [NORMAL]
