"""Prefix cache of transformers: it finds prefixes, and does not change greedy tokens."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvxfer.errors import ClosedError, InvalidArgumentError, UnsupportedEngineError  # noqa: E402
from kvxfer.integrations.transformers import interface  # noqa: E402
from kvxfer.integrations.transformers.model_layers import LayerShape  # noqa: E402
from kvxfer.integrations.transformers.page_pool import PagePool  # noqa: E402
from tests.clock import LIMIT_S, until  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    FAMILIES,
    REFUSED,
    TOKENS_PER_PAGE,
    VOCAB_SIZE,
    files_url,
    fill,
    generate,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
    shared_model,
    with_cache,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_with_and_without_the_cache(family: str, tmp_path: Path) -> None:
    model, prompt = shared_model(family), prompt_of(70)
    alone = generate(model, prompt)
    with open_cache(model, tmp_path) as cache:
        assert fill(cache, model, prompt) == 80  # of 89 tokens that have keys and values
        past = cache.load(prompt)
        assert past.get_seq_length() == 64
        assert generate(model, prompt, **with_cache(past)) == alone
        longer = torch.cat((prompt, torch.tensor([alone])), dim=1)
        past = cache.load(longer)
        assert past.get_seq_length() == 80
        assert generate(model, longer, **with_cache(past)) == generate(model, longer)
        past = cache.load(prompt)
    for layer in past.layers:
        layer.values = layer.values.flip(2)
    assert generate(model, prompt, **with_cache(past)) != alone, "tokens depend on the cache"


def test_a_page_of_the_pool_is_free_when_a_copy_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy may go to a GPU, and the page is then reused."""
    layer = LayerShape(
        num_kv_heads=2, head_dim=4, head_dim_v=4, dtype=torch.float32, device=torch.device("cpu")
    )
    pool = PagePool([layer], 4, 1 << 12, {}, 2)
    room = pool.make_room(2)
    past: Any = SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in room])
    copy, go_on = torch.Tensor.copy_, list[bool]()

    def copy_noted(
        target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
    ) -> torch.Tensor:
        go_on.append(non_blocking)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_noted)
    pool.give_out(room, [0, 1], [1, 0])
    pool.take_in(past, [0, 1], [1, 0])
    assert go_on == [False] * 8


def test_generate_does_all_three(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        first, second = (
            cache.generate(prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=full)
            for full in (True, False)
        )
        assert num_loaded(cache, prompt) == 32
        assert cache.store(prompt, cache.load(prompt)) == 0, "it is there"
    assert torch.equal(first.sequences, second)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=4, do_sample=False))


