"""The connector under vLLM's own scheduler: no assert of vLLM, every block free at the end."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from kvxfer import errors
from kvxfer.endpoint import Endpoint
from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.offloading.offloading_spec import SPEC
from kvxfer.integrations.vllm.prefill_decode import connector as connector_module
from kvxfer.integrations.vllm.prefill_decode.groups import Groups, why_not
from kvxfer.integrations.vllm.prefill_decode.metrics import PREFIX, Counters
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.ticket import Ticket
from kvxfer.integrations.vllm.prefill_decode.worker import (
    Fetch,
    Offer,
    PrefillDecodeWorker,
    StepData,
)
from kvxfer.lending import Fetched
from kvxfer.lending.reader import Wanted
from kvxfer.storage import PromptKeys, group_of
from kvxfer.storage.observer import LENT, Reports
from tests.clock import Clock
from tests.integrations.pd_engine import (
    BLOCK,
    FULL,
    LEASE,
    LISTEN,
    Engine,
    FakeHandover,
    StartEngine,
    cache_config,
    engine_config,
    full,
    make_found,
    recurrent,
    sliding,
    start_engine,
    ticket_params,
)
from tests.recorder import Recorder

__all__ = ["start_engine"]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_request_id": None}
OVERLAP = PREFILL | {"remote_request_id": LEASE}
NO_SCOPE = b"\x93\xc0\xc0\x90"
"""Scope of prompts without a salt, an adapter or images."""
GROUPS = {"one": [full()], "several": [full(), sliding(6)]}


@pytest.fixture(params=sorted(GROUPS))
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> Engine:
    return start_engine(*GROUPS[request.param])


def is_several(engine: Engine) -> bool:
    return len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1


# P.


def lend(engine: Engine, params: Any = PREFILL, **request: Any) -> tuple[int, set[Any]]:
    """Let P end a request; return the tokens that it computed, and the keys that it lends."""
    engine.add("p", params, **request)
    num_computed = 0
    while "p" not in engine.ended:
        num_computed += engine.step()["p"]
    engine.step()
    return num_computed, {key for _, keys, _, _ in engine.moving.offers for key in keys}


def end_leases(engine: Engine) -> None:
    engine.moving.ended += {lease for lease, *_ in engine.moving.offers}
    engine.step()
    engine.require_over()


@pytest.mark.parametrize("window", [1, 2, 6, 8])
@pytest.mark.parametrize("tokens", range(9, 13))
def test_the_window_of_the_last_token_is_lent(
    start_engine: StartEngine, window: int, tokens: int
) -> None:
    engine = start_engine(full(), sliding(window))
    prompt = Prompts(1).keys_for_decode(engine.add("d", None, tokens=tokens))
    assert prompt is not None
    last = tokens - 1
    needed = prompt.block_keys(0, BLOCK, last)
    needed += prompt.block_keys(1, BLOCK, last, first_token=max(last - window + 1, 0))
    assert lend(engine, tokens=tokens)[1].issuperset(needed)


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
def test_a_prompt_that_goes_on_is_not_lent(engine: Engine, params: dict[str, Any]) -> None:
    engine.add("p", params, resumable=True)
    engine.step()
    engine.add("p", params, tokens=3)  # the end of the session
    while "p" not in engine.ended:
        engine.step()
    assert engine.ended == {"p": None}
    engine.step()
    end_leases(engine)


def test_a_name_that_a_router_gives_again_is_that_of_its_first_request(engine: Engine) -> None:
    """Workers report leases by name, so the end of the first would free the second's blocks."""
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


