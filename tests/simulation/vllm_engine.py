"""World of vLLM: its own scheduler and our connectors, over memory whose every byte is known.

There is no model: a step writes the number of each token's prefix in place of the keys and values
of the token, and checks that everything it would have read has the numbers of its prompt.
"""

import copy
import json
import shutil
import tempfile
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from multiprocessing.util import Finalize
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvxfer import Descriptors, runtime
from kvxfer.testing.simulation import Simulation
from tests.integrations.pd_engine import MODEL
from tests.integrations.vllm_tensors import plan

BLOCK = 4
"""Tokens of a block."""
WINDOW = 6
NUM_LAYERS = 2
"""Layers of each group."""
LAYOUT = "LBHNC"
LAYER: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK, **LAYER)
SLIDING = SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **LAYER)
MAX_LENGTH = 256
NUM_OUTPUTS = 5
"""Number of different tokens that the model generates."""

_names = count()


class RequestId(str):
    """Id of a request, with the same hash in every process, since vLLM iterates over sets."""

    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())


class Prefixes:
    """Numbers of prefixes, unique to their tokens and weights.

    Attributes:
        of_hash: Tokens up to the end of the block of a hash.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self.of_hash: dict[bytes, list[int]] = {}

    def note(self, request: Request) -> None:
        for at, block_hash in enumerate(request.block_hashes, 1):
            if bytes(block_hash) not in self.of_hash:
                self.of_hash[bytes(block_hash)] = list(request.all_token_ids[: at * BLOCK])

    def of(self, weights: int, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of each prefix of a prompt, for a version of the weights."""
        found, number = np.empty(len(tokens), np.int64), -weights
        for at, token in enumerate(tokens):
            number = self._numbers.setdefault((number, token), len(self._numbers) + 1)
            found[at] = number
        return found


class DeadEngineError(Exception):
    """vLLM's engine died of an error."""


