"""Script as trainers of reinforcement learning write it: weights change in an engine that runs.

`python -m tests.e2e.trainer MODEL pause|sleep [FOLDER]` runs the engine in its own process, above
files in a folder, or without kvxfer. Its last line is JSON: what was generated in each rollout, and
how many tokens of the prompt were loaded.
"""

import json
import os
import sys
import time
from typing import Any

from tests.e2e.engine_process import TOKENS_PER_BLOCK, share_of_gpu

ENGINE: dict[str, Any] = {"block_size": TOKENS_PER_BLOCK}
if (share := share_of_gpu()) is not None:
    ENGINE["gpu_memory_utilization"] = share
PROMPT = [3 + (7 * n) % 200 for n in range(1000)]


def start(model: str, folder: str) -> Any:
    """Start an engine in this process, without kvxfer where there is no folder."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings = {
        "spec_name": "KVXferOffloadingSpec",
        "spec_module_path": "kvxfer.integrations.vllm",
        "backend": ["host://?capacity=64MiB", f"file://{folder}?capacity=1GiB"],
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
    )
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        **ENGINE,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=32 << 20,
        disable_log_stats=False,
        kv_transfer_config=transfer if folder else None,
    )


def generate(llm: Any, prompt: list[int]) -> list[int]:
    """Generate eight tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def loaded_tokens(llm: Any) -> int:
    """Tokens that came from below the engine's own cache so far."""
    name = "external_prefix_cache_hits"
    return sum(int(each.value) for each in llm.get_metrics() if each.name.endswith(name))


def change_weights(model: Any) -> None:
    """Change every weight, as a step of training does."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)


def settle(llm: Any) -> None:
    """Let stores end: they go on between steps."""
    for number in range(3):
        generate(llm, [number + 3] * 6)
        time.sleep(0.2)


def train(llm: Any, stop: str) -> list[dict[str, Any]]:
    """Roll out with two sets of weights, each twice, the second time from below the own cache."""
    rollouts = []
    core = llm.llm_engine.engine_core.engine_core
    for update in range(2):
        if update and stop == "pause":
            core.pause_scheduler()
            llm.apply_model(change_weights)
            core.resume_scheduler()
        elif update:
            llm.sleep(level=1)
            llm.apply_model(change_weights)
            llm.wake_up()
        for _ in range(2):
            before = loaded_tokens(llm)
            tokens = generate(llm, PROMPT)
            rollouts.append({"tokens": tokens, "loaded": loaded_tokens(llm) - before})
            settle(llm)
            assert llm.reset_prefix_cache()
    return rollouts


if __name__ == "__main__":
    model, stop, *folder = sys.argv[1:]
    print(json.dumps(train(start(model, "".join(folder)), stop)))