def test_a_name_that_we_made_is_not_that_of_another_lease(engine: Engine) -> None:
    lend(engine)
    lease = engine.ended["p"]["remote_request_id"]
    engine.add("b", PREFILL | {"remote_request_id": lease}, tokens=6)
    while "b" not in engine.ended:
        engine.step()
    assert engine.ended["b"]["remote_request_id"] != lease
    engine.step()
    end_leases(engine)


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
def test_what_p_computed_before_a_reset_is_not_lent_after_it(
    engine: Engine, params: dict[str, Any]
) -> None:
    """VLLM cannot reset its own cache then, but resets that of its connector nevertheless."""
    engine.add("p", params, tokens=40)
    engine.step()
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    while "p" not in engine.ended:
        engine.step()
    engine.step()
    assert engine.ended == {"p": None}
    assert not any(is_complete for *_, is_complete in engine.moving.offers)
    assert {lease for lease, *_ in engine.moving.offers} == set(engine.moving.revoked)
    engine.require_over()


def test_a_prompt_that_a_reset_has_computed_anew_is_lent(engine: Engine) -> None:
    engine.add("p", PREFILL, tokens=40)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    while "p" not in engine.ended:
        engine.step()
    engine.step()
    assert engine.ended["p"]["remote_num_tokens"] == 40 - is_several(engine)
    end_leases(engine)


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
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    head: int,
    first_token: int,
    *,
    has_states: bool,
) -> None:
    engine = start_engine(full())
    tiers = engine.connector._tiers
    monkeypatch.setattr(tiers, "get_num_new_matched_tokens", lambda *_: (head, True))
    monkeypatch.setattr(engine.connector, "_has_states", has_states)
    wanted, _ = load(engine)
    assert (wanted.first_token, wanted.num_tokens) == (first_token, 9)


def test_a_load_that_fails_fails_its_request_where_that_is_wanted_and_has_no_time(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(full(), on_failure="fail")
    wanted, end = load(engine)
    end.set_result(Fetched(wanted.block_ids, missing=Counter(timed_out=3)))
    engine.step()
    engine.step()
    assert "d" in engine.ended
    engine.require_over()
    counted: Any = engine.worker.get_kv_connector_stats()
    assert counted.data["data"] == {f"{PREFIX}missing": {("timed_out",): 3}}


def answer_by(outcome: Any) -> Callable[[Engine, Clock], object]:
    def answer(engine: Engine, _: Clock) -> None:
        asked = engine.asking.asked[LEASE]
        (asked.set_exception if isinstance(outcome, Exception) else asked.set_result)(outcome)

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
        ({}, answer_by(errors.CacheMismatchError(0, "dtype", "a", "b")), "other_geometry"),
        ({}, answer_by(errors.PeerTimeoutError("127.0.0.1:1", "a description", 1.0)), "no_answer"),
        ({}, answer_by(UnicodeError("label too long")), "error"),
        ({}, answer_by(ValueError("\x1b[31m" + "x" * 10_000)), "error"),
        ({}, stay_silent, "no_answer"),
        ({}, want_every_log_probability, "reads_no_cache"),
        ({"remote_port": 7100}, None, "same_engine"),
        ({"remote_host": None}, None, "invalid_parameters"),
    ],
)
def test_a_prompt_that_p_does_not_give_is_computed_here_and_counted_by_its_reason(
    start_engine: StartEngine,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    params: dict[str, Any],
    then: Callable[[Engine, Clock], object] | None,
    reason: str,
) -> None:
    engine = start_engine(full())
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


