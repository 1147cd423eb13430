"""A real vLLM engine in a process of its own, driven over a socket.

An engine that crashes, hangs or leaks takes its own process down and nobody else's.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec
import torch

from kvxfer.errors import KVXferError

T = TypeVar("T")

TOKENS_PER_BLOCK = 128
"""Tokens of a block in engines whose blocks are counted: vLLM's default on CPUs, not on GPUs."""

LOG_TAIL_LINES = 40
SHUTDOWN_TIMEOUT_S = 35
LAST_WORDS_TIMEOUT_S = 5
FRAME_LENGTH_BYTES = 8
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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to start an engine.

    Attributes:
        model: Folder of the model.
        connector: `kv_connector_extra_config` of the offloading connector; None for no connector.
        transfer: `kv_transfer_config` of any other connector, in place of `connector`.
        events: `kv_events_config`; None for no events.
        multiprocessing: Engine core and workers in processes of their own.
        tensor_parallel_size: Workers; more than one needs `multiprocessing`.
        kv_cache_memory_bytes: Size of the device cache.
        max_num_seqs: Requests that run at once.
        max_model_len: Longest prompt with its output; also the tokens of one step.
        dtype: Data type of the model, `auto` for that of its weights.
        block_size: Tokens of a block; None for vLLM's choice, by the platform and the model.
        gpu_memory_utilization: Share of a GPU that has to be free at the start, also with
            `kv_cache_memory_bytes`; None for vLLM's choice, which is nearly all of it.
        load_format: Where weights come from, `dummy` for none.
        enforce_eager: Whether no graphs are compiled.
        attention_backend: Name of vLLM's attention backend; None for vLLM's choice.
        max_lora_rank: Largest rank of LoRA adapters; 0 for an engine without adapters.
        scheduler: Name of the scheduler's class, with its module; vLLM's by default.
        environment: Environment variables on top of `ENVIRONMENT`.
        start_timeout_s: Longest wait for the start.
        timeout_s: Longest wait for an answer.
    """

    model: str
    connector: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None
    events: dict[str, Any] | None = None
    multiprocessing: bool = False
    tensor_parallel_size: int = 1
    kv_cache_memory_bytes: int = 512 << 20
    max_num_seqs: int = 16
    max_model_len: int = 4096
    dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    load_format: str = "auto"
    enforce_eager: bool = True
    attention_backend: str | None = None
    max_lora_rank: int = 0
    scheduler: str | None = None
    environment: dict[str, str] = {}
    start_timeout_s: float = 300
    timeout_s: float = 300


class Generation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one request gave.

    Attributes:
        token_ids: Output tokens.
        logprobs: Log-probability of each output token.
        cached_tokens: Prompt tokens that were not computed, from the device cache or elsewhere.
        first_token_s: Seconds from adding the request to its first token; 0 without a token.
        last_token_s: Seconds from adding the request to its last token; 0 without a token.
        params: What the connector tells the engine that goes on with the prompt.
    """

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    first_token_s: float
    last_token_s: float
    params: dict[str, Any] = {}


class EngineDiedError(KVXferError, RuntimeError):
    """The engine's process failed, ended or does not answer.

    Attributes:
        log_tail: Last lines of what it printed.
    """

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(f"{message}; last lines of its log:\n{log_tail}")
        self.log_tail = log_tail


def _with_this_package(environment: dict[str, str]) -> dict[str, str]:
    """Put the folder of this package last on the path of the engine and of its processes."""
    path = [environment.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


class EngineProcess:
    """A running engine; use as a context manager.

    Not thread-safe; every call blocks until the engine has answered.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            EngineDiedError: It did not start.
        """
        self._config = config
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until close
        ours, theirs = socket.socketpair()
        environment = {
            name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"
        }
        environment |= ENVIRONMENT | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.multiprocessing)),
        }
        if config.tensor_parallel_size > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.engine_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_with_this_package(environment | config.environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._reader = ours.makefile("rb")
        try:
            self._ask(config, type(None), config.start_timeout_s)
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

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        read_cache: bool = True,
        params: Mapping[int, dict[str, Any]] = NONE,
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
            adapter_id: Id of the adapter: another one is loaded anew.
        """
        how = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "read_cache": read_cache,
            "params": params,
            "start_after_steps": start_after_steps,
            "limits": limits,
            "adapter": adapter,
            "adapter_id": adapter_id,
        }
        return self._ask(["generate", how], list[Generation])

    def reset(self) -> bool:
        """Forget the device's prefix cache; False when blocks are in use."""
        return self._ask(["reset", {}], bool)

    def settle(self) -> None:
        """Step the engine until the connector stores nothing more."""
        self._ask(["settle", {}], type(None))

    def change_weights(self, stop: str) -> None:
        """Change every weight of an engine of one process, as a step of training does.

        Args:
            stop: How the engine stands still meanwhile, `pause` or `sleep`.
        """
        self._ask(["change_weights", {"stop": stop}], type(None))

    def step_times(self) -> list[float]:
        """Return the seconds of each engine step of the last `generate`."""
        return self._ask(["step_times", {}], list[float])

    def metrics(self) -> dict[str, float]:
        """Ask vLLM for its metrics, summed over labels; of a histogram, its count.

        Those with labels of their own are also there by them, as `name{label="value"}`, in
        alphabetical order.
        """
        return self._ask(["metrics", {}], dict[str, float])

    def log(self) -> str:
        """Return everything that the engine printed; also after `close`."""
        if not self._log.closed:
            self._log.seek(0)
            self._printed = self._log.read().decode(errors="replace")
        return self._printed

    def pause(self) -> None:
        """Stop all of its processes where they are, so that they use no processor."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of its processes go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Shut the engine down and end all of its processes; may be called again."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self._reader.close()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_TIMEOUT_S + 10)
        with contextlib.suppress(ProcessLookupError):  # also what a dead engine left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.log()
        self._log.close()

    def _ask(self, command: Any, answer: type[T], timeout_s: float | None = None) -> T:
        self._socket.settimeout(timeout_s or self._config.timeout_s)
        try:
            self._socket.sendall(frame(command))
            message = read_frame(self._reader)
        except TimeoutError as exc:
            raise EngineDiedError("the engine does not answer", self._tail()) from exc
        except OSError as exc:
            raise EngineDiedError("the engine is gone", self._tail()) from exc
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has yet to say why
                self._process.wait(LAST_WORDS_TIMEOUT_S)
            status = self._process.poll()
            raise EngineDiedError(f"the engine died, exit status {status}", self._tail())
        return msgspec.msgpack.decode(message, type=answer)

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])


def frame(message: Any) -> bytes:
    """Encode a message, its length in front; JSON cannot say the NaN a broken cache may give."""
    encoded = msgspec.msgpack.encode(message)
    return len(encoded).to_bytes(FRAME_LENGTH_BYTES, "big") + encoded


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read an encoded message; None at the end."""
    num_bytes = int.from_bytes(stream.read(FRAME_LENGTH_BYTES), "big")
    message = stream.read(num_bytes)
    return message if num_bytes and len(message) == num_bytes else None


def share_of_gpu() -> float | None:
    """Share of a GPU that an engine beside others asks for; None where there is no GPU."""
    return GPU_SHARE if torch.cuda.is_available() else None
