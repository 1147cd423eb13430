"""Prefix cache of transformers: what it refuses, by name."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvxfer.engine_side import VLLMKeys  # noqa: E402
from kvxfer.errors import InvalidArgumentError, UnsupportedEngineError  # noqa: E402
from kvxfer.integrations.transformers import interface  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    FAMILIES,
    REFUSED,
    fill,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
    shared_model,
    with_cache,
)


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_prefixes_cannot_be_kept(family: str, tmp_path: Path) -> None:
    config_class, settings, reason = REFUSED[family]
    model = make_model(config_class, settings)
    with pytest.raises(InvalidArgumentError) as caught:
        open_cache(model, tmp_path)
    assert reason in str(caught.value)
    assert type(model).__name__ in str(caught.value)


def test_a_model_without_generate_or_weights_in_memory(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model is 'Linear'; expected a model with gen"):
        open_cache(torch.nn.Linear(2, 2), tmp_path)
    model = make_model(*FAMILIES["llama"])
    model.model.layers[1].mlp.gate_proj.to("meta")
    with pytest.raises(InvalidArgumentError, match=r"layers\.1\.mlp\.gate_proj\.weight on meta"):
        open_cache(model, tmp_path)


PROMPT = torch.arange(10, 50)[None]
MASK = torch.ones_like(PROMPT)
PADDED = torch.cat((torch.ones((1, 3), dtype=torch.long), PROMPT), dim=1)
OTHER_SHAPE = r"attention_mask is .* \(1, 40\)"


@pytest.fixture(scope="module")
def multimodal() -> Any:
    """Make a model of texts, images and sounds, as Phi-4-multimodal has them."""
    model = make_model(*FAMILIES["llama"])
    model.generation_config.pad_token_id = 1
    model.config.image_token_id = 6
    model.config.vision_config = {"image_token_id": 7, "bos_token_id": 3}
    model.config.parts = [{"sound": {"speech_token_ids": [8, 9]}}]
    model.config.codec_eos_token_id = 5  # of another vocabulary
    return model


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ("text", None, "^input_ids is "),
        (torch.zeros(1, 3), None, "^input_ids is "),
        ([[1, 2], [3]], None, "^input_ids is "),
        ([3, -1], None, "^input_ids is "),  # as a model's placeholders of images may be
        (PROMPT.repeat(2, 1), None, "input_ids is '2 sequences'"),
        (PADDED, None, r"padding \(token 1\) at 0"),
        (torch.tensor([[3, 6, 5]]), None, r"\bimage_token_id 6 at 1"),
        (torch.tensor([[3, 4, 7, 5]]), None, r"vision_config\.image_token_id 7 at 2"),
        (torch.tensor([[3, 9, 5]]), None, r"sound\.speech_token_ids 9 at 1"),
        (PROMPT, MASK.cumsum(1) // 4, "attention_mask is 'zeros in it'"),
        (PROMPT, PROMPT.new_ones(1, 1, 40, 40), OTHER_SHAPE),  # each token sees every other one
        (PROMPT, PROMPT.new_ones(1, 39), OTHER_SHAPE),
    ],
)
def test_what_is_no_text_of_one_sequence(
    multimodal: Any, ids: Any, mask: Any, words: str, tmp_path: Path
) -> None:
    with open_cache(multimodal, tmp_path) as cache:
        for call in (cache.load, cache.generate):
            with pytest.raises(InvalidArgumentError, match=words):
                call(ids, attention_mask=mask)
        assert num_loaded(cache, PADDED, attention_mask=torch.ones_like(PADDED)) == 0
        assert num_loaded(cache, torch.tensor([[3, 4, 5]])) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("num_return_sequences", 2),
        ("use_cache", False),
        ("past_key_values", transformers.DynamicCache()),
        ("assistant_model", torch.nn.Linear(2, 2)),
        ("inputs_embeds", torch.zeros(1, 2, 64)),
        ("pixel_values", torch.zeros(1, 3, 8, 8)),
        ("images", np.zeros((1, 3, 8, 8), np.float32)),
        ("adapter_names", ["de"]),
        ("custom_generate", str),
        ("token_healing", True),
        ("penalty_alpha", 0.5),
        ("cache_implementation", "static"),
        ("use_cache", None),  # the model would compute the whole prompt, as with False
        ("generation_config", {"num_beams": 2}),
        ("attention_mask", torch.ones(40, 1)),
    ],
)
def test_arguments_of_generate(name: str, value: Any, tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        with pytest.raises(InvalidArgumentError, match=f"^{name} is "):
            cache.generate(prompt, **{name: value})
        if type(value) is int:
            config = transformers.GenerationConfig(**{name: value}, do_sample=True)
            with pytest.raises(InvalidArgumentError, match=f"^{name} is 2"):
                cache.generate(prompt, generation_config=config)


def test_what_generate_itself_takes_is_allowed(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    processors = transformers.LogitsProcessorList([transformers.MinLengthLogitsProcessor(50, 2)])
    with open_cache(model, tmp_path) as cache:
        for _ in range(2):
            output = cache.generate(
                prompt,
                generation_config=transformers.GenerationConfig(max_new_tokens=8),
                attention_mask=torch.ones_like(prompt),
                logits_processor=processors,
                stopping_criteria=transformers.StoppingCriteriaList(),
                do_sample=False,
                cache_implementation=None,
                pixel_values=None,
                use_cache=True,
            )
            assert output.shape[1] == 48
        assert num_loaded(cache, prompt) == 32


def test_a_cache_of_another_kind_in_the_settings_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
        for call in (cache.load, cache.generate):
            with pytest.raises(InvalidArgumentError, match=r"^cache_implementation is 'st"):
                call(prompt)
        monkeypatch.setattr(model.generation_config, "cache_implementation", "hybrid")
        assert cache.generate(prompt, max_new_tokens=2).shape[1] == 42  # as checkpoints have it


def test_caches_that_do_not_have_every_token_of_one_sequence(tmp_path: Path) -> None:
    model, prompt = shared_model("gemma3"), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        sliding = transformers.DynamicCache(config=model.config)
        model(prompt, **with_cache(sliding))
        with pytest.raises(InvalidArgumentError, match="layer 0: DynamicSlidingWindowLayer"):
            cache.store(prompt, sliding)
        beams = cache.load(prompt)
        model(prompt, **with_cache(beams))
        beams.batch_repeat_interleave(4)
        with pytest.raises(InvalidArgumentError, match="layer 0: 4 sequences"):
            cache.store(prompt, beams)
        with pytest.raises(InvalidArgumentError, match="output is '2 sequences'"):
            cache.store(prompt.repeat(2, 1), beams)
        for other, found in (
            ({"num_hidden_layers": 4}, "4 layers"),
            ({"head_dim": 32}, "head_dim="),
        ):
            past = transformers.DynamicCache()
            make_model("LlamaConfig", other)(prompt, **with_cache(past))
            with pytest.raises(InvalidArgumentError, match=found):
                cache.store(prompt, past)
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(InvalidArgumentError, match="past is 'StaticCache'"):
            cache.store(prompt, static)


def test_tokens_that_are_not_those_of_the_cache(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        past = cache.load(prompt)
        model(prompt, **with_cache(past))
        with pytest.raises(InvalidArgumentError, match="tokens that begin otherwise"):
            cache.store(prompt_of(40, seed=1), past)
        with pytest.raises(InvalidArgumentError, match="output is '39 tokens'"):
            cache.store(prompt[:, :39], past)
        assert cache.store(prompt, past) == 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens_per_page", 0),
        ("revision", None),
        ("engine_keys", "sglang"),
    ],
)
def test_arguments_of_the_cache(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value!r}"):
        open_cache(shared_model(), tmp_path, **{name: value})
    with pytest.raises(InvalidArgumentError, match="backend is 'nothing'"):
        open_cache(shared_model(), "nothing://")


def test_a_store_that_vllm_has_not_opened(tmp_path: Path) -> None:
    model = shared_model()
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt_of(40))
    with pytest.raises(InvalidArgumentError, match=r"one namespace of revision .* opened by vLLM"):
        open_cache(model, tmp_path, engine_keys=VLLMKeys(seed="0"), tokens_per_page=None)


def test_a_release_whose_caches_count_their_tokens_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingCache(transformers.DynamicCache):  # type: ignore[name-defined,misc]
        num_tokens = 0

        def update(self, keys: Any, values: Any, at: int, *more: Any) -> Any:
            self.num_tokens += keys.shape[2]
            return super().update(keys, values, at, *more)

        def get_seq_length(self, *_: Any) -> int:
            return self.num_tokens

    monkeypatch.setattr(interface, "DynamicCache", CountingCache)
    with pytest.raises(UnsupportedEngineError, match="does not go on from the keys and values"):
        open_cache(shared_model(), tmp_path)


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try: import kvxfer.integrations.transformers\n"
        "except ImportError as exc: print(exc)"
    )
    repository = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=repository
    )
    named = "kvxfer.integrations.transformers needs the package transformers"
    assert answer.stdout.strip() == f"{named}: pip install 'kvxfer[transformers]'"
    assert importlib.import_module("kvxfer.integrations.transformers").PrefixCache


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_cache", False),
        ("prompt_lookup_num_tokens", 3),
        ("prefill_chunk_size", 16),
        ("assistant_early_exit", 1),
    ],
)
def test_settings_that_compute_the_whole_prompt_behind_a_prefix(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by their wrong tokens: the prefix would be there twice."""
    model, prompt = shared_model(), prompt_of(40)
    refused = pytest.raises(InvalidArgumentError, match=rf"^{name} is {value}; ")
    with open_cache(model, tmp_path) as cache:
        with refused:
            cache.generate(prompt, **{name: value})
        with refused:
            cache.generate(prompt, generation_config=transformers.GenerationConfig(**{name: value}))
        monkeypatch.setattr(model.generation_config, name, value)
        with refused:
            cache.generate(prompt)
        with refused:  # which leaves that open
            cache.generate(prompt, generation_config=transformers.GenerationConfig(max_length=50))
        with refused:
            cache.load(prompt)
