"""The connector under vLLM's own scheduler: no assert of vLLM, every block free at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from vllm.v1.core.sched.output import SchedulerOutput

from kvxfer.errors import CacheMismatchError, PeerTimeoutError
from kvxfer.integrations.vllm.prefill_decode.metrics import PREFIX
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.storage.keys import group_of
from kvxfer.storage.prompt_keys import PromptKeys
from tests.clock import Clock
from tests.integrations.pd_engine import Engine, engine_config, full, recurrent, sliding
from tests.integrations.pd_fakes import (
    BLOCK,
    LEASE,
    make_blocks,
    make_found,
    ticket_params,
)

LISTEN = "127.0.0.1:7100"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": None}
OVERLAP = PREFILL | {"remote_request_id": LEASE}
NO_SCOPE = b"\x93\xc0\xc0\x90"
"""Scope of prompts without a salt, an adapter or images."""
GROUPS = {"one": [full()], "several": [full(), sliding(6)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(params=sorted(GROUPS))
def engine(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch, engine_config(folder, listen=LISTEN), *GROUPS[request.param])


def one_group(folder: Path, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> Engine:
    return Engine(monkeypatch, engine_config(folder, listen=LISTEN, **extra), full())


def is_several(engine: Engine) -> bool:
    return len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1


# P.


@pytest.mark.parametrize("window", [1, 2, 6, 8])
@pytest.mark.parametrize("tokens", range(9, 13))
def test_the_window_of_the_last_token_is_lent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, window: int, tokens: int
) -> None:
    engine = Engine(monkeypatch, engine_config(folder, listen=LISTEN), full(), sliding(window))
    prompt = Prompts(1).keys_for_decode(engine.add("d", None, tokens=tokens))
    assert prompt is not None
    engine.add("p", PREFILL, tokens=tokens)
    while "p" not in engine.ended:
        engine.step()
    engine.step()
    lent = {key for _, keys, _, _ in engine.moving.offers for key in keys}
    last = tokens - 1
    needed = prompt.block_keys(0, BLOCK, last)
    needed += prompt.block_keys(1, BLOCK, last, first_token=max(last - window + 1, 0))
    assert lent.issuperset(needed)


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
def test_a_prompt_that_goes_on_is_not_lent(engine: Engine, params: dict[str, Any]) -> None:
    engine.add("p", params, resumable=True)
    engine.step()
    engine.add("p", params, tokens=3)  # the end of the session
    while "p" not in engine.ended:
        engine.step()
    assert engine.ended == {"p": None}
    engine.step()
    engine.moving.ended += {lease for lease, *_ in engine.moving.offers}
    engine.step()
    engine.require_over()


def test_a_name_that_a_router_gives_again_is_that_of_its_first_request(engine: Engine) -> None:
    """Workers report leases by name: the end of the first would free the blocks of the second."""
    engine.add("a", OVERLAP, tokens=40)
    engine.step()
    engine.abort("a")  # before a block was offered: vLLM has its blocks already
    engine.add("b", OVERLAP, tokens=6)
    engine.step()
    lease = engine.ended["b"]["remote_request_id"]
    assert engine.moving.given_up == [LEASE] != [lease]
    free = engine.num_free
    engine.moving.ended.append(LEASE)
    engine.step()
    assert engine.moving.offers[-1][0] == lease
    assert engine.num_free == free < 31
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


# D.


def load(engine: Engine, *, tokens: int = 10, **fields: Any) -> Any:
    """Bring a request to its load; return what is wanted, and its end."""
    engine.add("d", ticket_params(**fields), tokens=tokens)
    assert engine.step() == {}
    num_there = tokens - is_several(engine)  # P leaves out the last one
    engine.asking.asked[LEASE].set_result(make_found(num_there, num_groups=1 + is_several(engine)))
    assert engine.step() == {}
    [(wanted, _, end)] = engine.moving.fetches
    return wanted, end


@pytest.mark.parametrize(
    ("head", "has_states", "first_token"),
    [(BLOCK, False, BLOCK), (BLOCK + 2, False, 0), (BLOCK, True, 0)],
)
def test_what_tiers_have_is_not_loaded_from_p_where_it_ends_with_a_block_and_no_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch, head: int, first_token: int, *, has_states: bool
) -> None:
    engine = one_group(folder, monkeypatch)
    tiers = engine.connector._tiers
    monkeypatch.setattr(tiers, "get_num_new_matched_tokens", lambda *_: (head, True))
    monkeypatch.setattr(engine.connector, "_has_states", has_states)
    wanted, _ = load(engine)
    assert (wanted.first_token, wanted.num_tokens) == (first_token, 9)


def test_a_load_that_fails_fails_its_request_where_that_is_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one_group(folder, monkeypatch, on_failure="fail")
    _, end = load(engine)
    end.set_exception(PeerTimeoutError("127.0.0.1:1", "a description", 1.0))
    engine.step()
    engine.step()
    assert "d" in engine.ended
    engine.require_over()


def answer_by(outcome: Any) -> Callable[[Engine, Clock], object]:
    """Let P answer, with what it has or with an error."""
    is_error = isinstance(outcome, Exception)

    def answer(engine: Engine, _: Clock) -> None:
        asked = engine.asking.asked[LEASE]
        (asked.set_exception if is_error else asked.set_result)(outcome)

    return answer


def stay_silent(_: Engine, clock: Clock) -> None:
    """Let the time pass in which P may answer."""
    clock.now += 3.1


def want_every_log_probability(engine: Engine, _: Clock) -> None:
    engine.scheduler.requests["d"].skip_reading_prefix_cache = True


@pytest.mark.parametrize(
    ("params", "then", "reason"),
    [
        ({}, answer_by(make_found(0)), "missing"),
        ({}, answer_by(CacheMismatchError(0, "dtype", "a", "b")), "other_geometry"),
        ({}, answer_by(PeerTimeoutError("127.0.0.1:1", "a description", 1.0)), "no_answer"),
        ({}, answer_by(UnicodeError("label too long")), "error"),
        ({}, answer_by(ValueError("\x1b[31m" + "x" * 10_000)), "error"),
        ({}, stay_silent, "no_answer"),
        ({}, want_every_log_probability, "reads_no_cache"),
        ({"remote_port": 7100}, None, "same_engine"),
        ({"remote_host": None}, None, "invalid_parameters"),
    ],
)
def test_a_prompt_that_p_does_not_give_is_computed_here_and_counted_by_its_reason(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    params: dict[str, Any],
    then: Callable[[Engine, Clock], object] | None,
    reason: str,
) -> None:
    engine = one_group(folder, monkeypatch)
    request = engine.add("d", ticket_params(**params))
    if then is not None:
        then(engine, clock)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    counted = engine.connector.get_kv_connector_stats().data["data"]
    assert counted[f"{PREFIX}refused"] == {(reason,): 1}
    assert engine.step() == {"d": 10}
    engine.step()
    engine.require_over()
    assert bool(engine.asking.asked) is (then is not None)
    assert engine.asking.released == ({} if reason == "invalid_parameters" else {LEASE: 1})
    (said,) = [each.getMessage() for each in caplog.records if "request d " in each.getMessage()]
    assert len(said) < 600
    assert "\x1b" not in said


# States of recurrent layers: P leaves the last token to D, and D loads the one state it needs.


@pytest.fixture
def recurrent_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    config = engine_config(folder, listen=LISTEN)
    config.cache_config.mamba_cache_mode = "align"
    return Engine(monkeypatch, config, full(), recurrent())


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
@pytest.mark.parametrize(("tokens", "num_blocks"), [(2, 1), (9, 2), (10, 3), (40, 10)])
def test_p_lends_the_state_before_the_last_token(
    recurrent_engine: Engine, params: dict[str, Any], tokens: int, num_blocks: int
) -> None:
    engine = recurrent_engine
    engine.add("p", params, tokens=tokens)
    computed = 0
    while "p" not in engine.ended:
        computed += engine.step().get("p", 0)
    assert computed == engine.ended["p"]["remote_num_tokens"] == tokens - 1
    engine.step()
    lent = [key for _, keys, _, _ in engine.moving.offers for key in keys]
    assert [group_of(key) for key in lent].count(1) == 1
    assert len({key for key in lent if group_of(key) == 0}) == num_blocks
    engine.moving.ended.append(engine.moving.offers[-1][0])
    engine.step()
    engine.require_over()


@pytest.mark.parametrize(("tokens", "max_tokens"), [(10, 2), (1, 1)])
def test_p_lends_no_state_where_it_computes_the_last_token_itself(
    recurrent_engine: Engine, tokens: int, max_tokens: int
) -> None:
    engine = recurrent_engine
    engine.add("p", PREFILL, tokens=tokens, max_tokens=max_tokens)
    while "p" not in engine.ended:
        assert engine.step()
    engine.step()
    lease, *_ = engine.moving.offers[-1]
    lent = [key for _, keys, _, _ in engine.moving.offers for key in keys]
    assert PromptKeys(range(tokens), scope=NO_SCOPE).state_key(1, tokens - 1) not in lent
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


@pytest.mark.parametrize(
    ("blocks", "hashed", "written"),
    [
        ([0, 0, 8], (), 8),  # the block of the last token
        ([0, 0, 8], (8,), -1),  # which others read
        ([0, 0, 0], (), -1),
        ([0, 8], (), -1),
    ],
)
def test_d_loads_one_state_or_fails_where_it_cannot_be_written(
    recurrent_engine: Engine, blocks: list[int], hashed: tuple[int, ...], written: int
) -> None:
    engine, connector = recurrent_engine, recurrent_engine.connector
    request = engine.add("d", ticket_params())
    engine.asking.asked[LEASE].set_result(make_found(9, num_groups=2, num_states=1))
    assert connector.get_num_new_matched_tokens(request, 0) == (9, True)
    allocated = make_blocks([5, 6, 7], blocks, hashed=hashed)
    connector.update_state_after_alloc(request, allocated, 9)
    [fetch] = connector.build_connector_meta(SchedulerOutput.make_empty()).fetches
    assert fetch.wanted.block_ids == [[5, 6, 7], [written]]
    prompt = PromptKeys(range(9), scope=NO_SCOPE)
    assert fetch.wanted.keys == [prompt.block_keys(0, 4, 9), [prompt.state_key(1, 9)]]
