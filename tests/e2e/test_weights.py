"""Retrained weights and adapters: no page of the old ones is used, and no file is lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.proxy.legs import LEND
from tests.e2e.engine_process import ON_SHARED_CORES, TOKENS_PER_BLOCK, EngineProcess
from tests.e2e.harness import llama, random_prompts
from tests.ports import free_ports

LIMIT_S = 900
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(LIMIT_S)]

RANK, NUM_LAYERS, HIDDEN = 8, 4, 128
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MAX_TOKENS = 6
NUM_TOKENS = 700
NUM_PAGES = -(-NUM_TOKENS // TOKENS_PER_BLOCK)


def train(folder: Path, seed: int) -> None:
    """Write an adapter as PEFT saves it; every seed has other weights."""
    folder.mkdir(exist_ok=True)
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=source) / 2
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=source) / 2
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Start an engine that lends and one that reads."""
    configs = [
        llama(
            max_lora_rank=RANK,
            multiprocessing=True,  # P lends between its steps, too
            environment=ON_SHARED_CORES,
            transfer={
                "kv_connector": "KVXferConnector",
                "kv_connector_module_path": "kvxfer.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "listen": f"127.0.0.1:{free_ports()}",
                    "lease_s": 120,
                    "ask_timeout_s": 30,
                    "timeout_s": 60,
                },
            },
        )
        for _ in range(2)
    ]
    with EngineProcess(configs[0]) as prefill, EngineProcess(configs[1]) as decode:
        yield prefill, decode
    for engine in (prefill, decode):
        assert "Traceback" not in engine.log(), engine.log()


def test_pages_of_an_adapter_are_handed_over_until_it_is_trained_anew(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    prefill, decode = pair
    folder = tmp_path / "adapter"
    [prompt] = random_prompts(1, shared_tokens=NUM_TOKENS, own_tokens=5)

    def offer() -> dict[int, dict[str, Any]]:
        [answer] = prefill.generate([prompt], max_tokens=1, params={0: LEND}, adapter=str(folder))
        return {0: answer.params}

    def go_on(adapter_id: int, **how: Any) -> tuple[list[int], float]:
        """Generate on an empty device; return the tokens, and the pages verified until now."""
        assert decode.reset()
        [answer] = decode.generate(
            [prompt], max_tokens=MAX_TOKENS, adapter=str(folder), adapter_id=adapter_id, **how
        )
        return answer.token_ids, decode.metrics().get("vllm:kvxfer_pd_pages_verified", 0)

    train(folder, 1)
    old, _ = go_on(1)
    assert go_on(1, params=offer()) == (old, NUM_PAGES)

    params = offer()  # made with the weights that are about to be replaced
    train(folder, 2)
    new, _ = go_on(2)
    assert new != old
    assert go_on(2, params=params) == (new, NUM_PAGES)


PROMPT = [3 + (7 * n) % 200 for n in range(1000)]
WHOLE_BLOCKS = len(PROMPT) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
HITS = "vllm:external_prefix_cache_hits"


def roll_out(stop: str, folder: Path | None = None) -> tuple[list[list[int]], list[float], str]:
    """Roll out with two sets of weights, each twice, the second time from below the own cache.

    Returns:
        The tokens and the loaded tokens of each rollout, and what the engine logged.
    """
    connector = folder and {
        "spec_name": "KVXferOffloadingSpec",
        "spec_module_path": "kvxfer.integrations.vllm",
        "backend": ["host://?capacity=64MiB", f"file://{folder}?capacity=1GiB"],
    }
    tokens, loaded = [], []
    environment = {"VLLM_LOGGING_LEVEL": "WARNING"}
    with EngineProcess(llama(connector=connector, environment=environment)) as engine:
        for rollout in range(4):
            if rollout == 2:
                engine.change_weights(stop)
            before = engine.metrics().get(HITS, 0)
            [generation] = engine.generate([PROMPT], max_tokens=8)
            tokens.append(generation.token_ids)
            loaded.append(engine.metrics().get(HITS, 0) - before)
            engine.settle()
            assert engine.reset()
    log = engine.log()  # in which vLLM warns, with a traceback, that there is no tokenizer
    assert not [line for line in log.splitlines() if "Traceback" in line and "WARN" not in line]
    return tokens, loaded, log


@pytest.mark.parametrize("stop", ["pause", pytest.param("sleep", marks=pytest.mark.exhaustive)])
def test_weights_that_change_get_no_page_of_others_and_files_stay_for_the_next_engine(
    stop: str, tmp_path: Path
) -> None:
    computed, _, _ = roll_out(stop)
    assert computed[0] == computed[1] != computed[2]
    for from_files in (0, WHOLE_BLOCKS):  # the second engine begins with the weights on disk
        tokens, loaded, log = roll_out(stop, tmp_path)
        assert tokens == computed
        assert loaded == [from_files, WHOLE_BLOCKS, 0, WHOLE_BLOCKS]
        assert "vLLM has reset its cache, as for new weights" in log
        assert "earlier blocks stay for other engines" in log