def test_a_client_chooses_no_line_of_the_log(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The id of a request comes from its body, whatever it is."""
    engine, name = start_engine(full()), "\nERROR a line of its own\x1b[2J" * 1000
    request = engine.add(name, ticket_params(remote_host=None))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    (said,) = [each.getMessage() for each in caplog.records if "computes its prompt" in each.msg]
    assert len(said) < 600
    assert said.isprintable()


def test_what_was_loaded_from_p_before_a_reset_is_not_stored_after_it(
    start_engine: StartEngine,
) -> None:
    """VLLM cannot reset its own cache then, but resets that of its connector nevertheless."""
    engine = start_engine(full(), backend="host://?capacity=1MiB")
    engine.add("d", ticket_params())
    engine.asking.asked[LEASE].set_result(make_found(10))
    loading = engine.scheduler.schedule()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.end_step(loading, KVConnectorOutput(finished_recving={"d"}))
    running = engine.scheduler.schedule()
    assert running.num_scheduled_tokens == {"d": 1}
    assert not running.kv_connector_metadata.tiers.store_jobs
    engine.connector.shutdown()


# States of recurrent layers: P leaves the last token to D, and D loads the one state it needs.


@pytest.fixture
def recurrent_engine(start_engine: StartEngine) -> Engine:
    return start_engine(full(), recurrent())


@pytest.mark.parametrize("params", [PREFILL, OVERLAP])
@pytest.mark.parametrize(("tokens", "num_blocks"), [(2, 1), (9, 2), (10, 3), (40, 10)])
def test_p_lends_the_state_before_the_last_token(
    recurrent_engine: Engine, params: dict[str, Any], tokens: int, num_blocks: int
) -> None:
    num_computed, lent = lend(recurrent_engine, params, tokens=tokens)
    assert num_computed == recurrent_engine.ended["p"]["remote_num_tokens"] == tokens - 1
    assert [group_of(key) for key in lent].count(1) == 1
    assert [group_of(key) for key in lent].count(0) == num_blocks
    end_leases(recurrent_engine)


@pytest.mark.parametrize(("tokens", "max_tokens"), [(10, 2), (1, 1)])
def test_p_lends_no_state_where_it_computes_the_last_token_itself(
    recurrent_engine: Engine, tokens: int, max_tokens: int
) -> None:
    _, lent = lend(recurrent_engine, tokens=tokens, max_tokens=max_tokens)
    assert PromptKeys(range(tokens), scope=NO_SCOPE).state_key(1, tokens - 1) not in lent
    end_leases(recurrent_engine)


def make_blocks(*groups: Sequence[int], hashed: Sequence[int]) -> Any:
    """Make what the connector uses of vLLM's `KVCacheBlocks`; 0 is the null block."""

    def make(number: int) -> Any:
        its_hash = b"#" if number in hashed else None
        return SimpleNamespace(block_id=number, is_null=number == 0, block_hash=its_hash)

    return SimpleNamespace(blocks=[list(map(make, ids)) for ids in groups])


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


# The worker: each request is reported once, and what is not supported is refused.


def chunked() -> Any:
    return ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=8)


def test_blocks_on_a_device_are_lent_when_their_request_is_finished() -> None:
    """Kernels of an earlier step may still be running when the next one is prepared."""
    handover = FakeHandover()
    handover.is_on_device = True
    worker = PrefillDecodeWorker(handover, Counters())  # type: ignore[arg-type]
    keys = PromptKeys(range(8)).block_keys(0, 4, 8)
    worker.prepare(StepData(offers=[Offer("p", LEASE, keys[:1], [5], is_complete=False)]))
    worker.prepare(StepData(offers=[Offer("p", LEASE, keys, [5, 6], is_complete=True)]))
    assert handover.offers == [(LEASE, [], [], False), (LEASE, keys, [5, 6], True)]


def test_blocks_are_told_as_lent_once_and_as_gone_with_their_last_lease() -> None:
    handover, recorder = FakeHandover(), Recorder()
    worker = PrefillDecodeWorker(handover, Counters(), Reports([recorder], LENT))  # type: ignore[arg-type]
    keys = PromptKeys(range(8)).block_keys(0, 4, 8)
    offers = [Offer("p", LEASE, keys[:1], [5], is_complete=False)]
    offers += [Offer(lease, lease, keys, [5, 6], is_complete=True) for lease in (LEASE, "other")]
    worker.prepare(StepData(offers=offers))
    for handover.ended in ([LEASE], ["other"]):
        assert recorder.kept[LENT] == {*keys}
        worker.take_ended()
    assert (recorder.kept[LENT], recorder.mistakes) == (set(), [])


