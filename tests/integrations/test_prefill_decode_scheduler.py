"""The connector under vLLM's own scheduler: no assert of vLLM, every block free at the end."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from vllm.lora.request import LoRARequest

from kvxfer.errors import PeerTimeoutError
from kvxfer.integrations.vllm.prefill_decode.interface import HAS_TRANSFER_RESULTS
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.lending.reader import Fetched
from tests.examples import examples
from tests.integrations.pd_engine import Engine, engine_config, full, sliding
from tests.integrations.pd_fakes import BLOCK, LEASE, FakeHandover, make_found, ticket_params

LISTEN = "127.0.0.1:7100"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": None}
OVERLAP = PREFILL | {"remote_request_id": LEASE}
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


@pytest.fixture
def can_load(engine: Engine) -> None:
    if is_several(engine) and not HAS_TRANSFER_RESULTS:
        pytest.skip("no load of several groups fails in this vLLM")


# P.


def test_blocks_of_a_finished_prompt_are_kept_until_they_are_sent(engine: Engine) -> None:
    engine.add("p", PREFILL)
    engine.step()
    params = engine.ended["p"]
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 7100)
    assert params["remote_num_tokens"] == 10 - is_several(engine)
    free = engine.num_free
    engine.step()
    announced, (lease, keys, ids, is_complete) = engine.moving.offers
    assert announced == (lease, [], [], False), "D may ask before the blocks are offered"
    assert lease == params["remote_request_id"]
    assert is_complete
    assert len(keys) == len(ids) == (5 if is_several(engine) else 3)
    assert engine.num_free == free < 31
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


@pytest.mark.parametrize("window", [1, 2, 6, 8])
@pytest.mark.parametrize("tokens", range(9, 18))
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


def test_an_adapter_that_is_trained_anew_is_not_lent(engine: Engine, tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    lora = LoRARequest("tuned", 1, str(tmp_path))
    engine.add("first", PREFILL, lora=lora)
    engine.step()
    assert "remote_host" in engine.ended["first"]
    engine.add("second", PREFILL, lora=lora)
    weights.write_bytes(b"other")
    engine.step()
    assert engine.ended["second"] is None


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
def test_a_prompt_that_is_aborted_in_the_middle_lends_nothing_more(
    engine: Engine, params: dict[str, Any]
) -> None:
    engine.add("p", params, tokens=40)
    engine.step()
    engine.step()
    engine.abort("p")
    [lease] = {lease for lease, *_ in engine.moving.offers}
    assert (lease == LEASE) is (params is OVERLAP)
    assert any(ids for _, _, ids, _ in engine.moving.offers)
    assert engine.num_free < 31
    engine.step()
    assert engine.moving.given_up == [lease]
    assert engine.moving.offers[-1][3]
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


def test_blocks_that_another_request_computes_in_this_step_are_not_offered_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one_group(folder, monkeypatch)
    engine.add("first", None, tokens=9, max_tokens=2)
    engine.add("p", OVERLAP, tokens=30)
    computed = engine.step()
    assert computed["p"] < 16  # it has blocks of the first one
    assert not any(ids for _, _, ids, _ in engine.moving.offers)
    engine.step()
    assert any(ids for _, _, ids, _ in engine.moving.offers)


def test_leases_of_a_preempted_prompt_end_before_its_blocks_are_written(engine: Engine) -> None:
    request = engine.add("p", OVERLAP, tokens=40)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    engine.moving.offers.clear()
    engine.step()
    assert engine.moving.revoked == [LEASE]
    engine.moving.ended.append(LEASE)
    for _ in range(4):
        engine.step()
    lease = engine.ended["p"]["remote_request_id"]
    assert all(each[0] == lease for each in engine.moving.offers)
    engine.moving.ended.append(lease)
    engine.step()
    engine.require_over()


def test_a_reset_of_the_connector_ends_leases_and_the_next_one_succeeds(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add(name, PREFILL, tokens=10)
    while len(engine.ended) < 2:
        engine.step()
    leases = [engine.ended[name]["remote_request_id"] for name in ("a", "b")]
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.connector._prefill.num_leases == 2, "readers may be at their blocks"
    engine.step()
    assert engine.moving.given_up == leases
    engine.moving.ended += leases
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.require_over()
    engine.step()
    assert engine.moving.given_up == leases


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


@pytest.mark.parametrize("settings", [{}, {"listen": LISTEN}])
def test_an_engine_that_lends_nothing_says_so_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
) -> None:
    role = "kv_consumer" if settings else "kv_both"
    engine = Engine(monkeypatch, engine_config(folder, role, **settings), full())
    for name in "ab":
        engine.add(name, PREFILL)
    engine.step()
    assert engine.ended == {"a": None, "b": None}
    assert caplog.text.count("lends nothing") == 1
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


@pytest.mark.usefixtures("can_load")
def test_a_loaded_prompt_computes_its_last_token(engine: Engine) -> None:
    wanted, end = load(engine)
    assert [any(ids) for ids in wanted.block_ids] == [True] * (1 + is_several(engine))
    assert engine.step() == {}
    end.set_result(Fetched([[]] * (1 + is_several(engine))))
    engine.step()
    assert engine.asking.released == {LEASE: 1}
    assert engine.step() == {"d": 1}
    engine.step()
    engine.require_over()
    assert engine.asking.released == {LEASE: 1}


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


def test_pages_that_do_not_arrive_are_computed_from_the_first_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one_group(folder, monkeypatch)
    wanted, end = load(engine)
    end.set_result(Fetched([wanted.block_ids[0][1:]]))
    engine.step()
    assert engine.step() == {"d": 10 - BLOCK}
    engine.step()
    engine.require_over()


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


@pytest.mark.usefixtures("can_load")
@pytest.mark.parametrize("is_good", [True, False])
def test_blocks_of_an_aborted_load_are_kept_until_nothing_writes_to_them(
    engine: Engine, *, is_good: bool
) -> None:
    wanted, end = load(engine)
    engine.abort("d")
    engine.step()
    assert engine.num_free < 31
    assert not engine.asking.released
    end.set_result(Fetched([[] if is_good else ids for ids in wanted.block_ids]))
    engine.step()
    engine.require_over()
    assert engine.asking.released == {LEASE: 1}


ABSURD: list[Any] = [
    {"do_remote_prefill": True},
    ticket_params(remote_port=10**5000),
    ticket_params(remote_host="\ud800"),
    ticket_params(remote_request_id=[[]]),
    ticket_params(tp_size={}),
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_decode": True, "remote_request_id": 10**5000},
    {"do_remote_decode": [True], "do_remote_prefill": "yes"},
]


@pytest.mark.parametrize("params", ABSURD, ids=range(len(ABSURD)))
def test_no_parameter_stops_an_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, params: Any
) -> None:
    engine = one_group(folder, monkeypatch)
    engine.add("x", params)
    assert engine.step() == {"x": 10}
    engine.step()
    engine.moving.ended += [lease for lease, *_ in engine.moving.offers]
    engine.step()
    engine.require_over()


# Both, in any order.

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "step", "answer", "load", "fail", "sent", "abort", "reset"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@pytest.mark.parametrize("groups", sorted(GROUPS))
@examples(25)
@given(events=EVENTS)
def test_any_order_of_events_leaves_every_block_free(
    events: list[tuple[str, int]],
    groups: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("model")
        engine = Engine(monkeypatch, engine_config(folder, listen=LISTEN), *GROUPS[groups])
        for index, (event, number) in enumerate(events):
            act(engine, event, number, f"{event}{index}")
        for _ in range(40):
            for event in ("answer", "load", "sent", "step"):
                act(engine, event, 0, "")
        engine.require_over()
        assert all(count == 1 for count in engine.asking.released.values())


def act(engine: Engine, event: str, number: int, name: str) -> None:
    """Let something happen to an engine."""
    num_groups = 1 + is_several(engine)
    if event == "add":
        lease = f"{name:0>16}"
        params = [
            None,
            PREFILL,
            OVERLAP | {"remote_request_id": lease},
            ticket_params(remote_request_id=lease),
            ticket_params(remote_request_id=lease, transfer_mode="overlap"),
            ticket_params(remote_request_id=lease, do_remote_decode=True),
        ][number]
        engine.add(name, params, tokens=3 + 7 * number)
    elif event == "step":
        engine.step()
    elif event == "answer":
        for lease, answer in engine.asking.asked.items():
            if not answer.done():
                tokens = 3 + 7 * 3 if number < 3 else BLOCK * number
                found = make_found(tokens, num_groups=num_groups) if number else None
                answer.set_result(found or make_found(0, num_groups=num_groups))
                assert lease
                break
    elif event in ("load", "fail"):
        end_load(engine.moving, number, fails=event == "fail")
    elif event == "sent":
        open_leases = [each[0] for each in engine.moving.offers if each[3]]
        engine.moving.offers = [each for each in engine.moving.offers if not each[3]]
        engine.moving.ended += open_leases
    elif event == "abort" and engine.scheduler.requests:
        names = sorted(engine.scheduler.requests)
        engine.abort(names[number % len(names)])
    elif event == "reset":
        with suppress(RuntimeError):  # vLLM's answer as long as blocks are lent or loaded
            engine.scheduler.reset_prefix_cache(reset_running_requests=number > 2)
            engine.scheduler.reset_connector_cache()


def end_load(handover: FakeHandover, number: int, *, fails: bool) -> None:
    """End the first load that goes on."""
    for wanted, _, end in handover.fetches:
        if end.done():
            continue
        if fails and number == 0:
            end.set_exception(PeerTimeoutError("127.0.0.1:1", "blocks", 1.0))
        else:
            bad = [[each for each in ids[number:] if each] for ids in wanted.block_ids]
            end.set_result(Fetched(bad if fails else [[] for _ in bad]))
        return
