"""Keys and values of a real model: transformers and vLLM continue each other's prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.engine.__main__ import open_engine
from kvxfer.engine_side import VLLMKeys
from kvxfer.errors import InvalidArgumentError
from tests.e2e import models, text
from tests.e2e.conftest import Start
from tests.e2e.engine_process import ENVIRONMENT, TOKENS_PER_BLOCK

pytestmark = pytest.mark.e2e

TOKENS = 3 * TOKENS_PER_BLOCK
"""Tokens of whole blocks that vLLM keeps of a prompt."""
MAX_TOKENS = 12
SIZES: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "max_model_len": 1024}
KV_TOLERANCE = 1e-3
"""Tolerance: both engines compute in float32 and sum in another order; measured were 1e-4."""
KEYS = VLLMKeys(seed=ENVIRONMENT["PYTHONHASHSEED"])


def prefix_cache(model: Any, files: Path, **settings: Any) -> Any:
    from kvxfer.integrations.transformers import PrefixCache

    return PrefixCache(model, f"file://{files}?capacity=1GiB", **settings)


def continue_prompt(generate: Any, prompt: Sequence[int], **settings: Any) -> list[int]:
    output = generate(
        torch.tensor([prompt]),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        do_sample=False,
        **settings,
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def pages(files: Path) -> dict[str, Path]:
    return {file.name: file for file in files.rglob("*.safetensors")}


def test_transformers_and_vllm_continue_each_others_prompts(
    start: Start, tmp_path: Path, record_property: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder = models.make("smollm2")
    (prompt,) = text.prompts(folder / "tokenizer.json", 1, shared_tokens=TOKENS + 10)
    of_vllm, of_transformers = tmp_path / "vllm", tmp_path / "transformers"
    with start("smollm2", files=of_vllm, **SIZES) as engine:
        (computed,) = engine.computed([prompt], max_tokens=MAX_TOKENS)
        engine.settle()
    (described,) = of_vllm.glob("*/namespace.json")  # of an empty store that vLLM has opened
    (of_transformers / described.parent.name).mkdir(parents=True)
    (of_transformers / described.relative_to(of_vllm)).write_bytes(described.read_bytes())

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone = continue_prompt(model.generate, prompt)
    assert alone == computed.token_ids
    with prefix_cache(model, of_vllm, engine_keys=KEYS) as cache:
        past = cache.load(torch.tensor([prompt]))
        assert past.get_seq_length() == TOKENS
        assert continue_prompt(model.generate, prompt, past_key_values=past) == alone

    with prefix_cache(model, of_transformers, engine_keys=KEYS) as cache:
        assert continue_prompt(cache.generate, prompt) == alone
    theirs, ours = pages(of_vllm), pages(of_transformers)
    assert theirs.keys() == ours.keys()
    assert len(theirs) == TOKENS // TOKENS_PER_BLOCK
    largest = 0.0
    for name, file in theirs.items():
        one, other = load_file(file), load_file(ours[name])
        assert one.keys() == other.keys()
        largest = max(largest, *((one[each] - other[each]).abs().max().item() for each in one))
    record_property("largest difference of keys and values", largest)
    assert 0 < largest < KV_TOLERANCE, f"keys and values differ by {largest}"

    backwards = prompt[::-1]
    tiers = ["host://?capacity=256MiB", f"file://{of_transformers}?capacity=1GiB"]
    engine_of_own = open_engine(str(folder), tiers, KEYS)
    both = engine_of_own.generate([prompt, backwards], MAX_TOKENS)
    engine_of_own.transfers.close()
    assert [request.num_reused for request in both] == [TOKENS, 0]
    assert both[0].tokens[len(prompt) :] == alone

    with start("smollm2", files=of_transformers, **SIZES) as engine:
        continued = engine.generate([prompt, backwards], max_tokens=MAX_TOKENS)
    assert [each.cached_tokens for each in continued] == [TOKENS, TOKENS]
    assert continued[0].token_ids == computed.token_ids
    assert continued[1].token_ids == both[1].tokens[len(backwards) :]

    with torch.no_grad():
        model.model.layers[7].mlp.down_proj.weight.mul_(1.001)
    with pytest.raises(InvalidArgumentError, match=r"that differs in model\.layers\.7\.mlp\.down"):
        prefix_cache(model, of_vllm, engine_keys=KEYS)