def test_a_model_of_images_finds_texts_from_its_first_call_on(tmp_path: Path) -> None:
    """Qwen2.5-VL notes at each call how far images have moved positions: None, or 0 of a text."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200}
    text |= {"num_key_value_heads": 2, "intermediate_size": 96}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    marks = {"image": 196, "video": 197, "vision_start": 198, "vision_end": 199}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "eos_token_id": None},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
        **{f"{name}_token_id": token for name, token in marks.items()},
    )
    prompt, found, outputs = prompt_of(40) % 190, [], []
    for _ in range(2):
        torch.manual_seed(20)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
        with open_cache(model, tmp_path) as cache:
            found.append(num_loaded(cache, prompt))
            outputs.append(cache.generate(prompt, max_new_tokens=9, do_sample=False).tolist())
            assert num_loaded(cache, prompt) == 32
            model.model.rope_deltas -= 12
            assert num_loaded(cache, prompt) == 0, "the positions of what follows are others"
            model.generate(torch.cat([prompt, prompt]), max_new_tokens=2, do_sample=False)
            again = cache.generate(prompt, max_new_tokens=9, do_sample=False).tolist()
            assert again == outputs[-1], "it notes 0 for each of two, which do not fit one"
    assert found == [0, 32]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("num_tokens", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_prefix_leaves_the_last_token_to_the_model(
    num_tokens: int, hit: int, tmp_path: Path
) -> None:
    model = shared_model()
    with open_cache(model, tmp_path) as cache:
        assert fill(cache, model, prompt_of(64)) == 80
        assert num_loaded(cache, prompt_of(64)[:, :num_tokens]) == hit


def test_a_loaded_cache_is_a_copy(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        one = cache.load(prompt)
        kept = [layer.keys.clone() for layer in one.layers]
        num_loaded(cache, prompt_of(70, seed=1))
        fill(cache, model, prompt_of(70, seed=2))
        assert all(map(torch.equal, kept, (layer.keys for layer in one.layers)))
        for layer in one.layers:
            layer.keys.zero_()
        assert all(map(torch.equal, kept, (each.keys for each in cache.load(prompt).layers)))


def test_pages_of_another_revision_size_or_data_type_are_others(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path, revision="one") as cache:
        fill(cache, model, prompt)
    others = (("one", 16, 32), ("two", 16, 0), ("", 16, 0), ("one", 8, 0))
    for revision, tokens_per_page, hit in others:
        settings = {"revision": revision, "tokens_per_page": tokens_per_page}
        with open_cache(model, tmp_path, **settings) as cache:
            assert num_loaded(cache, prompt) == hit
    with open_cache(model.to(torch.bfloat16), tmp_path, revision="one") as cache:
        assert num_loaded(cache, prompt) == 0
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 32


@pytest.mark.slow
@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_prompts_with_shared_prefixes_give_the_tokens_without_the_cache(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = random.Random(data.draw(st.integers(0, 2**32)))
    model, text = shared_model(), [source.randrange(3, VOCAB_SIZE) for _ in range(100)]
    with open_cache(model, tmp_path_factory.mktemp("store"), pool_bytes=1) as cache:
        longest = 0
        for _ in range(data.draw(st.integers(1, 4))):
            shared = data.draw(st.integers(0, 90))
            own = data.draw(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=30))
            prompt = torch.tensor([text[:shared] + own])
            past = cache.load(prompt)
            least = min(shared, longest) // TOKENS_PER_PAGE * TOKENS_PER_PAGE
            assert past.get_seq_length() >= min(least, shared + len(own) - 1)
            output = model.generate(prompt, **with_cache(past), max_new_tokens=3, do_sample=False)
            assert torch.equal(output, model.generate(prompt, max_new_tokens=3, do_sample=False))
            cache.store(output, past)
            longest = max(longest, shared)


@pytest.mark.slow
def test_threads_share_a_cache(tmp_path: Path) -> None:
    model = shared_model()
    expected = {seed: generate(model, prompt_of(40, seed=seed)) for seed in range(4)}

    def work(seed: int) -> None:
        for _ in range(5):
            prompt = prompt_of(40, seed=seed)
            past = cache.load(prompt)
            assert generate(model, prompt, **with_cache(past)) == expected[seed]
            fill(cache, model, prompt)

    with open_cache(model, tmp_path) as cache, ThreadPoolExecutor(len(expected)) as threads:
        list(threads.map(work, expected))


def test_a_call_that_hangs_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = shared_model(), prompt_of(40)
    hangs, may_go_on = threading.Event(), threading.Event()

    def give_out(*arguments: Any) -> None:
        monkeypatch.undo()
        hangs.set()
        assert may_go_on.wait(LIMIT_S)
        cache._pool.give_out(*arguments)

    with ThreadPoolExecutor(2) as threads, open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        monkeypatch.setattr(cache._pool, "give_out", give_out)
        hanging = threads.submit(num_loaded, cache, prompt)
        assert hangs.wait(LIMIT_S)
        assert num_loaded(cache, prompt) == 32
        assert fill(cache, model, prompt_of(40, seed=1)) > 0
        closing = threads.submit(cache.close)
        until(lambda: cache._guard.closed)
        assert not closing.done()
        may_go_on.set()
        assert hanging.result() == 32
        closing.result()


def test_what_was_generated_while_the_cache_was_closed_is_returned(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    with open_cache(model, tmp_path) as cache:
        streamer = Mock(end=cache.close)
        output = cache.generate(prompt, max_new_tokens=3, do_sample=False, streamer=streamer)
    assert torch.equal(output, expected)


def test_a_thread_that_runs_an_event_loop_may_call_it(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)

    async def call() -> int:
        with open_cache(model, ["host://?capacity=1MiB", files_url(tmp_path)]) as cache:
            fill(cache, model, prompt)
            return num_loaded(cache, prompt)

    assert asyncio.run(call()) == 32
    with open_cache(model, tmp_path) as cache:  # closing wrote all to the last tier
        assert num_loaded(cache, prompt) == 32


def test_a_closed_cache_says_so(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(20)
    cache = open_cache(model, tmp_path)
    past = cache.load(prompt)
    cache.close()
    cache.close()
    for call in (lambda: cache.load(prompt), lambda: cache.store(prompt, past), cache.__enter__):
        with pytest.raises(ClosedError, match="prefix cache"):
            call()


def test_gradients_and_modes_of_torch_stay_out_of_the_pages(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with torch.inference_mode():
        cache = open_cache(model, tmp_path)
    with cache:
        past = cache.load(prompt)
        model(prompt, **with_cache(past))
        assert past.layers[0].keys.requires_grad
        assert cache.store(prompt, past) == 32
        assert not cache.load(prompt).layers[0].keys.requires_grad


def test_a_model_that_was_converted_since_generates_without_pages(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        model.to(torch.bfloat16)
        alone = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(cache.generate(prompt, max_new_tokens=4, do_sample=False), alone)
        assert num_loaded(cache, prompt) == 0


# Bad pages and late backends cost time, but change no tokens.


@pytest.mark.slow
@pytest.mark.parametrize("bad_page", [0, 2])
def test_a_bad_page_is_a_shorter_prefix(bad_page: int, tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    alone = generate(model, prompt)
    with open_cache(model, tmp_path) as cache:
        pages: list[Path] = []
        for num_pages in range(1, 5):
            before = set(tmp_path.rglob("*.safetensors"))
            past = cache.load(prompt)
            tokens = prompt[:, : 16 * num_pages]
            model(tokens[:, past.get_seq_length() :], **with_cache(past))
            assert cache.store(prompt, past) == 16
            pages += set(tmp_path.rglob("*.safetensors")) - before
    data = bytearray(pages[bad_page].read_bytes())
    data[-100] ^= 1
    pages[bad_page].write_bytes(data)
    with open_cache(model, tmp_path) as cache:
        past = cache.load(prompt)
        assert past.get_seq_length() == 16 * bad_page
        assert generate(model, prompt, **with_cache(past)) == alone
        assert generate(model, prompt, **with_cache(cache.load(prompt))) == alone
        assert fill(cache, model, prompt) > 0
        assert num_loaded(cache, prompt) == 64


def test_no_time_is_no_hit(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    with open_cache(model, tmp_path) as cache:
        past = cache.load(prompt)
        model(prompt, **with_cache(past))
        assert cache.store(prompt, past, timeout_s=0) == 0
        assert cache.store(prompt, past) == 64
        assert num_loaded(cache, prompt, timeout_s=0) == 0
        assert num_loaded(cache, prompt, timeout_s=None) == 64


# What is refused, by name.


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_prefixes_cannot_be_kept(family: str, tmp_path: Path) -> None:
    config_class, settings, reason = REFUSED[family]
    model = make_model(config_class, settings)
    with pytest.raises(InvalidArgumentError) as caught:
        open_cache(model, tmp_path)
    assert reason in str(caught.value)
    assert type(model).__name__ in str(caught.value)


def test_a_model_in_training_has_no_pages(tmp_path: Path) -> None:
    """Dropout, which GPT-2 has, gives equal tokens other keys at each call."""
    model, prompt = make_model(*FAMILIES["gpt2"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        model.transformer.h[1].train()
        for _ in range(2):
            assert fill(cache, model, prompt) == 0
            assert num_loaded(cache, prompt) == 0
        with pytest.raises(InvalidArgumentError, match=r"in training, .* expected a model in eval"):
            open_cache(model, tmp_path)
        model.eval()
        assert fill(cache, model, prompt) == 48


def drop_some(module: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(values, 0.5, module.training)


class Dropper(torch.nn.Module):
    """Dropout of one's own, whose class does not say that it depends on training."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return drop_some(self, values)


