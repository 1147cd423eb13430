"""D's scheduler: a request is asked about once, its lease is released once, and nothing stays."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from kvxfer.endpoint import Endpoint
from kvxfer.errors import CacheMismatchError, PeerTimeoutError
from kvxfer.integrations.vllm.prefill_decode.decode import DecodeScheduler
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.integrations.vllm.prefill_decode.metrics import PREFIX, Counters
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.settings import Settings
from kvxfer.integrations.vllm.prefill_decode.step_data import Fetch, StepData
from tests.clock import Clock
from tests.integrations.pd_fakes import (
    BLOCK,
    LEASE,
    FakeHandover,
    make_blocks,
    make_found,
    make_request,
    ticket_params,
)


class Side:
    """D's scheduler with a hand-over of the test."""

    def __init__(
        self, *windows: int | None, num_states: int = 0, own: Endpoint | None = None
    ) -> None:
        self.handover = FakeHandover()
        self.counters = Counters()
        windows = (windows or (None,)) + (1,) * num_states
        has_states = (False,) * (len(windows) - num_states) + (True,) * num_states
        groups = Groups((BLOCK,) * len(windows), windows, has_states)
        self.scheduler = DecodeScheduler(
            self.handover,  # type: ignore[arg-type] # it has the same methods
            Settings.parse({}),
            groups=groups,
            prompts=Prompts(groups.num_last_tokens),
            counters=self.counters,
            own=own,
        )

    def planned(self) -> list[Fetch]:
        step = StepData()
        self.scheduler.plan(step)
        return step.fetches

    def counts(self) -> dict[str, int]:
        series = self.counters.take().data["data"]
        return {
            "/".join((name.removeprefix(PREFIX), *labels)): number
            for name, values in series.items()
            for labels, number in values.items()
        }

    def answer(self, tokens: int = 10, **fields: Any) -> None:
        self.handover.asked[LEASE].set_result(make_found(tokens, **fields))

    def require_over(self) -> None:
        assert self.scheduler.num_requests == 0
        assert self.handover.released == {LEASE: 1}


@pytest.fixture
def side() -> Side:
    return Side()


def test_every_token_but_the_last_is_loaded(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    assert side.scheduler.num_matched_tokens(request, 0) == (None, False)
    side.answer()
    assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 9)
    [fetch] = side.planned()
    assert (fetch.wanted.first_token, fetch.wanted.num_tokens) == (0, 9)
    assert fetch.wanted.block_ids == [[5, 6, 7]]
    assert len(fetch.wanted.keys[0]) == 3
    assert not side.handover.released
    side.scheduler.on_received(["r"])
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    side.scheduler.finish(request)
    side.require_over()


def test_an_adapter_that_is_trained_anew_is_not_loaded(side: Side, tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    fields = {"lora_name": "tuned", "lora_int_id": 1, "lora_path": str(tmp_path)}
    request = make_request(ticket_params(), lora_request=SimpleNamespace(**fields))
    side.scheduler.on_new_request(request)
    weights.write_bytes(b"other")
    side.answer()
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    assert side.counts()["refused/no_tokens"] == 1
    side.scheduler.finish(request)
    side.require_over()


def test_what_vllm_trims_is_trimmed_at_the_end(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer()
    assert side.scheduler.num_matched_tokens(request, 4) == (5, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6], hashed=[5]), 4)
    [fetch] = side.planned()
    assert (fetch.wanted.first_token, fetch.wanted.num_tokens) == (4, 8)


@pytest.mark.parametrize(("tokens", "local"), [(10, 9), (10, 10), (9, 8), (1, 0)])
def test_nothing_is_loaded_where_only_the_last_token_is_missing(
    side: Side, tokens: int, local: int
) -> None:
    request = make_request(ticket_params(), tokens=tokens)
    side.scheduler.on_new_request(request)
    side.answer(tokens)
    assert side.scheduler.num_matched_tokens(request, local) == (0, False)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 0)
    assert not side.planned()
    side.scheduler.finish(request)
    side.require_over()


def test_whole_blocks_are_loaded_of_a_part(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer(7)
    assert side.scheduler.num_matched_tokens(request, 0) == (4, True)


def test_a_prompt_that_p_does_not_have_is_computed_here(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer(0)
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    assert side.counts()["refused/missing"] == 1


def test_a_request_that_was_never_queued_releases_its_lease_without_a_question(side: Side) -> None:
    side.scheduler.finish(make_request(ticket_params()))
    assert not side.handover.asked
    side.require_over()


def test_a_closed_hand_over_stops_nothing(side: Side) -> None:
    first, second = (make_request(ticket_params(), name=name) for name in "ab")
    side.scheduler.on_new_request(first)
    side.handover.is_closed = True
    side.scheduler.on_new_request(second)
    assert side.scheduler.num_matched_tokens(second, 0) == (0, False)
    for request in (first, second):
        side.scheduler.finish(request)
    assert side.scheduler.num_requests == 0


def test_requests_of_one_ticket_release_it_when_the_last_of_them_has_ended(side: Side) -> None:
    """Several answers to one prompt, `n` of OpenAI's interface, have the same parameters."""
    requests = [make_request(ticket_params(), name=name) for name in ("0_r", "1_r", "2_r")]
    for request in requests[:2]:
        side.scheduler.on_new_request(request)
        side.answer()
        assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
        side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 9)
    side.scheduler.finish(requests[2])  # aborted before it was queued
    side.scheduler.on_received(["0_r"])
    side.scheduler.finish(requests[0])
    assert not side.handover.released
    side.scheduler.on_received(["1_r"])
    side.scheduler.finish(requests[1])
    side.require_over()


def test_a_local_hit_is_not_loaded_and_its_blocks_are_not_written(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer()
    assert side.scheduler.num_matched_tokens(request, 4) == (5, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7], hashed=[5]), 5)
    [fetch] = side.planned()
    assert fetch.wanted.block_ids == [[0, 6, 7]]
    assert (fetch.wanted.first_token, fetch.wanted.num_tokens) == (4, 9)
    assert len(fetch.wanted.keys[0]) == 2


