"""Requests of vLLM are explained: the answers to its scheduler, and their reasons."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1.kv_offload.base import ReqContext

from kvxfer.integrations.vllm.offloading.metrics import OffloadingMetrics
from kvxfer.integrations.vllm.offloading.requests import Requests
from kvxfer.replay import count_ceiling, read_trace
from kvxfer.storage.backend import MISSING
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Moved, Operation, Reports
from kvxfer.telemetry.trace_recorder import TraceRecorder
from kvxfer.testing.conformance.suite import make_keys
from tests.explain.conftest import Ask, ask, journal
from tests.integrations.pd_engine import (
    LEASE,
    StartEngine,
    full,
    make_found,
    start_engine,
    ticket_params,
)
from tests.integrations.two_tiers import start

__all__ = ["ask", "journal", "start", "start_engine"]


def answers(report: dict[str, Any]) -> list[tuple[int, int, str, str]]:
    return [(run["first"], run["last"], run["answer"], run["tier"]) for run in report["runs"]]


CHUNKS, WINDOW = make_keys(6), make_keys(6, group=1)
PART = make_keys(1, first=50)[0]
"""Key of a part of a chunk, which vLLM makes as it asks for it."""


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        ({CHUNKS[0]: "host", CHUNKS[1]: "file", CHUNKS[2]: ""}, {"host": 1, "file": 1, "": 4}),
        ({CHUNKS[4]: ""}, {"": 2}),  # the device has the four before it
        (dict.fromkeys(CHUNKS[:3], "host"), {"host": 3}),  # it wants no more
        ({CHUNKS[0]: "", PART: ""}, {"": 6}),
        # The first chunk turns out to be corrupt after those behind it were loaded.
        (dict.fromkeys(CHUNKS[:5], "file") | {PART: "host", CHUNKS[0]: ""}, {"": 6}),
        # A window, asked for from its end, in front of which nothing is needed.
        ({WINDOW[5]: "", WINDOW[4]: "", WINDOW[3]: "host", WINDOW[2]: "host"}, {"host": 2, "": 2}),
        (dict.fromkeys(CHUNKS[:5], "host") | dict.fromkeys(WINDOW[4:2:-1], "host"), {"host": 7}),
    ],
)
def test_chunks_behind_a_miss_count_as_missed_where_they_were_needed(
    asked: dict[BlockKey, str], counted: dict[str, int]
) -> None:
    metrics = OffloadingMetrics(chunk_bytes=1)
    told = Requests(Reports(), metrics, tokens_per_chunk={0: 16, 1: 16})
    context = ReqContext("a")
    if not hasattr(context, "set_offload_key_position"):
        pytest.skip("this vLLM does not say which chunks a request has")
    for group in (CHUNKS, WINDOW):
        for index, key in enumerate(group):
            context.set_offload_key_position(key, 16 * (index + 1))
    context.set_offload_key_position(PART, 104)
    told.arrive(context)
    for key, tier in asked.items():
        told.note("a", key, tier)
    told.schedule(["a"])
    told_blocks = metrics.report().data["data"]["vllm:kvxfer_lookup_blocks"]
    assert told_blocks == {
        ((tier, "hit") if tier else ("none", "miss")): number for tier, number in counted.items()
    }


def test_parts_of_chunks_are_in_no_trace_and_those_that_were_missed_are_not_told(
    tmp_path: Path,
) -> None:
    trace, observer = TraceRecorder(str(tmp_path / "trace.jsonl")), Mock()
    metrics = OffloadingMetrics(chunk_bytes=1)
    told = Requests(Reports([observer]), metrics, trace=trace, tokens_per_chunk={0: 16, 1: 8})
    parts = make_keys(3, first=50)
    other = make_keys(1, first=90, group=1)  # of a group with smaller chunks
    for name, chunks in (("long", CHUNKS), ("short", []), ("other", CHUNKS[:2])):
        told.arrive(context := ReqContext(name))
        if not hasattr(context, "set_offload_key_position"):
            pytest.skip("this vLLM does not say which chunks a request has")
        for index, key in enumerate(chunks):
            context.set_offload_key_position(key, 16 * (index + 1))
        context.set_offload_key_position(*other, 8)
        for index, key in enumerate(parts):
            context.set_offload_key_position(key, 16 * len(chunks) + 12 - 4 * index)
            told.note(name, key, "host" if index == 2 else "")
        told.schedule([name])
        (event,) = observer.note.call_args.args
        assert event.keys == [*chunks, *other, parts[2]]
        assert event.tiers == [None] * len([*chunks, *other]) + ["host"]
    told.close()
    assert metrics.report().data["data"]["vllm:kvxfer_lookup_blocks"] == {("host", "hit"): 3}
    read = read_trace(tmp_path / "trace.jsonl")
    assert read.tokens_per_block == 16
    assert read.input_lengths.tolist() == [96, 32]
    assert count_ceiling(read) == 2


def test_what_another_engine_gives_and_what_it_does_not_give_any_more(
    journal: Path, ask: Ask, start_engine: StartEngine
) -> None:
    p, d = start_engine(full()), start_engine(full())
    d.add("cmpl-1", ticket_params())
    d.asking.asked[LEASE].set_result(make_found(10))
    d.step()
    assert answers(ask("cmpl-1")) == [(0, 2, "found", "nixl")]
    p.add("p", {"do_remote_decode": True})
    p.step()
    p.step()
    p.moving.ended.append(p.ended["p"]["remote_request_id"])
    p.step()
    [(wanted, _, _)] = d.moving.fetches
    missing = [MISSING] * len(wanted.keys[0])
    assert d.moving.reports is not None
    d.moving.reports.tell(Moved("nixl", Operation.LOAD, wanted.keys[0], missing, {}, 0.1))
    report = ask("cmpl-1")
    assert answers(report) == [(0, 2, "removed", "")]
    assert "gone from nixl before it was loaded" in report["runs"][0]["text"]
    assert "its lease ended" in report["runs"][0]["text"]
    d.add("refused", ticket_params())
    d.asking.asked[LEASE].set_exception(TimeoutError("no answer of P"))
    d.step()
    assert ask("refused")["runs"][0]["text"] == "refused: no answer of P"