def test_a_module_in_training_that_calls_dropout_elsewhere_has_no_pages(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["gpt2"]), prompt_of(40)
    dropper = model.transformer.h[1].mlp.dropout = Dropper().eval()
    with open_cache(model, tmp_path) as cache:
        assert fill(cache, model, prompt) == 48
        dropper.train()
        for _ in range(2):
            assert fill(cache, model, prompt) == 0
            assert num_loaded(cache, prompt) == 0
        with pytest.raises(InvalidArgumentError, match=r"in training, .* expected a model in eval"):
            open_cache(model, tmp_path)


def test_a_model_without_generate_or_weights_in_memory(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model is 'Linear'; expected a model with gen"):
        open_cache(torch.nn.Linear(2, 2), tmp_path)
    model = make_model(*FAMILIES["llama"])
    model.model.layers[1].mlp.gate_proj.to("meta")
    with pytest.raises(InvalidArgumentError, match=r"layers\.1\.mlp\.gate_proj\.weight on meta"):
        open_cache(model, tmp_path)


def test_the_error_of_a_model_that_fails_is_named_if_it_has_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(*FAMILIES["llama"])
    monkeypatch.setattr(model.model, "forward", Mock(side_effect=NotImplementedError))
    with pytest.raises(InvalidArgumentError, match=r"LlamaForCausalLM, which fails: NotImpl"):
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
        (PROMPT, MASK.cumsum(1) // 4, "attention_mask is 'values other than 1'"),
        (
            PROMPT,
            MASK * 2,
            "attention_mask is 'values other than 1'",
        ),  # positions twice as far apart
        (PROMPT, MASK / 2, "attention_mask is 'values other than 1'"),
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
        ("past_key_values", transformers.DynamicCache()),
        ("assistant_model", torch.nn.Linear(2, 2)),
        ("pixel_values", torch.zeros(1, 3, 8, 8)),
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


@pytest.mark.parametrize(
    "given", [{"pad_token_id": 30}, {"eos_token_id": 3}, {"eos_token_id": [3, 4]}], ids=str
)
def test_tokens_that_arguments_of_generate_make_padding(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """Found by their wrong pages: `generate()` masks them, and the keys do not say so."""
    model = make_model(*FAMILIES["llama"])
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 31
    with open_cache(model, tmp_path) as cache:
        for settings in (given, {"generation_config": transformers.GenerationConfig(**given)}):
            with pytest.raises(InvalidArgumentError, match=r"padding \(token 3[01]\) at 2[01]"):
                cache.generate(PROMPT, max_new_tokens=2, **settings)
            cache.generate(PROMPT, attention_mask=MASK, max_new_tokens=2, **settings)
        tensors = {name: torch.tensor(value) for name, value in given.items()}
        with pytest.raises(InvalidArgumentError, match="a prompt without padding"):
            cache.generate(PROMPT, max_new_tokens=2, **tensors)
        cache.generate(PROMPT, max_new_tokens=2)
        cache.generate(PROMPT, max_new_tokens=2, eos_token_id=[3, 31])


def test_what_generate_itself_takes_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = shared_model(), prompt_of(40)
    taken: dict[str, Any] = {
        "generation_config": transformers.GenerationConfig(max_new_tokens=8),
        "attention_mask": torch.ones_like(prompt),
        "logits_processor": [transformers.MinLengthLogitsProcessor(50, 2)],
        "do_sample": False,
        "cache_implementation": None,
        "pixel_values": None,
        "use_cache": True,
    }
    with open_cache(model, tmp_path) as cache:
        for _ in range(2):
            assert cache.generate(prompt, **taken).shape[1] == 48
        assert num_loaded(cache, prompt) == 32
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
        with pytest.raises(InvalidArgumentError, match="tokens with another beginning"):
            cache.store(prompt_of(40, seed=1), past)
        with pytest.raises(InvalidArgumentError, match="output is '39 tokens'"):
            cache.store(prompt[:, :39], past)
        assert cache.store(prompt, past) == 32


@pytest.mark.parametrize(
    ("name", "value"), [("tokens_per_page", 0), ("revision", None), ("engine_keys", "sglang")]
)
def test_arguments_of_the_cache(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} is {value!r}"):
        open_cache(shared_model(), tmp_path, **{name: value})
    with pytest.raises(InvalidArgumentError, match="backend is 'nothing'"):
        open_cache(shared_model(), "nothing://")


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
    with pytest.raises(UnsupportedEngineError, match="does not continue from the keys and values"):
        open_cache(shared_model(), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_cache", False),
        ("prompt_lookup_num_tokens", 3),
        ("prefill_chunk_size", 16),
        ("assistant_early_exit", 1),
        ("cache_implementation", "static"),
    ],
)
def test_settings_that_compute_the_whole_prompt_behind_a_prefix(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by their wrong tokens: the prefix would be there twice."""
    model, prompt = shared_model(), prompt_of(40)
    refused = pytest.raises(InvalidArgumentError, match=rf"^{name} is {value!r}; ")
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