class ModelEngine:
    """Engine of vLLM without a model; the caller makes its steps.

    Engines that exchange blocks share `prefixes`. `extra` are the settings of the connector, whose
    sides are `connector` and `worker`. With `has_window`, a second group of layers has a sliding
    window. A step has at most `batch_tokens`, and takes at most `step_s`.

    Attributes:
        weights: Version of its weights.
        ended: Requests that have ended, with the parameters of their last outputs.
        num_loaded: Number of loads that have ended.
        is_computing: Whether the last step computed anything.
    """

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        prefixes: Prefixes,
        *,
        connector: str,
        extra: Mapping[str, Any],
        num_blocks: int = 16,
        has_window: bool = False,
        batch_tokens: int = 16,
        step_s: float = 0.01,
    ) -> None:
        self.name = name
        self.weights = self.num_steps = self.num_loaded = 0
        self.is_computing = self._was_reset = False
        self.ended: dict[str, Any] = {}
        self._simulation, self._prefixes = simulation, prefixes
        self._random, self._step_s = simulation.random(f"steps of {name}"), step_s
        self._specs = [FULL, SLIDING] if has_window else [FULL]
        self.config = _configure(connector, extra, num_blocks, batch_tokens)
        sizes: dict[str, Any] = {"num_layers": NUM_LAYERS, "num_blocks": num_blocks}
        planned = plan(self._specs, CPUAttentionBackend, layout=LAYOUT, **sizes)
        self._caches, layers = planned.config, planned.vllm_config.compilation_config
        self.config.compilation_config = copy.copy(self.config.compilation_config)
        self.config.compilation_config.static_forward_context = layers.static_forward_context
        self.tensors = allocate_kv_cache(self._caches, torch.device("cpu"), KVCacheLayout[LAYOUT])
        known: dict[int, NDArray[np.int64]] = {}  # layers of several groups share memory
        groups = self._caches.kv_cache_groups
        self._memory = [_Memory(self.tensors, group, known) for group in groups]
        self._loading: dict[str, dict[int, None]] = {}
        with set_current_vllm_config(self.config):
            self.worker: Any = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, self._caches
            )
            self.worker.register_kv_caches(self.tensors)
        self.scheduler = Scheduler(
            self.config,
            self._caches,
            StructuredOutputManager(self.config),
            BLOCK,
            BLOCK,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        if facts := self.worker.get_handshake_metadata():
            self.connector.set_xfer_handshake_metadata({0: facts})

    @property
    def num_free(self) -> int:
        """Number of blocks that no request has, without the null block."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests())

    def add(
        self, name: str, prompt: Sequence[int], *, max_tokens: int = 1, params: Any = None
    ) -> None:
        request = Request(
            RequestId(name),
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
            ),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self._prefixes.note(request)
        self._call("add", lambda: self.scheduler.add_request(request))

    def abort(self, name: str) -> None:
        status = RequestStatus.FINISHED_ABORTED
        self._call("abort", lambda: self.scheduler.finish_requests(RequestId(name), status))
        self.ended.setdefault(str(name), None)

    def reset(self, *, also_running: bool, has_new_weights: bool) -> bool:
        """Reset the caches, as for new weights; return False if they were in use.

        At most once between two steps: vLLM's own connector fails an assertion the second time.
        """
        if self._was_reset:
            return False
        self._was_reset = True
        # vLLM refuses while a request is loading, or has loaded and waits for its turn to run.
        waiting = {RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING}
        manager = self.scheduler.kv_cache_manager
        has_loaded = any(
            each.status in waiting and any(manager.get_block_ids(each.request_id))
            for each in self.scheduler.requests.values()
        )
        preempts = also_running and not has_loaded
        reset = partial(self.scheduler.reset_prefix_cache, preempts, reset_connector=True)
        was_reset = bool(self._call("reset", reset))
        if was_reset and has_new_weights and self.num_free == self._caches.num_blocks - 1:
            self.weights += 1
        return was_reset

    def step(self) -> None:
        """Plan and make a step, in the order in which vLLM's processes call the connectors."""
        self._call("step", self._step)

    def close(self) -> None:
        """Shut down, as vLLM does: the worker first."""
        self._call("worker's shutdown", self.worker.shutdown)
        self._call("scheduler's shutdown", self.connector.shutdown)

    def look(self, where: str) -> None:
        """Check that blocks which no load may touch are untouched."""
        allowed = [block for blocks in self._loading.values() for block in blocks]
        for memory in self._memory:
            for block in memory.changed(allowed):
                detail = f"block {block} of {self.name}, {where}"
                self._simulation.fail("memory was touched", detail)

    def expected(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of each prefix of a prompt, with the current weights."""
        return self._prefixes.of(self.weights, tokens)

    def chunk(self, block_hash: bytes, group: int, num_blocks: int) -> bytes:
        """Make the bytes that a chunk must have whose last block has a given hash."""
        tokens = self._prefixes.of_hash[block_hash]
        stop = len(tokens)
        numbers = self.expected(tokens)[stop - num_blocks * BLOCK :]
        return self._memory[group].payload(numbers.reshape(num_blocks, BLOCK))

    def blocks_of(self, name: str) -> Descriptors:
        """Describe the blocks of a request, each layer of a block by itself."""
        groups = self.scheduler.kv_cache_manager.get_block_ids(name)
        pairs = zip(self._memory, groups, strict=True)
        rows = [row for memory, ids in pairs for row in memory.rows(ids)]
        addresses = np.array([row.ctypes.data for row in rows], np.uint64)
        return Descriptors.of_pieces(addresses, [row.nbytes for row in rows])

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as exc:
            said = "".join(traceback.format_exception(exc)[-6:])
            self._simulation.fail("the engine died", f"{self.name}, {what}: {said}")
            raise DeadEngineError from exc

    def _step(self) -> None:
        self.num_steps += 1
        self._was_reset = False
        output = self.scheduler.schedule()
        self.is_computing = bool(output.num_scheduled_tokens)
        self._pass()
        worker, told = self.worker, output.kv_connector_metadata
        self.look("before a step")
        worker.handle_preemptions(told)
        self.note_prepared()
        worker.bind_connector_metadata(told)
        self._note_loads(told)
        sampled = [self._compute(*each) for each in output.num_scheduled_tokens.items()]
        worker.start_load_kv(None)
        self._pass()
        worker.wait_for_save()
        done = KVConnectorOutput()
        results = worker.get_transfer_results(set(output.finished_req_ids))
        done.finished_sending = results.finished_sending
        done.finished_recving = results.finished_recving
        done.failed_recving = results.failed_recving
        done.invalid_block_ids = worker.get_block_ids_with_load_errors()
        done.kv_connector_stats = worker.get_kv_connector_stats()
        done.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        for name in sorted(done.finished_recving or ()):
            self.num_loaded += 1
            for memory in self._memory:
                memory.take(list(self._loading.pop(name, {})))
        self.look("after a step")
        self.note_ended(done)
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
                    self.ended[str(each.request_id)] = each.kv_transfer_params
        self._pass()

    def note_prepared(self) -> None:
        """Note that the worker has prepared a step, before anything is computed."""

    def note_ended(self, done: KVConnectorOutput) -> None:
        """Note which transfers have ended, before vLLM does."""

    def _pass(self) -> None:
        """Let time pass, in which threads and the network make progress."""
        if (drawn := self._random.random()) > 0.3:
            runtime.sleep(drawn * self._step_s / 3)

    def _note_loads(self, told: Any) -> None:
        tiers = getattr(told, "tiers", told)
        jobs = list(tiers.load_jobs.values()) if tiers is not None else []
        for job in jobs:
            ids = job.dst_spec.block_ids.tolist()
            self._loading.setdefault(job.req_id, {}).update(dict.fromkeys(ids))
        for fetch in getattr(told, "fetches", ()):
            ids = [block for ids in fetch.wanted.block_ids for block in ids if block > 0]
            self._loading.setdefault(fetch.request_id, {}).update(dict.fromkeys(ids))

    def _compute(self, name: str, number: int) -> list[int]:
        """Read what a request attends to, write what it computes, and return its next token."""
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens  # the scheduler has already counted this step
        tokens = list(request.all_token_ids)
        numbers = self.expected(tokens)
        start = stop - number
        self._prefixes.note(request)
        blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
        for memory, ids, spec in zip(self._memory, blocks, self._specs, strict=True):
            first = max(0, start - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
            wrong = memory.wrong(ids, numbers, first, start)
            if len(wrong):
                detail = f"{name} of {self.name}: {len(wrong)} of tokens {first} to {start}, "
                detail += f"the first at {wrong[0]}, weights {self.weights}"
                self._simulation.fail("wrong bytes", detail)
            memory.write(ids, numbers, start, stop)
        return [7 + len(tokens) % NUM_OUTPUTS] if stop >= request.num_tokens else []


class _Memory:
    """Memory of the layers of a group, and the content that it should have.

    Every eight bytes of a token's keys and values are its number plus that of the layer.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        group: KVCacheGroupSpec,
        known: dict[int, NDArray[np.int64]],
    ) -> None:
        # Each is `(num_blocks, heads, tokens, numbers of a token)`.
        self._layers = [tensors[name].view(torch.int64).numpy() for name in group.layer_names]
        self._known = [known.setdefault(layer.ctypes.data, layer.copy()) for layer in self._layers]

    def rows(self, ids: Sequence[int]) -> list[NDArray[np.int64]]:
        """List the memory of blocks, each layer by itself, without the null block."""
        return [layer[each] for layer in self._layers for each in ids if each]

    def write(self, ids: Sequence[int], numbers: NDArray[np.int64], start: int, stop: int) -> None:
        rows, columns = _places(ids, start, stop)
        for at, (layer, known) in enumerate(zip(self._layers, self._known, strict=True)):
            for each in (layer, known):
                each[rows, :, columns] = _marked(numbers[start:stop], at)

    def wrong(
        self, ids: Sequence[int], numbers: NDArray[np.int64], start: int, stop: int
    ) -> NDArray[np.int64]:
        """List the tokens for which some layer has wrong bytes."""
        rows, columns = _places(ids, start, stop)
        is_wrong = np.zeros(len(rows), bool)
        for at, layer in enumerate(self._layers):
            found = layer[rows, :, columns]
            is_wrong |= (found != _marked(numbers[start:stop], at)).any(axis=(1, 2))
        return np.flatnonzero(is_wrong) + start

    def payload(self, blocks: NDArray[np.int64]) -> bytes:
        """Make the bytes of blocks of tokens, layer after layer of each."""
        per_token = self._layers[0].shape[-1]
        layers = [
            (block * NUM_LAYERS + at).repeat(per_token)
            for block in blocks
            for at in range(len(self._layers))
        ]
        content: bytes = np.concatenate(layers).tobytes()
        return content

    def changed(self, allowed: Sequence[int]) -> list[int]:
        """List blocks that have changed but must not, and accept their new content."""
        found: dict[int, None] = {}
        for layer, known in zip(self._layers, self._known, strict=True):
            is_other = (layer != known).any(axis=(1, 2, 3))
            is_other[list(allowed)] = False
            found |= dict.fromkeys(np.flatnonzero(is_other).tolist())
            known[is_other] = layer[is_other]
        return list(found)

    def take(self, ids: Sequence[int]) -> None:
        """Accept the content of blocks, since a load of them has ended."""
        for layer, known in zip(self._layers, self._known, strict=True):
            known[list(ids)] = layer[list(ids)]


def _places(ids: Sequence[int], start: int, stop: int) -> tuple[Any, Any]:
    at = np.arange(start, stop)
    return np.array(ids, np.int64)[at // BLOCK], at % BLOCK


def _marked(numbers: NDArray[np.int64], layer: int) -> Any:
    return (numbers * NUM_LAYERS + layer)[:, None, None]


@cache
def _base_config() -> Any:
    """Make vLLM's configuration once per process, since that takes a second."""
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-simulation-model-"))
    Finalize(None, shutil.rmtree, [folder], exitpriority=0)  # also in a process of a campaign
    text = json.dumps(MODEL | {"num_hidden_layers": NUM_LAYERS, "torch_dtype": "bfloat16"})
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(b"weights")
    init_none_hash(sha256)
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(bytes(32))  # not of PYTHONHASHSEED
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=BLOCK,
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    return config


def _configure(connector: str, extra: Mapping[str, Any], num_blocks: int, batch_tokens: int) -> Any:
    config = copy.copy(_base_config())
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = BLOCK
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = batch_tokens
    config.scheduler_config.max_num_scheduled_tokens = batch_tokens
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="kvxfer.integrations.vllm",
        kv_role="kv_both",
        engine_id=f"simulated-{getpid():08}-{next(_names) % 10**8:08}",
        kv_connector_extra_config=dict(extra),
    )
    return config
