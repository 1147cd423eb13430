"""Real engines of vLLM in processes of their own, and one that is driven over a pipe.

An engine that crashes, hangs or leaks takes down no process but its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import torch

from kvxfer.errors import KVXferError

REPOSITORY = Path(__file__).parents[2]
TOKENS_PER_BLOCK = 128
"""Tokens of a block in engines whose blocks are counted: vLLM's default on CPUs, not on GPUs."""

LOG_TAIL_LINES = 40
SHUTDOWN_TIMEOUT_S = 35
LAST_WORDS_TIMEOUT_S = 5
ANSWER_TIMEOUT_S = 300
"""Maximum wait for the start, and for each answer."""
NONE: Mapping[int, Any] = {}
GPU_SHARE = 0.2

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # equal block hashes in every engine
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


ON_SHARED_CORES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment of engines side by side on few cores."""


def share_of_gpu() -> float | None:
    """Share of a GPU for each of several engines; None without a GPU."""
    return GPU_SHARE if torch.cuda.is_available() else None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to start an engine; fields without a line here are arguments of vLLM's `LLM`.

    Attributes:
        connector: `kv_connector_extra_config` of the offloading connector; None for no connector.
        transfer: `kv_transfer_config` of any other connector, in place of `connector`.
        events: `kv_events_config`; None for no events.
        multiprocessing: Engine core and workers in processes of their own; more than one needs it.
        max_model_len: Longest prompt with its output; also the tokens of one step.
        gpu_memory_utilization: Share of a GPU that has to be free at the start, also with
            `kv_cache_memory_bytes`.
        max_lora_rank: Largest rank of LoRA adapters; 0 for an engine without adapters.
        environment: Environment variables on top of `ENVIRONMENT`.
    """

    model: str
    connector: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None
    events: dict[str, Any] | None = None
    multiprocessing: bool = False
    tensor_parallel_size: int = 1
    kv_cache_memory_bytes: int = 512 << 20
    max_model_len: int = 4096
    dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float | None = msgspec.field(default_factory=share_of_gpu)
    max_lora_rank: int = 0
    scheduler_cls: str | None = None
    environment: dict[str, str] = {}


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a request.

    Attributes:
        cached_tokens: Prompt tokens that were not computed, from the device cache or elsewhere.
        first_token_s: Seconds from adding the request to its first token; 0 without a token.
        last_token_s: Likewise, to its last token.
        params: Parameters of the connector for the engine that continues the prompt.
    """

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    first_token_s: float
    last_token_s: float
    params: dict[str, Any] = {}


class EngineDiedError(KVXferError, RuntimeError):
    """Engine whose process failed, ended, or does not answer."""


def launch(
    arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str], **more: Any
) -> subprocess.Popen[bytes]:
    """Start an engine in a session of its own, with this package last on its path."""
    inherited = {
        name: each for name, each in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"
    }
    chosen = {**inherited, **ENVIRONMENT, **environment}
    path = [chosen.get("PYTHONPATH", ""), str(REPOSITORY)]
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=chosen | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        start_new_session=True,
        **more,
    )


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all processes of an engine, also to those that a dead one left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class EngineProcess:
    """A running engine; use as a context manager.

    Not thread-safe; every call blocks until the engine has answered.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until close
        self._pipe, theirs = Pipe()
        multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.multiprocessing))}
        if config.tensor_parallel_size > 1:
            multiprocessing["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        with theirs:
            self._process = launch(
                [sys.executable, "-m", "tests.e2e.engine_server", str(theirs.fileno())],
                self._log,
                multiprocessing | config.environment,
                pass_fds=[theirs.fileno()],
            )
        try:
            self._ask(config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Process id; every process of the engine is in the process group of this number."""
        return self._process.pid

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        read_cache: bool = True,
        params: Mapping[int, Mapping[str, Any]] = NONE,
        start_after_steps: Mapping[int, int] = NONE,
        limits: Mapping[int, int] = NONE,
        adapter: str = "",
        adapter_id: int = 1,
    ) -> list[Generation]:
        """Run prompts of token ids, all at once, and greedily; one result per prompt, in order.

        Args:
            prompts: Token ids.
            max_tokens: Output tokens of each prompt; the end token does not stop it.
            read_cache: False computes every token, whatever is cached.
            params: `kv_transfer_params` of the prompt with this index.
            start_after_steps: Engine steps after which the prompt with this index is added; others
                are added at once.
            limits: Output tokens of the prompt with this index, in place of `max_tokens`.
            adapter: Folder of a LoRA adapter, empty for none.
            adapter_id: Id of the adapter; a new id loads the folder again.
        """
        answer: list[Generation] = self._call(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            read_cache=read_cache,
            params=params,
            start_after_steps=start_after_steps,
            limits=limits,
            adapter=adapter,
            adapter_id=adapter_id,
        )
        return answer

    def reset(self) -> bool:
        """Forget the device's prefix cache; False when blocks are in use."""
        return bool(self._call("reset"))

    def settle(self) -> None:
        """Step the engine until the connector stores nothing more."""
        self._call("settle")

    def change_weights(self, stop: str) -> None:
        """Change every weight of an engine of one process, as a step of training does.

        Args:
            stop: How the engine is stopped meanwhile, `pause` or `sleep`.
        """
        self._call("change_weights", stop=stop)

    def step_times(self) -> list[float]:
        """Return the seconds of each engine step of the last `generate`."""
        return list(self._call("step_times"))

    def metrics(self) -> dict[str, float]:
        """Ask vLLM for its metrics, summed over labels; of a histogram, its count.

        Those with labels of their own are also there by them, as `name{label="value"}`, in
        alphabetical order.
        """
        return dict(self._call("metrics"))

    def log(self) -> str:
        """Return everything that the engine printed; also after `close`."""
        if not self._log.closed:
            self._log.seek(0)
            self._printed = self._log.read().decode(errors="replace")
        return self._printed

    def pause(self) -> None:
        """Stop all of its processes, so that they use no processor."""
        signal_all(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all of its processes."""
        signal_all(self._process, signal.SIGCONT)

    def close(self) -> None:
        """Shut the engine down and end all of its processes; may be called again."""
        self.resume()
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_TIMEOUT_S + 10)
        signal_all(self._process, signal.SIGKILL)
        self._process.wait()
        self.log()
        self._log.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._ask((name, arguments))

    def _ask(self, message: object) -> Any:
        try:
            self._pipe.send(message)
            if self._pipe.poll(ANSWER_TIMEOUT_S):
                return self._pipe.recv()
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has yet to say why
                self._process.wait(LAST_WORDS_TIMEOUT_S)
            what = f"the engine died, exit status {self._process.poll()}"
        else:
            what = "the engine does not answer"
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        raise EngineDiedError(f"{what}; last lines of its log:\n{tail}")