def test_a_load_that_was_cancelled_is_reported_once_and_its_blocks_are_bad() -> None:
    handover = FakeHandover()
    worker = PrefillDecodeWorker(handover, Counters())  # type: ignore[arg-type]
    keys = PromptKeys(range(8)).block_keys(0, 4, 8)
    wanted = Wanted([keys], [0], [[5, 0, 6]], first_token=0, num_tokens=8, tokens_per_block=(4,))
    fetch = Fetch("d", Ticket(LEASE, Endpoint("host", 7100)), wanted, waits=False)
    worker.begin(StepData(fetches=[fetch]))
    (*_, loading), *_ = handover.fetches
    loading.cancel()
    ended = [worker.take_ended() for _ in range(2)]
    assert [each.received for each in ended] == [{"d"}, set()]
    assert ended[0].bad_blocks == {"d": [[5, 6]]}


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([full(), recurrent(speculates=True)], "group 1 keeps states of speculative tokens"),
        ([full(), chunked()], "group 1 is a ChunkedLocalAttentionSpec"),
    ],
)
def test_a_model_that_cannot_be_handed_over_is_refused_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, specs: list[Any], reason: str
) -> None:
    assert why_not(cache_config(*specs), 1).startswith(reason)
    config = engine_config(tmp_path, listen=LISTEN)
    caches = cache_config(*specs)
    scheduler = KVXferConnector(config, KVConnectorRole.SCHEDULER, caches)
    worker = KVXferConnector(config, KVConnectorRole.WORKER, caches)
    assert caplog.text.count(reason) == 1
    worker.use_kv_caches(None)  # type: ignore[arg-type] # they are not looked at
    assert worker.get_handshake_metadata() is None
    assert not scheduler.requires_kv_delivery
    request: Any = SimpleNamespace(
        request_id="x", kv_transfer_params=ticket_params(do_remote_decode=True)
    )
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    step = scheduler.build_connector_meta(None)
    assert scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    worker.handle_preemptions(step)
    worker.bind_connector_metadata(step)
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (set(), set())
    worker.shutdown()
    scheduler.shutdown()


def test_a_group_whose_layers_have_several_windows_is_refused() -> None:
    specs = {"a": sliding(6), "b": sliding(8)}
    group = SimpleNamespace(block_size=4, kv_cache_specs=specs)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=group)])
    assert why_not(config, 1) == "the layers of group 0 have different windows"
    specs["b"] = sliding(6)
    assert not why_not(config, 2)
    group.dcp_sharded = False
    assert not why_not(config, 1)
    why = "group 0 is whole on workers that divide the tokens of other groups"
    assert why_not(config, 2) == why
    assert Groups.of(config, 2) == Groups((8,), (5,), (False,))


def test_before_030_prompts_of_several_groups_are_lent_and_not_read(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector_module, "HAS_TRANSFER_RESULTS", False)
    engine = start_engine(full(), sliding(6))
    assert caplog.text.count("before 0.30, vLLM cannot let a load of several groups fail") == 1
    engine.add("d", ticket_params(do_remote_decode=True))
    assert engine.step() == {"d": 9}  # the last one is left to D
    assert not engine.asking.asked
    assert engine.ended["d"]["do_remote_prefill"]


def test_a_producer_reads_nothing_and_a_consumer_lends_nothing(start_engine: StartEngine) -> None:
    producer = start_engine(full(), role="kv_producer")
    producer.add("d", ticket_params(do_remote_decode=True))
    assert producer.step() == {"d": 10}
    assert not producer.asking.asked
    assert producer.ended["d"] is not None
    consumer = start_engine(full(), role="kv_consumer")
    assert not consumer.connector.requires_kv_delivery
    consumer.add("d", ticket_params(do_remote_decode=True))
    assert consumer.step() == {}
    assert list(consumer.asking.asked) == [LEASE]


BOTH = {"kv_role": "kv_both", "kv_connector_extra_config": {"revision": "r"}}
OURS = BOTH | {
    "kv_connector": "KVXferConnector",
    "kv_connector_module_path": "kvxfer.integrations.vllm",
}
OFFLOAD = BOTH | {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": SPEC | {"backend": "host://?capacity=1MiB"},
}


