"""The side of `tests.e2e.engine_process` that runs vLLM, in the engine's process."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.engine_process import NONE, SHUTDOWN_TIMEOUT_S, EngineConfig, Generation

SETTLE_ROUNDS = 50
OF_VLLM = (
    *("model", "dtype", "max_model_len", "tensor_parallel_size", "kv_cache_memory_bytes"),
    *("block_size", "gpu_memory_utilization", "scheduler_cls"),
)
"""Fields of the configuration that `LLM` takes as they are, unless they are None."""
LABELS = {"engine", "model_name"}
"""Labels that vLLM gives every metric."""


class _Engine:
    """vLLM engine, whose public methods answer those of `EngineProcess` with the same names."""

    def __init__(self, config: EngineConfig) -> None:
        from vllm import LLM

        offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        transfer = config.connector and offloading | {"kv_connector_extra_config": config.connector}
        chosen = {name: getattr(config, name) for name in OF_VLLM}
        if config.max_lora_rank:
            chosen |= {"enable_lora": True, "max_lora_rank": config.max_lora_rank}
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_num_seqs=16,
            enable_prefix_caching=True,
            disable_log_stats=False,
            max_num_batched_tokens=config.max_model_len,
            kv_transfer_config=transfer or config.transfer,
            kv_events_config=config.events,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        self._num_requests = 0
        self._step_times: list[float] = []

    def reset(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def step_times(self) -> list[float]:
        return self._step_times

    def generate(
        self,
        *,
        prompts: list[list[int]],
        max_tokens: int,
        read_cache: bool = True,
        params: Mapping[int, Mapping[str, Any]] = NONE,
        start_after_steps: Mapping[int, int] = NONE,
        limits: Mapping[int, int] = NONE,
        adapter: str = "",
        adapter_id: int = 1,
    ) -> list[Generation]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine = self._llm.llm_engine
        lora = adapter and LoRARequest("adapter", adapter_id, adapter)

        def sampling(index: int) -> SamplingParams:
            told = params.get(index)
            return SamplingParams(
                temperature=0,
                max_tokens=limits.get(index, max_tokens),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                skip_reading_prefix_cache=not read_cache,
                extra_args=told and {"kv_transfer_params": told},
            )

        names = [str(self._num_requests + index) for index in range(len(prompts))]
        self._num_requests += len(names)
        outputs: dict[str, Any] = {}
        start_s: dict[str, float] = {}
        token_s: dict[str, list[float]] = {name: [] for name in names}
        waiting = {index: start_after_steps.get(index, 0) for index in range(len(names))}
        self._step_times = []
        while True:
            num_steps = len(self._step_times)
            for index in [at for at, after in waiting.items() if after <= num_steps]:
                del waiting[index]
                start_s[names[index]] = time.perf_counter()
                prompt = {"prompt_token_ids": prompts[index]}
                engine.add_request(names[index], prompt, sampling(index), lora_request=lora or None)
            if not engine.has_unfinished_requests():
                break
            began_s = time.perf_counter()
            stepped = engine.step()
            ended_s = time.perf_counter()
            for output in stepped:
                outputs[output.request_id] = output
                if output.outputs[0].token_ids:
                    token_s[output.request_id].append(ended_s - start_s[output.request_id])
            self._step_times.append(ended_s - began_s)
        return [_generation(outputs.get(name), token_s=token_s[name]) for name in names]

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = metric.value if hasattr(metric, "value") else getattr(metric, "count", 0)
            ours = {name: each for name, each in metric.labels.items() if name not in LABELS}
            labels = ",".join(f'{name}="{ours[name]}"' for name in sorted(ours))
            for series in {metric.name, f"{metric.name}{{{labels}}}" if ours else metric.name}:
                values[series] = values.get(series, 0) + value
        return values

    def change_weights(self, *, stop: str) -> None:
        if stop == "pause":
            core: Any = self._llm.llm_engine.engine_core
            core.engine_core.pause_scheduler()
            self._llm.apply_model(_train)
            core.engine_core.resume_scheduler()
        else:
            self._llm.sleep(level=1)
            self._llm.apply_model(_train)
            self._llm.wake_up()

    def settle(self) -> None:
        stored: list[float] = []
        for _ in range(SETTLE_ROUNDS):
            # Workers continue stores in each step; vLLM counts a store when it has ended.
            self.generate(prompts=[[5, 6, 7]], max_tokens=12, read_cache=False)
            metrics = self.metrics()
            stored.append(metrics.get("vllm:kv_offload_store_bytes", 0))
            # A chunk that is being copied to a lower tier is pinned.
            is_quiet = not metrics.get("vllm:kvxfer_blocks_in_use", 0)
            if is_quiet and len(set(stored[-3:])) == 1 < len(stored) - 1:
                return


def _train(model: Any) -> None:
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)


def _generation(output: Any, *, token_s: Sequence[float]) -> Generation:
    completion = output.outputs[0] if output else None
    token_ids = list(completion.token_ids) if completion else []
    logprobs = (completion.logprobs if completion else None) or []
    return Generation(
        token_ids=token_ids,
        logprobs=[steps[token].logprob for token, steps in zip(token_ids, logprobs, strict=False)],
        cached_tokens=(output.num_cached_tokens or 0) if output else 0,
        first_token_s=token_s[0] if token_s else 0.0,
        last_token_s=token_s[-1] if token_s else 0.0,
        params=(output.kv_transfer_params or {}) if output else {},
    )


def _serve(pipe: Any) -> None:
    engine = _Engine(pipe.recv())
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(engine, name)(**arguments))
    engine._llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
