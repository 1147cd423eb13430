"""Pairs of real engines in `make bench NAME=pd`: one computes prompts, the other continues."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pd.bare_engines import HOST
from benchmarks.vllm.model import EngineModel
from examples.proxy.legs import LEND
from tests.e2e.engine_process import ON_SHARED_CORES, EngineConfig, EngineProcess, Generation
from tests.ports import free_ports

MAX_MODEL_LEN = 8192
CACHE_BYTES = 1 << 30
LEASE_S = 120
TIMEOUT_S = 10
PORTS_PER_ENGINE = 4
IDLE_S = 10.0
CACHED_AT_P = "remote_prefill_cached_tokens"
"""Parameter that vLLM adds. Source: `vllm/v1/engine/output_processor.py`."""

NUM_MEETINGS = 10
"""Maximum attempts to hand over a first prompt: while engines connect, D may compute it."""
MEETING_PROMPT = list(range(3, 303))
LOG_CHARACTERS = 8_000
"""Characters of an engine's log that are shown when nothing is handed over."""
SETTLE_S = 3.0
"""Time that an engine without requests needs to become idle."""

ENVIRONMENT = ON_SHARED_CORES | {"NIXL_LOG_LEVEL": "WARN", "UCX_MODULES": "^efa"}
COMMON_TRANSFER = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class NotLoadedError(RuntimeError):
    """D computed tokens of a prompt that it should have loaded."""


@dataclass(frozen=True, slots=True)
class EnginePair:
    """Prefill engine P and decode engine D, which are paused except while `running`."""

    connector: str
    prefill: EngineProcess
    decode: EngineProcess

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let both run inside the block, connected again if necessary; raises like `hand_over`.

        Outside of it they are paused, since even an idle `NixlConnector` polls all the time.
        """
        for engine in (self.prefill, self.decode):
            engine.resume()
        try:
            self._meet()
            yield
        finally:
            for engine in (self.prefill, self.decode):
                engine.pause()

    def offer(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Let P compute a prompt, or find it in its device cache; return the parameters for D."""
        (answer,) = self.prefill.generate([prompt], max_tokens=1, params={0: LEND})
        # With CACHED_AT_P, D would report the number of tokens cached at P instead of at D.
        return {name: value for name, value in answer.params.items() if name != CACHED_AT_P}

    def hand_over(self, prompt: Sequence[int]) -> Generation:
        """Let D continue a prompt of which it has no blocks.

        Raises:
            NotLoadedError: D did not load all tokens but the last.
        """
        params = self.offer(prompt)
        if not self.decode.reset():
            raise NotLoadedError("D still uses blocks of an earlier prompt")
        (answer,) = self.decode.generate([prompt], max_tokens=1, params={0: params})
        if answer.cached_tokens < len(prompt) - 1:
            raise NotLoadedError(f"only {answer.cached_tokens} of {len(prompt)} tokens were loaded")
        return answer

    def _meet(self) -> None:
        """Hand over a prompt until it is loaded; raises as `hand_over`, with the engines' logs."""
        for left in reversed(range(NUM_MEETINGS)):
            try:
                self.hand_over(MEETING_PROMPT)
            except NotLoadedError as exc:
                for name, engine in (("P", self.prefill), ("D", self.decode)):
                    exc.add_note(f"the log of {name} ends:\n{engine.log()[-LOG_CHARACTERS:]}")
                if not left:
                    raise
            else:
                return


@contextlib.contextmanager
def start_pair(model: EngineModel, connector: str) -> Iterator[EnginePair]:
    """Start a pair of engines, let them connect, and pause them.

    Each gets half of our cores, as if it had a machine of its own: vLLM steps without a pause while
    a lease is held or a load runs, so on shared cores the engines would disturb each other. A
    `NixlConnector` pins itself to the last core of its node; that is undone. Source: its
    `base_worker.py`, and `core.py` of vLLM.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    with start_engines(model, [connector] * 2) as (prefill, decode):
        for engine, own in ((prefill, cores[:half] or cores), (decode, cores[half:])):
            for stat in _processes(engine.process_id):
                for thread in stat.parent.glob("task/[0-9]*"):
                    with contextlib.suppress(OSError):  # it has ended
                        os.sched_setaffinity(int(thread.name), own)
        pair = EnginePair(connector, prefill, decode)
        with pair.running():
            pass
        yield pair


@contextlib.contextmanager
def start_engines(
    model: EngineModel, connectors: Sequence[str | None]
) -> Iterator[list[EngineProcess]]:
    """Start engines, all at once: with `KVXferConnector`, with `NixlConnector`, or without (None).

    Raises:
        EngineDiedError: An engine did not start; the others are closed.
    """
    with ThreadPoolExecutor(len(connectors)) as threads:
        starting = [threads.submit(_start, model, connector) for connector in connectors]
    with contextlib.ExitStack() as opened:
        for each in starting:
            if each.exception() is None:
                opened.enter_context(each.result())
        yield [each.result() for each in starting]


def idle_cores(engines: Sequence[EngineProcess]) -> list[float]:
    """Measure the cores that idle engines use; blocks."""
    time.sleep(SETTLE_S)
    before = [_cpu_seconds(engine.process_id) for engine in engines]
    time.sleep(IDLE_S)
    after = [_cpu_seconds(engine.process_id) for engine in engines]
    return [(end - begin) / IDLE_S for begin, end in zip(before, after, strict=True)]


def _start(model: EngineModel, connector: str | None) -> EngineProcess:
    port = free_ports(PORTS_PER_ENGINE)
    if connector == "KVXferConnector":
        settings = {"listen": f"{HOST}:{port}", "lease_s": LEASE_S, "ask_timeout_s": TIMEOUT_S}
        own = {"kv_connector_module_path": "kvxfer.integrations.vllm"}
    else:
        settings = {"kv_lease_duration": LEASE_S}
        own = {"kv_buffer_device": "cuda" if torch.cuda.is_available() else "cpu"}
    transfer = {"kv_connector": connector, "kv_connector_extra_config": settings, **own}
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    return EngineProcess(
        EngineConfig(
            model=str(model.folder),
            dtype=model.dtype,
            transfer=transfer | COMMON_TRANSFER if connector else None,
            multiprocessing=True,
            kv_cache_memory_bytes=CACHE_BYTES,
            max_model_len=MAX_MODEL_LEN,
            environment=ENVIRONMENT | side_channel,
        )
    )


def _processes(group: int) -> Iterator[Path]:
    """Find `/proc/PID/stat` of each process in a process group."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(_fields(each)[2]) == group:
                yield each


def _cpu_seconds(group: int) -> float:
    """Add up the processor time of all processes of a process group."""
    ticks = 0
    for each in _processes(group):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(each)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str]:
    """Read the fields of a process that follow its name; the first one is its state."""
    return stat.read_text().rpartition(")")[2].split()
