"""OpenAI servers of vLLM, each in processes of its own, with a connector that hands over caches."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.nixl.raw import TCP_ALONE
from tests.e2e import audit, models
from tests.e2e.engine_process import (
    ON_SHARED_CORES,
    TOKENS_PER_BLOCK,
    Generation,
    launch,
    share_of_gpu,
    signal_all,
)
from tests.ports import free_ports

HOST = "127.0.0.1"
MAX_MODEL_LEN = 4096
LEASE_S = 12
"""Lease of blocks at P: engines that take both cores stall the client for 6 s between two legs."""
TIMEOUT_S = 10
"""Time after which a decode engine gives up on a load."""
ANSWER_LIMIT_S = 60.0
START_LIMIT_S = 600.0
POLL_S = 0.1
PORTS_PER_ENGINE = 8
"""The server's, and one for each worker from the second on."""
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
Metrics = dict[str, float]


class Failure(Exception):  # noqa: N818 - a verdict
    """Failure that a scenario has found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """How an engine is started.

    Attributes:
        model: Name of one of `models.MODELS`.
        data_parallel_size: Replicas behind the server, which divides requests among them.
        tokens_per_step: Maximum tokens of one step; longer prompts are computed in chunks.
        cache_mib: Size of the cache of each worker.
        uses_tcp: Bytes go through TCP connections, as between machines.
        transport: Transport otherwise; like `integrity`, a field of `NixlConfig`. With kvxfer only.
        host_tier: Capacity of a host tier of its own; empty for none. With kvxfer only.
        is_audited: Loaded bytes are compared with the lent ones. With kvxfer only.
        takes_text: Whether it has a tokenizer, for prompts that are text.
        alters_loads: A page of each load is altered after it was verified; with an audit.
        release_folder: Folder of another release of vLLM, see `tests.compat`; empty for none.
    """

    model: str = "llama"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    tokens_per_block: int = TOKENS_PER_BLOCK
    tokens_per_step: int = MAX_MODEL_LEN
    cache_mib: int = 32
    uses_tcp: bool = False
    transport: str | None = None
    integrity: str | None = None
    host_tier: str = ""
    is_audited: bool = True
    takes_text: bool = False
    alters_loads: bool = False
    release_folder: str = ""


def _nixl(port: int, shape: EngineShape) -> tuple[dict[str, Any], dict[str, str]]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_buffer_device": "cuda" if torch.cuda.is_available() else "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        **(TCP_ALONE if shape.uses_tcp else {}),
    }
    return transfer, environment


_SOUND = ("kvxfer.integrations.vllm", "KVXferConnector")
_AUDITED = ("tests.e2e.audited_connector", "AuditedConnector")


def _kvxfer(port: int, shape: EngineShape) -> tuple[dict[str, Any], dict[str, str]]:
    module, name = _AUDITED if shape.is_audited else _SOUND
    chosen = {
        "integrity": shape.integrity,
        "transport": "socket" if shape.uses_tcp else shape.transport,
    }
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": {
            "listen": f"{HOST}:{port}",
            "lease_s": LEASE_S,
            "timeout_s": TIMEOUT_S,
            **{name: value for name, value in chosen.items() if value is not None},
            **({"backend": [f"host://?capacity={shape.host_tier}"]} if shape.host_tier else {}),
        },
    }
    return transfer, {}


CONNECTORS = {"nixl": _nixl, "kvxfer": _kvxfer}
"""Makers, for a port and a shape, of the connector's `kv_transfer_config` and its environment."""