@pytest.fixture(params=[[OURS, OFFLOAD]])
def multi_engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """Engine with connectors in a MultiConnector, as vLLM's for host memory beside ours."""
    config = engine_config(tmp_path, connectors=request.param)
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_module_path = None
    engine = Engine(monkeypatch, config, full())
    yield engine
    engine.connector.shutdown()


def test_a_store_of_another_connector_ends_before_p_writes_to_its_blocks(
    multi_engine: Engine,
) -> None:
    """VLLM stores blocks in the step after they were computed, and may have freed them by then."""
    multi_engine.add("a", None, tokens=12)
    multi_engine.add("d", ticket_params(), tokens=120, first=1000)
    assert multi_engine.step() == {"a": 12}
    multi_engine.asking.asked[LEASE].set_result(make_found(120))
    ours, theirs = multi_engine.scheduler.schedule().kv_connector_metadata.metadata
    assert len(ours.fetches) == len(theirs.jobs_to_flush) == 1


@pytest.mark.parametrize(
    "multi_engine", [[OFFLOAD, BOTH | {"kv_connector": "NixlConnector"}]], indirect=True
)
def test_a_store_ends_before_nixl_writes_to_its_blocks(multi_engine: Engine) -> None:
    multi_engine.add("a", None, tokens=12)
    multi_engine.end_step(multi_engine.scheduler.schedule(), KVConnectorOutput())
    multi_engine.add("d", ticket_params(remote_block_ids=[[0] * 30]), tokens=120, first=1000)
    ours, theirs = multi_engine.scheduler.schedule().kv_connector_metadata.metadata
    assert len(theirs.reqs_to_recv) == len(ours.jobs_to_flush) == 1


def test_a_child_of_a_multi_connector_has_its_prompts_recomputed_and_wants_its_workers_facts(
    multi_engine: Engine,
) -> None:
    """The scheduler reads the policy of the whole, which vLLM gives no child of it."""
    assert multi_engine.scheduler.recompute_kv_load_failures
    multi, facts = multi_engine.connector, {(0, 0): KVConnectorHandshakeMetadata()}
    with pytest.raises(errors.InvalidArgumentError, match="first of a MultiConnector"):
        multi.set_xfer_handshake_metadata_pp_aware(facts)
    del multi._connectors[1].connector_scheduler._current_batch_allocated_block_ids
    with pytest.raises(errors.UnsupportedEngineError, match="it has no _current_batch"):
        multi.set_xfer_handshake_metadata_pp_aware(facts)


@pytest.mark.parametrize(
    ("named", "parallel", "settings"),
    [
        ("listen", "tensor_parallel_size", {"listen": "127.0.0.1:65535"}),
        ("data_port", "tensor_parallel_size", {"listen": LISTEN, "data_port": 65535}),
        ("pipeline_parallel_size", "pipeline_parallel_size", {"listen": LISTEN}),
    ],
)
def test_a_parallel_engine_without_a_port_for_each_worker_or_with_stages_is_refused(
    tmp_path: Path, named: str, parallel: str, settings: dict[str, Any]
) -> None:
    config = engine_config(tmp_path, **settings)
    setattr(config.parallel_config, parallel, 2)
    with pytest.raises(errors.InvalidArgumentError, match=f"^{named} is"):
        KVXferConnector(config, KVConnectorRole.SCHEDULER, cache_config(full()))


def test_every_hook_of_the_tiers_is_passed_on_to_them() -> None:
    hooks = {
        name
        for name in vars(OffloadingConnector)
        if not name.startswith("_") and (hasattr(base.KVConnectorBase_V1, name))
    }
    elsewhere = {
        *("wait_for_layer_load", "save_kv_layer"),  # do nothing
        *("get_finished", "request_finished", "build_kv_connector_stats"),  # of KVXferConnector
        "requires_kv_delivery",  # P's do
    }
    assert hooks - elsewhere <= set(vars(KVXferConnector))
