"""States of recurrent layers: P leaves the last token to D, and D loads the one state it needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.storage.keys import group_of
from kvxfer.storage.prompt_keys import PromptKeys
from tests.integrations.pd_engine import Engine, engine_config, full, recurrent
from tests.integrations.pd_fakes import (
    LEASE,
    make_blocks,
    make_found,
    make_request,
    ticket_params,
)
from tests.integrations.test_prefill_decode_decode import Side

LISTEN = "127.0.0.1:7100"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": None}
OVERLAP = PREFILL | {"remote_request_id": LEASE}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    config = engine_config(tmp_path, listen=LISTEN)
    config.cache_config.mamba_cache_mode = "align"
    return Engine(monkeypatch, config, full(), recurrent())


@pytest.fixture
def side() -> Side:
    return Side(None, num_states=1)


def make_new(tokens: int = 10, **fields: Any) -> Any:
    """Make a request of P that is new."""
    request = make_request(PREFILL, tokens=tokens, **({"max_tokens": 1} | fields))
    request._all_token_ids = list(request.prompt_token_ids)
    return request


# P.


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
@pytest.mark.parametrize(("tokens", "num_blocks"), [(2, 1), (9, 2), (10, 3), (40, 10)])
def test_p_lends_the_state_before_the_last_token(
    engine: Engine, params: dict[str, Any], tokens: int, num_blocks: int
) -> None:
    request = engine.add("p", params, tokens=tokens)
    computed = 0
    while "p" not in engine.ended:
        computed += engine.step().get("p", 0)
    assert computed == request.num_prompt_tokens == tokens - 1
    assert engine.ended["p"]["remote_num_tokens"] == tokens - 1
    engine.step()
    lent = [key for _, keys, _, _ in engine.moving.offers for key in keys]
    assert [group_of(key) for key in lent].count(1) == 1
    assert len({key for key in lent if group_of(key) == 0}) == num_blocks
    engine.moving.ended.append(engine.moving.offers[-1][0])
    engine.step()
    engine.require_over()


@pytest.mark.parametrize(("tokens", "max_tokens"), [(10, 2), (1, 1)])
def test_p_lends_nothing_where_it_computes_the_last_token_itself(
    engine: Engine, tokens: int, max_tokens: int
) -> None:
    engine.add("p", PREFILL, tokens=tokens, max_tokens=max_tokens)
    while "p" not in engine.ended:
        assert engine.step()
    if max_tokens > 1:
        assert engine.ended == {"p": None}
    engine.step()
    lease, *_ = engine.moving.offers[-1]
    states = [key for _, keys, _, _ in engine.moving.offers for key in keys if group_of(key) == 1]
    prompt = PromptKeys(range(tokens), scope=b"\x93\xc0\xc0\x90")
    assert prompt.state_key(1, tokens - 1) not in states
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


def test_the_callers_list_of_tokens_is_left_alone() -> None:
    request = make_new()
    tokens = request.prompt_token_ids
    Prompts(1).leave_out_last(request)
    assert request.prompt_token_ids == request._all_token_ids == list(range(9))
    assert request.num_prompt_tokens == 9
    assert tokens == list(range(10))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 2},
        {"tokens": 1},
        {"prompt_embeds": object()},
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
        {
            "mm_features": [
                SimpleNamespace(
                    identifier="i",
                    mm_hash="i",
                    mm_position=SimpleNamespace(offset=8, length=2),
                )
            ]
        },
    ],
)
def test_a_request_that_needs_its_last_token_is_left_as_it_is(fields: dict[str, Any]) -> None:
    request = make_new(**fields)
    before = list(request.prompt_token_ids)
    Prompts(1).leave_out_last(request)
    assert request.prompt_token_ids == request._all_token_ids == before
    assert request.num_prompt_tokens == len(before)


# D.


def plan(side: Side, *blocks: list[int], tokens: int, hashed: tuple[int, ...] = ()) -> Any:
    """Plan the load of a prompt of 10 tokens; `tokens` are what vLLM allocated blocks for."""
    request = make_request(ticket_params())
    side.scheduler.on_new_request(request)
    side.handover.asked[LEASE].set_result(make_found(9, num_groups=2, num_states=1))
    assert side.scheduler.num_matched_tokens(request, 0) == (9, True)
    side.scheduler.on_alloc(request, make_blocks(*blocks, hashed=hashed), tokens)
    [fetch] = side.planned()
    return fetch.wanted


def test_d_loads_one_state_into_the_block_of_its_last_token(side: Side) -> None:
    wanted = plan(side, [5, 6, 7], [0, 0, 8], tokens=9)
    assert wanted.block_ids == [[5, 6, 7], [8]]
    prompt = PromptKeys(range(9), scope=b"\x93\xc0\xc0\x90")
    assert wanted.keys == [prompt.block_keys(0, 4, 9), [prompt.state_key(1, 9)]]
    assert (wanted.first_token, wanted.num_tokens) == (0, 9)


def test_what_vllm_trims_asks_for_a_state_that_p_does_not_have(side: Side) -> None:
    wanted = plan(side, [5, 6], [0, 8], tokens=8)
    whole = PromptKeys(range(9), scope=b"\x93\xc0\xc0\x90").state_key(1, 9)
    assert wanted.block_ids[1] == [8]
    assert wanted.keys[1] != [whole]


@pytest.mark.parametrize(("blocks", "hashed"), [([0, 0, 8], (8,)), ([0, 0, 0], ()), ([0, 8], ())])
def test_a_state_that_cannot_be_written_fails_the_load(
    side: Side, blocks: list[int], hashed: tuple[int, ...]
) -> None:
    wanted = plan(side, [5, 6, 7], blocks, tokens=9, hashed=hashed)
    assert wanted.block_ids[1] == [-1]
