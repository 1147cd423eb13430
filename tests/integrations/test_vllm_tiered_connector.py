"""Connector with tiers under vLLM's scheduler: the head of a prompt from the host, P the rest."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode.metrics import PREFIX
from tests.integrations.pd_engine import ended_transfers
from tests.integrations.vllm_tensors import FULL, LAYOUTS_ARE_NAMED, TOKENS, allocate, backend

pytestmark = [
    pytest.mark.skipif(not LAYOUTS_ARE_NAMED, reason="written for vLLM's newest scheduler"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's configuration
]

LIMIT_S = 15.0
OF_P, OF_D = -1.0, 1.0
"""Factor of what an engine writes, by which its pages are known: the token; bfloat16 keeps it."""
HEAD = list(range(3, 3 + 2 * TOKENS))
PROMPT = [*HEAD, *range(100, 140)]
OTHER = [*range(150, 250), *range(70, 100)]
"""Prompt of as many blocks as an engine has."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class Engine:
    """Scheduler of vLLM, and a worker whose model writes each token, times a factor.

    It has five blocks: those of `OTHER` take the place of whatever was there.

    Args:
        config: vLLM's configuration.
        mark: The factor.
        extra: Settings of the connector.
    """

    def __init__(self, config: Any, mark: float, **extra: Any) -> None:
        self.config, self.mark = copy.copy(config), mark
        caches = allocate([FULL], backend("cpu_attn.CPUAttentionBackend"), layout="LBHNC")
        self.tensors = caches.tensors
        self.config.cache_config = copy.copy(config.cache_config)
        self.config.cache_config.num_gpu_blocks = caches.config.num_blocks
        self.config.compilation_config = copy.copy(config.compilation_config)
        layers = caches.vllm_config.compilation_config.static_forward_context
        self.config.compilation_config.static_forward_context = layers
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVXferConnector",
            kv_connector_module_path="kvxfer.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={
                "revision": "r",
                "transport": "socket",
                "lease_s": 60.0,
                "timeout_s": 10.0,
                "ask_timeout_s": 10.0,
                **extra,
            },
        )
        self.scheduler = Scheduler(
            self.config,
            caches.config,
            StructuredOutputManager(self.config),
            TOKENS,
            TOKENS,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.worker: Any = KVXferConnector(self.config, KVConnectorRole.WORKER, caches.config)
        self.worker.register_kv_caches(caches.tensors)
        facts = {0: self.worker.get_handshake_metadata()}
        self.connector.set_xfer_handshake_metadata(facts)
        self.num_computed: dict[str, int] = {}
        self.received: list[str] = []
        self.sent: list[str] = []
        self.num_flushed = 0  # stores that ended before blocks were given to a load from P
        self.params: dict[str, Any] = {}
        self.stats: Any = None

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

    def add(self, request_id: str, prompt: Sequence[int], params: Any = None) -> None:
        sampling = SamplingParams(
            max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        hasher = get_request_block_hasher(TOKENS, sha256)
        request = Request(request_id, list(prompt), sampling, None, block_hasher=hasher)
        self.num_computed[request_id] = 0
        self.scheduler.add_request(request)

    def run(self, request_id: str, prompt: Sequence[int], params: Any = None) -> Any:
        """Run a request to its end; return its parameters for another engine."""
        self.add(request_id, prompt, params)
        self.until(lambda: request_id in self.params)
        self.step()  # in which a finished request's blocks are lent, and stored
        return self.params[request_id]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.step()

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Plan a step, and do it."""
        output = self.scheduler.schedule()
        between()
        worker, told = self.worker, output.kv_connector_metadata
        worker.handle_preemptions(told)
        worker.bind_connector_metadata(told)
        sampled = [self._compute(*each) for each in output.num_scheduled_tokens.items()]
        worker.start_load_kv(None)
        worker.wait_for_save()
        done = ended_transfers(worker, output.finished_req_ids)
        done.kv_connector_stats = worker.get_kv_connector_stats()
        done.kv_connector_worker_meta = worker.build_connector_worker_meta()
        self.received += done.finished_recving
        self.sent += done.finished_sending
        if told.tiers is not None and told.fetches:
            self.num_flushed += len(told.tiers.jobs_to_flush)
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            ids,
            {each: at for at, each in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=done,
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.params[each.request_id] = each.kv_transfer_params
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self._add_stats(outputs.scheduler_stats.kv_connector_stats)

    def _read(self, request_id: str, num_tokens: int) -> list[list[float]]:
        """Read what is there of the first tokens of a request, for each layer."""
        return [
            [
                float(tensor[self._block(request_id, at), 0, at % TOKENS, 0])
                for at in range(num_tokens)
            ]
            for tensor in self.tensors.values()
        ]

    def _compute(self, request_id: str, number: int) -> list[int]:
        request = self.scheduler.requests[request_id]
        stop = request.num_computed_tokens  # the scheduler has counted the step already
        self.num_computed[request_id] += number
        tokens = request.all_token_ids
        for at in range(stop - number, stop):
            for tensor in self.tensors.values():
                tensor[self._block(request_id, at), :, at % TOKENS] = self.mark * tokens[at]
        self.seen = self._read(request_id, min(stop, request.num_prompt_tokens))
        return [7] if stop >= request.num_tokens else []

    def _block(self, request_id: str, at: int) -> int:
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return int(ids[at // TOKENS])

    def _add_stats(self, data: dict[str, Any]) -> None:
        stats = KVXferConnector.build_kv_connector_stats(data)
        self.stats = self.stats.aggregate(stats) if self.stats else stats


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    init_none_hash(sha256)
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=TOKENS,
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


@pytest.fixture
def prefill(config: Any) -> Iterator[Engine]:
    engine = Engine(config, OF_P, listen="127.0.0.1:0")
    yield engine
    engine.close()


@pytest.fixture
def decode(config: Any) -> Iterator[Engine]:
    engine = Engine(config, OF_D, backend=["host://?capacity=1MiB"])
    yield engine
    engine.close()


def test_the_head_comes_from_the_host_and_the_rest_from_p(prefill: Engine, decode: Engine) -> None:
    decode.run("first", HEAD)
    decode.run("other", OTHER)
    params = prefill.run("asked", PROMPT, {"do_remote_decode": True})
    decode.run("both", PROMPT, params)
    assert decode.num_computed["both"] == 1
    *rest, last = PROMPT[len(HEAD) :]
    loaded = [*HEAD, *(token * OF_P for token in rest), last]  # and one computed here
    assert decode.seen == [loaded, loaded]
    assert decode.received == ["both"]
    summary = decode.stats.reduce()
    assert summary[PREFIX + "pages_verified"] == 2
    assert summary["vllm:kv_offload_load_bytes"] == 2 * 2 * FULL.page_size_bytes


@pytest.mark.parametrize(("field", "value"), [("_alignment", 3 * TOKENS), ("_has_states", True)])
def test_where_the_head_may_not_end_all_of_it_comes_from_p(
    prefill: Engine, decode: Engine, field: str, value: Any
) -> None:
    setattr(decode.connector, field, value)  # blocks longer than the head; a group of states
    decode.run("first", HEAD)
    decode.run("other", OTHER)
    params = prefill.run("asked", PROMPT, {"do_remote_decode": True})
    decode.run("p", PROMPT, params)
    assert decode.num_computed["p"] == 1
    *rest, last = PROMPT
    loaded = [*(token * OF_P for token in rest), last]
    assert decode.seen == [loaded, loaded]
    assert decode.received == ["p"]


def test_without_a_ticket_the_host_alone_gives_the_head(decode: Engine) -> None:
    decode.run("first", HEAD)
    decode.run("other", OTHER)
    decode.run("alone", PROMPT)
    assert decode.num_computed["alone"] == len(PROMPT) - len(HEAD)
    assert decode.received == ["alone"]
    assert PREFIX + "load_seconds_count" not in decode.stats.reduce()


def test_when_p_goes_during_the_load_the_head_still_counts(prefill: Engine, decode: Engine) -> None:
    decode.run("first", HEAD)
    decode.run("other", OTHER)
    params = prefill.run("asked", PROMPT, {"do_remote_decode": True})
    decode.add("both", PROMPT, params)

    def leave() -> None:
        if decode.scheduler.requests["both"].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            prefill.close()

    deadline = time.monotonic() + LIMIT_S
    while "both" not in decode.params:
        assert time.monotonic() < deadline
        decode.step(leave)
    assert decode.num_computed["both"] == len(PROMPT) - len(HEAD)
    assert decode.seen == [PROMPT, PROMPT]
    assert decode.received == ["both"]


def test_blocks_that_p_fills_were_stored_before(prefill: Engine, decode: Engine) -> None:
    params = prefill.run("asked", OTHER, {"do_remote_decode": True})
    decode.add("first", PROMPT)
    decode.step()
    assert "first" in decode.params, "its blocks are free, and not stored yet"
    decode.add("late", OTHER, params)
    request = decode.scheduler.requests["late"]
    deadline = time.monotonic() + LIMIT_S
    while decode.connector.get_num_new_matched_tokens(request, 0)[0] is None:
        assert time.monotonic() < deadline
    decode.step()
    assert decode.num_flushed == 1
    decode.until(lambda: "late" in decode.params)
    assert decode.num_computed["late"] == 1
    decode.run("again", PROMPT)
    assert decode.num_computed["again"] == len(PROMPT) % TOKENS
    assert decode.seen == [PROMPT, PROMPT]


def test_a_client_that_leaves_during_both_loads_leaves_no_block_in_use(
    prefill: Engine, decode: Engine
) -> None:
    decode.run("first", HEAD)
    decode.run("other", OTHER)
    params = prefill.run("asked", PROMPT, {"do_remote_decode": True})
    free = decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    decode.add("both", PROMPT, params)
    request = decode.scheduler.requests["both"]
    decode.until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    decode.scheduler.finish_requests("both", RequestStatus.FINISHED_ABORTED)
    decode.until(lambda: "both" not in decode.scheduler.requests)
    assert decode.received == ["both"]
    assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    decode.run("next", PROMPT)
    assert decode.seen == [[*HEAD, *PROMPT[len(HEAD) :]]] * 2


def test_blocks_that_are_lent_and_stored_are_free_when_both_have_ended(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: set[str] = set()  # as releases say it whose stores keep a request's blocks
    finish, ended = (
        OffloadingConnector.request_finished_all_groups,
        OffloadingConnector.get_finished,
    )

    def keep(self: Any, *args: Any) -> Any:
        return True, finish(self, *args)[1]

    def say(self: Any, *args: Any) -> Any:
        sent = set(stored)
        stored.clear()
        return sent, ended(self, *args)[1]

    monkeypatch.setattr(OffloadingConnector, "request_finished_all_groups", keep)
    monkeypatch.setattr(OffloadingConnector, "get_finished", say)
    engine = Engine(
        config,
        OF_P,
        listen="127.0.0.1:0",
        lease_s=0.2,
        heartbeat_s=0.1,
        backend="host://?capacity=1MiB",
    )
    try:
        engine.run("asked", PROMPT, {"do_remote_decode": True})
        engine.until(lambda: engine.stats.reduce().get(PREFIX + "expired") == 1)
        engine.step()
        assert not engine.sent
        stored.add("asked")
        engine.until(lambda: "asked" in engine.sent)
        engine.step()
    finally:
        engine.close()
    assert engine.sent == ["asked"]
    assert not engine.scheduler.requests


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