COMMON_TRANSFER = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
COMMON_ENVIRONMENT = ON_SHARED_CORES | {
    "NIXL_LOG_LEVEL": "WARN",
    "PYTHONDONTWRITEBYTECODE": "",
    "UCX_MODULES": "^efa",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(eq=False, slots=True)
class Engine:
    """Server of one engine, whose addresses stay the same after a restart.

    Its log, which spans restarts, is in the directory under its name.
    """

    name: str
    connector: str
    shape: EngineShape
    directory: Path
    port: int = field(init=False, default_factory=lambda: free_ports(PORTS_PER_ENGINE))
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def log_path(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def audit_directory(self) -> Path:
        """Directory of the audits, which engines side by side share."""
        return self.directory / "audit"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def log(self, start: int = 0) -> str:
        """Read what it printed, from an offset in bytes on."""
        return self.log_path.read_bytes()[start:].decode(errors="replace")

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it."""
        self.close()
        transfer, environment = CONNECTORS[self.connector](self.port + 1, self.shape)
        self.audit_directory.mkdir(parents=True, exist_ok=True)
        hooks = [audit.Hook.FLIP_LOADED_BIT] if self.shape.alters_loads else []
        release = self.shape.release_folder
        environment |= {"PYTHONPATH": release} if release else {}
        with self.log_path.open("ab") as log:
            self._process = launch(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *_options(self.shape, self.port),
                    f"--kv-transfer-config={json.dumps(transfer | COMMON_TRANSFER)}",
                ],
                log,
                COMMON_ENVIRONMENT | environment | audit.environment(self.audit_directory, hooks),
            )

    async def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not await self.is_healthy():
            if not self.is_running or time.monotonic() > deadline_s:
                tail = "\n".join(self.log().splitlines()[-30:])
                raise Failure(f"{self.name} did not start; last lines of {self.log_path}:\n{tail}")
            await asyncio.sleep(POLL_S)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def is_healthy(self) -> bool:
        try:
            status, _ = await self._ask("GET", f"{self.url}/health")
        except Failure:
            return False
        return status == 200

    async def _ask(
        self, method: str, url: str, *, limit_s: float = TIMEOUT_S, **how: Any
    ) -> tuple[int, str]:
        """Ask it, or a router in its place; return the status and text of the answer."""
        limit = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as client,
                client.request(method, url, **how) as response,
            ):
                return response.status, await response.text()
        except TimeoutError as exc:
            raise Failure(f"no answer of {self.name} in {limit_s:.0f} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Failure(f"{self.name} ended the connection ({type(exc).__name__})") from exc

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        if self._process is not None:
            signal_all(self._process, number)

    def close(self) -> None:
        """Kill all of its processes; may be called again."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        limit_s: float = ANSWER_LIMIT_S,
        url: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Generation:
        """Complete a prompt greedily; a cancelled call closes the connection, as a client does.

        With `url`, a router is asked instead of the engine.
        """
        body = {
            "model": self.shape.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({} if params is None else {"kv_transfer_params": dict(params)}),
            **({} if cache_salt is None else {"cache_salt": cache_salt}),
        }
        start_s = time.perf_counter()
        address = f"{url or self.url}/v1/completions"
        status, text = await self._ask("POST", address, limit_s=limit_s, json=body, headers=headers)
        if status != 200:
            raise Failure(f"{self.name} answers HTTP {status}: {text[:200]}")
        return _answer(text, time.perf_counter() - start_s)

    async def metrics(self) -> Metrics:
        """Read its metrics: sums of each name, and of each `name{source}` and `name{reason}`."""
        _, text = await self._ask("GET", f"{self.url}/metrics")
        values: defaultdict[str, float] = defaultdict(float)
        for sample in SAMPLE.finditer(text):
            values[sample["name"]] += float(sample["value"])
            if label := re.search(r'(?:source|reason)="(\w+)"', sample["labels"] or ""):
                values[f"{sample['name']}{{{label[1]}}}"] += float(sample["value"])
            if blocks := re.search(r'num_gpu_blocks="(\d+)"', sample["labels"] or ""):
                values["num_blocks"] = float(blocks[1])
        return dict(values)


def _options(shape: EngineShape, port: int) -> list[str]:
    share = share_of_gpu()
    return [
        f"--model={models.make(shape.model)}",
        f"--served-model-name={shape.model}",
        f"--host={HOST}",
        f"--port={port}",
        f"--dtype={shape.dtype}",
        f"--tensor-parallel-size={shape.tensor_parallel_size}",
        f"--data-parallel-size={shape.data_parallel_size}",
        f"--block-size={shape.tokens_per_block}",
        f"--kv-cache-memory-bytes={shape.cache_mib << 20}",
        f"--max-num-batched-tokens={shape.tokens_per_step}",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--max-num-seqs=16",
        *([] if shape.takes_text else ["--skip-tokenizer-init"]),
        "--enforce-eager",
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        *([] if share is None else [f"--gpu-memory-utilization={share}"]),
    ]


def _answer(text: str, seconds: float) -> Generation:
    response = json.loads(text)
    (choice,) = response["choices"]
    return Generation(
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        cached_tokens=0,
        first_token_s=0,
        last_token_s=seconds,
        params=response["kv_transfer_params"] or {},
    )
