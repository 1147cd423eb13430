"""Engine without a model: vLLM's scheduler, both sides of the connector, and a fake hand-over."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import ClosedError
from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode import connector as connector_module
from kvxfer.integrations.vllm.prefill_decode.interface import HAS_TRANSFER_RESULTS
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, WorkerShard
from kvxfer.kvcache.portable.cache_description import STATE_TOKENS
from kvxfer.lending.reader import Fetched, Found, Wanted
from kvxfer.storage.observer import Reports

LISTEN = "127.0.0.1:7100"
LEASE = "0123456789abcdef0123456789abcdef"
BLOCK = 4
"""Tokens of a block."""
NUM_BLOCKS = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
FULL: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": torch.float32,
}


def ended_transfers(worker: KVXferConnector) -> KVConnectorOutput:
    """Ask a worker which transfers have ended or failed, as this release of vLLM does."""
    output = KVConnectorOutput()
    if HAS_TRANSFER_RESULTS:
        results = worker.get_transfer_results(set())
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
    else:
        output.finished_sending, output.finished_recving = worker.get_finished(set())
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    return output


def first_of(found: Any, name: str) -> Any:
    """Return the first connector's part if the value is a MultiConnector's."""
    return getattr(found, name, [found])[0]


def full() -> Any:
    return FullAttentionSpec(**FULL)


def sliding(window: int) -> Any:
    return SlidingWindowSpec(**FULL, sliding_window=window)


def recurrent(*, speculates: bool = False) -> Any:
    return MambaSpec(
        block_size=BLOCK,
        shapes=((2, 3),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=int(speculates),
    )


def cache_config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(folder: Path, role: str = "kv_both", **extra: Any) -> Any:
    """Make the configuration of an engine without its model."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=256,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVXferConnector",
            kv_role=role,
            kv_connector_module_path="kvxfer.integrations.vllm",
            kv_connector_extra_config={"revision": "r"} | extra,
        ),
        device_config=DeviceConfig("cpu"),
    )


def describe(num_groups: int) -> CacheDescription:
    group = GroupDescription(tokens_per_block=BLOCK, payload_size_bytes=64, boxes=(), opaque="x")
    return CacheDescription(shard=WorkerShard(num_kv_heads=1), groups=(group,) * num_groups)


def ticket_params(**changes: Any) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": LEASE,
        "remote_host": "127.0.0.1",
        "remote_port": 7200,
        "remote_block_ids": [[0]],
        "tp_size": 1,
    }
    return params | changes


def make_found(tokens: int, *, num_groups: int = 1, num_states: int = 0) -> Found:
    """Answer of a P with the blocks of this module; the last groups have states."""
    has_states = (False,) * (num_groups - num_states) + (True,) * num_states
    sizes = tuple(STATE_TOKENS if each else BLOCK for each in has_states)
    return Found(tokens, True, sizes, sizes, has_states)


class FakeHandover:
    num_expired = 0
    is_on_device = False
    way = ""
    port = 7100

    def __init__(self) -> None:
        self.asked: dict[str, Future[Found]] = {}
        self.fetches: list[tuple[Wanted, str | None, Future[Fetched]]] = []
        self.released: Counter[str] = Counter()
        self.offers: list[tuple[str, list[Any], list[int], bool]] = []
        self.revoked: list[str] = []
        self.given_up: list[str] = []
        self.ended: list[str] = []
        self.is_closed = False
        self.reports: Reports | None = None

    @property
    def reader(self) -> Self:
        return self

    def submit(self, call: tuple[str, Any]) -> "Future[Any]":
        """Take what a method below gives in place of a coroutine."""
        if self.is_closed:
            raise ClosedError("hand-over")
        (kind, value), future = call, Future[Any]()
        if kind == "ask":
            self.asked[value] = future
        elif kind == "release":
            self.released[value] += 1
            future.set_result(None)
        else:
            self.fetches.append((*value, future))
        return future

    def ask(self, endpoint: Endpoint, ticket: str, *_: object, waits: bool = False) -> Any:
        return "ask", ticket

    def release(self, endpoint: Endpoint, ticket: str) -> Any:
        return "release", ticket

    def fetch(self, endpoint: Endpoint, wanted: Wanted, *, waits_for: str | None = None) -> Any:
        return "fetch", (wanted, waits_for)

    def offer(
        self, ticket: str, keys: Sequence[Any], block_ids: Sequence[int], *, is_complete: bool
    ) -> None:
        self.offers.append((ticket, list(keys), list(block_ids), is_complete))

    def revoke(self, tickets: Sequence[str]) -> None:
        self.revoked += tickets

    def give_up(self, tickets: Sequence[str]) -> None:
        self.given_up += tickets

    def take_ended(self) -> list[str]:
        taken, self.ended = self.ended, []
        return taken

    def observe(self, reports: Reports) -> None:
        self.reports = reports

    def start(self) -> None:
        """Begin nothing."""

    def close(self) -> None:
        self.is_closed = True


class Engine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Any, *specs: Any) -> None:
        monkeypatch.setattr(connector_module, "Handover", lambda *_: FakeHandover())
        monkeypatch.setattr(connector_module, "describe_worker", lambda *_: describe(len(specs)))
        caches = cache_config(*specs)
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.connector: Any = self.scheduler.connector
        self.ended: dict[str, Any] = {}
        ours = first_of(self.scheduler.connector, "_connectors")
        if not isinstance(ours, KVXferConnector):
            return
        self.worker = KVXferConnector(ours._vllm_config, KVConnectorRole.WORKER, caches)
        self.worker.use_kv_caches(None)  # type: ignore[arg-type] # they are not looked at
        if (facts := self.worker.get_handshake_metadata()) is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts})
        self.asking: FakeHandover = ours._handover  # type: ignore[assignment]
        self.moving: FakeHandover = self.worker._handover  # type: ignore[assignment] # it was patched

    def add(
        self,
        name: str,
        params: Any,
        *,
        tokens: int = 10,
        first: int = 0,
        max_tokens: int = 1,
        resumable: bool = False,
    ) -> Request:
        """Add a request with a prompt of its own length, or the next part of a resumable one."""
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(first, first + tokens)),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        request.kv_transfer_params = params  # as it is: the newest releases check some of it
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        planned = self.scheduler.schedule()
        step = first_of(planned.kv_connector_metadata, "metadata")
        self.worker.handle_preemptions(step)
        self.worker.bind_connector_metadata(step)
        self.worker.start_load_kv(None)
        self.end_step(planned, ended_transfers(self.worker))
        self.worker.clear_connector_metadata()
        return dict(planned.num_scheduled_tokens)

    def end_step(self, planned: Any, transfers: KVConnectorOutput) -> None:
        names = list(planned.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        ended = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=transfers,
            ),
        )
        for outputs in ended.values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output.kv_transfer_params

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def require_over(self) -> None:
        """Check that no block is in use, and that no request is remembered."""
        assert not self.scheduler.requests
        assert self.num_free == NUM_BLOCKS - 1  # without the null block
        if self.connector._decode is not None:
            assert not self.connector._decode._asked.keys() | self.connector._decode._settled
        if self.connector._prefill is not None:
            assert self.connector._prefill.num_leases == 0
            assert not self.connector._prefill._early


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    def start(*specs: Any, role: str = "kv_both", **extra: Any) -> Engine:
        config = engine_config(tmp_path, role, **{"listen": LISTEN} | extra)
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        return Engine(monkeypatch, config, *specs)

    return start
