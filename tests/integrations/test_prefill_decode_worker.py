"""Worker and connector: each request is reported once, and what is not supported is refused."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode import groups as groups_module
from kvxfer.integrations.vllm.prefill_decode.groups import Groups, why_not
from kvxfer.integrations.vllm.prefill_decode.metrics import (
    PREFIX,
    Counters,
    PrefillDecodeMetrics,
    Reason,
)
from kvxfer.integrations.vllm.prefill_decode.step_data import Fetch, Offer, StepData
from kvxfer.integrations.vllm.prefill_decode.worker import PrefillDecodeWorker
from kvxfer.lending.reader import Fetched
from kvxfer.storage.prompt_keys import PromptKeys
from tests.integrations.pd_engine import (
    FULL,
    Engine,
    cache_config,
    engine_config,
    full,
    recurrent,
    sliding,
)
from tests.integrations.pd_fakes import LEASE, FakeHandover, make_found, ticket_params

LISTEN = "127.0.0.1:7100"
ENDPOINT = Endpoint("127.0.0.1", 7100)


def chunked() -> Any:
    return ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=8)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *specs: Any, **extra: Any) -> Engine:
    config = engine_config(folder, extra.pop("role", "kv_both"), **{"listen": LISTEN} | extra)
    return Engine(monkeypatch, config, *specs)


def make_fetch(name: str, *block_ids: list[int]) -> Fetch:
    found = make_found(10, num_groups=len(block_ids))
    wanted = found.wanted(PromptKeys(range(10)), 0, 9, block_ids)
    return Fetch(name, ENDPOINT, LEASE, wanted, waits=False)


def begin(engine: Engine, step: StepData) -> None:
    engine.worker.handle_preemptions(step)
    engine.worker.bind_connector_metadata(step)
    engine.worker.start_load_kv(None)
    engine.worker.clear_connector_metadata()


def test_blocks_on_a_device_are_lent_when_their_request_is_finished() -> None:
    """Kernels of an earlier step may run still when the next one is prepared."""
    handover = FakeHandover()
    handover.is_on_device = True
    worker = PrefillDecodeWorker(handover, Counters())  # type: ignore[arg-type]
    keys = PromptKeys(range(8)).block_keys(0, 4, 8)
    worker.prepare(StepData(offers=[Offer("p", LEASE, keys[:1], [5], is_complete=False)]))
    worker.prepare(StepData(offers=[Offer("p", LEASE, keys, [5, 6], is_complete=True)]))
    assert handover.offers == [(LEASE, [], [], False), (LEASE, keys, [5, 6], True)]


def test_the_log_says_how_blocks_on_a_gpu_move(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way = "blocks on cuda:0 go straight by NIXL"
    monkeypatch.setattr(FakeHandover, "way", way)
    of_vllm = logging.getLogger("vllm")  # which passes nothing on, so pytest may listen to it, too
    monkeypatch.setattr(of_vllm, "propagate", caplog.handler not in of_vllm.handlers)
    with caplog.at_level(logging.INFO, "vllm.kvxfer"):
        start(folder, monkeypatch, full())
    assert [line for line in caplog.messages if way in line] == [f"KVXferConnector: {way}"]


def test_before_030_loads_end_in_two_sets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(folder, monkeypatch, full())
    begin(engine, StepData(fetches=[make_fetch("a", [5, 6, 7])]))
    engine.moving.fetches[0][2].set_result(Fetched([[7]]))
    assert engine.worker.get_finished(set()) == (set(), {"a"})
    assert engine.worker.get_block_ids_with_load_errors() == {7}
    assert engine.worker.get_finished(set()) == (set(), set())
    assert engine.worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([full(), recurrent(speculates=True)], "group 1 keeps states of tokens that are"),
        ([full(), chunked()], "group 1 is a ChunkedLocalAttentionSpec"),
    ],
)
def test_a_model_that_cannot_be_handed_over_is_refused_with_one_warning(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    specs: list[Any],
    reason: str,
) -> None:
    assert why_not(cache_config(*specs)).startswith(reason)
    config = engine_config(folder, listen=LISTEN)
    caches = cache_config(*specs)
    scheduler = KVXferConnector(config, KVConnectorRole.SCHEDULER, caches)
    worker = KVXferConnector(config, KVConnectorRole.WORKER, caches)
    assert caplog.text.count(reason) == 1
    worker.use_kv_caches(None)  # type: ignore[arg-type] # they are not looked at
    assert worker.get_handshake_metadata() is None
    scheduler.set_xfer_handshake_metadata_pp_aware({})
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
    assert why_not(config) == "the layers of group 0 have several windows"
    specs["b"] = sliding(6)
    assert not why_not(config)
    assert Groups.of(config, 2) == Groups((8,), (5,), (False,))


def test_before_030_prompts_of_several_groups_are_lent_and_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups_module, "HAS_TRANSFER_RESULTS", False)
    engine = start(folder, monkeypatch, full(), sliding(6))
    assert caplog.text.count("before 0.30 vLLM lets no load of several groups fail") == 1
    engine.add("d", ticket_params(do_remote_decode=True))
    assert engine.step() == {"d": 9}  # the last one is left to D
    assert not engine.asking.asked
    assert engine.ended["d"]["do_remote_prefill"]


def test_a_producer_reads_nothing_and_a_consumer_lends_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = start(folder, monkeypatch, full(), role="kv_producer")
    producer.add("d", ticket_params(do_remote_decode=True))
    assert producer.step() == {"d": 10}
    assert not producer.asking.asked
    assert producer.ended["d"] is not None
    consumer = start(folder, monkeypatch, full(), role="kv_consumer")
    assert not consumer.connector.requires_kv_delivery
    consumer.add("d", ticket_params(do_remote_decode=True))
    assert consumer.step() == {}
    assert list(consumer.asking.asked) == [LEASE]


def test_a_child_of_a_multi_connector_wants_what_its_own_workers_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(folder, monkeypatch, full())
    with pytest.raises(InvalidArgumentError, match="first of a MultiConnector"):
        engine.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): KVConnectorHandshakeMetadata()}
        )


@pytest.mark.parametrize(
    ("named", "parallel", "settings"),
    [
        ("listen", "tensor_parallel_size", {"listen": "127.0.0.1:0"}),
        ("listen", "tensor_parallel_size", {"listen": "127.0.0.1:65535"}),
        ("data_port", "tensor_parallel_size", {"listen": LISTEN, "data_port": 65535}),
        ("pipeline_parallel_size", "pipeline_parallel_size", {"listen": LISTEN}),
    ],
)
def test_a_parallel_engine_without_a_port_for_each_worker_or_with_stages_is_refused(
    folder: Path, named: str, parallel: str, settings: dict[str, Any]
) -> None:
    config = engine_config(folder, **settings)
    setattr(config.parallel_config, parallel, 2)
    with pytest.raises(InvalidArgumentError, match=f"^{named} is"):
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_what_workers_count_and_what_their_tiers_tell_is_shown_by_prometheus() -> None:
    counters, registry = Counters(), CollectorRegistry()
    for number, seconds in enumerate((0.5, 2.0), start=1):
        counters.add("tickets", number)
        counters.add_reason("refused", Reason.NO_ANSWER)
        counters.add_load(seconds)
    stats = counters.take(3)
    stats.increase_counter("vllm:kv_offload_load_bytes", 7)
    types = {each: partial(each, registry=registry) for each in (Counter, Gauge, Histogram)}
    seen: list[object] = []
    tiers = SimpleNamespace(observe=lambda data, engine: seen.append(data["data"]))
    config = SimpleNamespace(kv_transfer_config=None)
    shown = PrefillDecodeMetrics(config, types, ["engine"], {0: ["0"]}, tiers=tiers)
    shown.observe(stats.to_dict())
    shown.observe(counters.take(3).to_dict())
    engine = {"engine": "0"}
    values = {
        "tickets_total": 3,
        "load_seconds_count": 2,
        "load_seconds_sum": 2.5,
        "leases": 3,
    }
    for name, value in values.items():
        assert registry.get_sample_value(PREFIX + name, engine) == value
    refused = engine | {"reason": "no_answer"}
    assert registry.get_sample_value(PREFIX + "refused_total", refused) == 2
    assert seen == [{"vllm:kv_offload_load_bytes": {(): 7}}, {}]