def test_a_load_that_goes_on_keeps_its_lease(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer()
    side.scheduler.num_matched_tokens(request, 0)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 9)
    side.scheduler.finish(request)
    assert not side.handover.released
    side.scheduler.on_received(["r"])
    side.require_over()


def test_pages_that_are_still_computed_are_waited_for_by_the_load(side: Side) -> None:
    request = make_request(ticket_params(transfer_mode="overlap"))
    side.scheduler.on_new_request(request)
    side.answer(is_complete=False)
    assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 9)
    [fetch] = side.planned()
    assert fetch.waits
    assert fetch.lease == LEASE


def test_blocks_before_a_window_are_not_asked_for() -> None:
    side = Side(None, 3)
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer(num_groups=2)
    assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7], [0, 8, 9]), 9)
    [fetch] = side.planned()
    assert [len(keys) for keys in fetch.wanted.keys] == [3, 2]
    assert fetch.wanted.first_blocks == [0, 1]


def test_a_load_that_another_connector_does_releases_the_lease(side: Side) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.answer()
    assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
    side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 0)
    assert side.handover.released == {LEASE: 1}
    side.scheduler.finish(request)
    side.require_over()


def test_an_answer_that_does_not_come_in_time_is_not_waited_for(
    side: Side, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    clock.now += 2.9
    assert side.scheduler.num_matched_tokens(request, 0) == (None, False)
    clock.now += 0.2
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    assert side.handover.asked[LEASE].cancelled()
    assert "no answer in time" in caplog.text
    assert side.counts() == {"tickets": 1, "refused/no_answer": 1}
    side.scheduler.finish(request)
    side.require_over()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CacheMismatchError(0, "dtype", "a", "b"), "other_geometry"),
        (PeerTimeoutError("127.0.0.1:1", "a description", 1.0), "no_answer"),
        (UnicodeError("label too long"), "error"),
        (ValueError("\x1b[31m" + "x" * 10_000), "error"),
    ],
)
def test_an_error_is_a_warning_and_a_count(
    side: Side, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.handover.asked[LEASE].set_exception(error)
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert len(record.getMessage()) < 600
    assert "\x1b" not in record.getMessage()
    assert side.counts()[f"refused/{reason}"] == 1
    side.scheduler.finish(request)
    side.require_over()


def test_of_a_router_that_sends_both_legs_here_there_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side(own=Endpoint("127.0.0.1", 7200))
    for name in ("1", "2", "3"):
        request = make_request(ticket_params(), name=name)
        side.scheduler.on_new_request(request)
        assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
        side.scheduler.on_alloc(request, make_blocks([5, 6, 7]), 0)
        side.scheduler.finish(request)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert not side.handover.asked
    assert not side.planned()
    assert side.handover.released == {LEASE: 3}
    assert side.counts() == {"refused/same_engine": 3}
    assert side.scheduler.num_requests == 0


def test_a_forged_ticket_asks_nobody(side: Side) -> None:
    request = make_request({"do_remote_prefill": True})
    side.scheduler.on_new_request(request)
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    side.scheduler.on_alloc(request, make_blocks([5]), 0)
    side.scheduler.finish(request)
    assert side.scheduler.num_requests == 0
    assert not side.handover.asked
    assert side.counts() == {"refused/invalid_parameters": 1}


@pytest.mark.parametrize("prompt", [None, [], [10**30], ["a"]])
def test_a_prompt_without_tokens_is_computed_here(side: Side, prompt: Any) -> None:
    request = make_request(ticket_params())
    request.prompt_token_ids = prompt
    side.scheduler.on_new_request(request)
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    side.scheduler.finish(request)
    assert not side.handover.asked
    side.require_over()


def test_a_request_that_reads_no_cache_loads_nothing(side: Side) -> None:
    request = make_request(ticket_params(), skip_reading_prefix_cache=True)
    side.scheduler.on_new_request(request)
    assert side.scheduler.num_matched_tokens(request, 0) == (0, False)
    assert side.counts()["refused/reads_no_cache"] == 1
    side.scheduler.finish(request)
    side.require_over()
