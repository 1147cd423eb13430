"""Prefix cache of transformers with the keys of vLLM, and pages in the order of its CPU kernels."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import kvxfer  # noqa: E402
from kvxfer.engine_side import VLLMKeys  # noqa: E402
from kvxfer.engine_side.weight_files import find_weights_revision  # noqa: E402
from kvxfer.errors import InvalidArgumentError  # noqa: E402
from kvxfer.integrations.transformers import PrefixCache  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    FAMILIES,
    TOKENS_PER_PAGE,
    changing,
    files_url,
    fill,
    generate,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
    with_cache,
)

KEYS = VLLMKeys(seed="0")
VLLM_CPU_AXES = {"k": ("head", "dim", "token")}
NUM_PAGES = 4


def saved_model(folder: Path, family: str = "llama") -> Any:
    make_model(*FAMILIES[family]).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def store_as_vllm(model: Any, prompt: torch.Tensor, files: Path, **identity: Any) -> None:
    """Store the pages of a prompt as vLLM does, by a mapping of memory in another layout."""
    past = transformers.DynamicCache()
    model(prompt, **with_cache(past))
    entries = {
        f"model.layers.{at}.self_attn.attn": [
            each[0, :, : NUM_PAGES * TOKENS_PER_PAGE].contiguous()
            for each in (layer.keys, layer.values)
        ]
        for at, layer in enumerate(past.layers)
    }
    heads, dim = past.layers[0].keys.shape[1], past.layers[0].keys.shape[3]
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=TOKENS_PER_PAGE, num_kv_heads=heads, head_dim=dim, dtype=torch.float32
    )
    config = kvxfer.KVCacheConfig(NUM_PAGES, (kvxfer.KVCacheGroup(spec, tuple(entries)),))
    caches = kvxfer.canonicalize(entries, config, layouts=dict.fromkeys(entries, "head block dim"))
    shard = kvxfer.WorkerShard(num_kv_heads=heads)
    mappings = kvxfer.map_caches(caches, shard, axes=VLLM_CPU_AXES)
    revision = find_weights_revision(model.config.name_or_path)
    fields = {"model": "served", "revision": revision, "dtype": "float32", **identity}
    keys = KEYS.chunk_keys(prompt[0].tolist(), tokens_per_chunk=TOKENS_PER_PAGE)[:NUM_PAGES]

    async def run() -> None:
        connected = kvxfer.connect(
            files_url(files), caches, namespace=kvxfer.Namespace(**fields), mappings=mappings
        )
        async with connected as engine:
            outcomes = await engine.store(keys, [range(NUM_PAGES)])
            assert all(outcome.done for outcome in outcomes), outcomes

    asyncio.run(run())


def open_shared(model: Any, files: Path, **settings: Any) -> Any:
    return open_cache(model, files, **{"engine_keys": KEYS, "tokens_per_page": None, **settings})


def test_pages_of_vllm_are_read_and_continued(tmp_path: Path) -> None:
    model, prompt = saved_model(tmp_path / "model"), prompt_of(70)
    store_as_vllm(model, prompt, tmp_path / "files")
    alone = generate(model, prompt)
    with open_shared(model, tmp_path / "files") as cache:
        assert cache.tokens_per_page == TOKENS_PER_PAGE
        past = cache.load(prompt)
        assert past.get_seq_length() == 64
        assert generate(model, prompt, **with_cache(past)) == alone
        assert fill(cache, model, prompt) == 16
    assert len(list((tmp_path / "files").glob("*/namespace.json"))) == 1


def test_a_compiled_model_finds_the_pages_of_vllm(tmp_path: Path) -> None:
    model, prompt = saved_model(tmp_path / "model"), prompt_of(70)
    store_as_vllm(model, prompt, tmp_path / "files")
    with open_shared(torch.compile(model, backend="eager"), tmp_path / "files") as cache:
        assert num_loaded(cache, prompt) == 64


@pytest.mark.slow
def test_keys_called_vllm_are_those_of_an_engine_with_the_seed_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the three lines of docs/transformers.md."""
    model, prompt, files = saved_model(tmp_path / "model"), prompt_of(70), tmp_path / "files"
    store_as_vllm(model, prompt, files)
    alone = generate(model, prompt)
    for seed, hit in ((KEYS.seed, 64), ("another", 0), (KEYS.seed, 64)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with PrefixCache(model, files_url(files), engine_keys="vllm") as cache:
            assert num_loaded(cache, prompt) == hit
            output = cache.generate(prompt, max_new_tokens=20, do_sample=False)
            assert output[0, prompt.shape[1] :].tolist() == alone


def train_a_weight(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changing("model.layers.1.self_attn.scaling", 9.0), r"another model\.layers\.1\.self_attn"),
        (lambda model: model.train(), r"in training, .* expected a model in eval\(\)"),
        (train_a_weight, r"one that differs in model\.layers\.2\.mlp\.down_proj"),
        (
            changing("model.layers.0.self_attn.extra", torch.nn.Linear(2, 2)),
            r"self_attn\.extra\.\w+, which is in no file",
        ),
        (changing("config.rms_norm_eps", 0.5), "a configuration that differs in rms_norm_eps"),
    ],
)
def test_a_model_that_is_not_that_of_the_files_finds_nothing_and_is_refused(
    change: Callable[[Any], object], words: str, tmp_path: Path
) -> None:
    model, prompt = saved_model(tmp_path / "model"), prompt_of(70)
    store_as_vllm(model, prompt, tmp_path / "files")
    with open_shared(model, tmp_path / "files") as cache:
        assert num_loaded(cache, prompt) == 64
        change(model)
        assert num_loaded(cache, prompt) == 0
        assert fill(cache, model, prompt_of(70, seed=1)) == 0
    with pytest.raises(InvalidArgumentError, match=words):
        open_shared(model, tmp_path / "files")


def test_a_namespace_is_chosen_among_several(tmp_path: Path) -> None:
    model, prompt, files = saved_model(tmp_path / "model"), prompt_of(70), tmp_path / "files"
    store_as_vllm(model, prompt, files)
    ours = next(files.glob("*/namespace.json")).parent.name
    store_as_vllm(model, prompt, files, config_hash="of another release")
    store_as_vllm(model, prompt, files, revision="other weights")
    with pytest.raises(InvalidArgumentError, match=rf"one namespace of .*{ours}"):
        open_shared(model, files)
    with open_shared(model, files, namespace=ours) as cache:
        assert num_loaded(cache, prompt) == 64
    with pytest.raises(InvalidArgumentError, match="one namespace of revision 'none'"):
        open_shared(model, files, revision="none")


@pytest.mark.parametrize(
    "identity",
    [
        {"quantization": "weights fp8, cache auto"},
        {"quantization": "weights None, cache fp8_e5m2"},
        {"revision": "{} overridden 0123"},
    ],
)
def test_an_engine_that_computes_otherwise_than_its_files_say_is_refused(
    identity: dict[str, str], tmp_path: Path
) -> None:
    """Such as one with `--quantization`, or with other rotary embeddings by `--hf-overrides`."""
    model, prompt, files = saved_model(tmp_path / "model"), prompt_of(70), tmp_path / "files"
    plain = find_weights_revision(model.config.name_or_path)
    (tmp_path / "model" / "pytorch_model.bin").symlink_to("removed")
    store_as_vllm(model, prompt, files, **{k: v.format(plain) for k, v in identity.items()})
    with pytest.raises(InvalidArgumentError, match="not quantized and without --hf-overrides"):
        open_shared(model, files)
    store_as_vllm(model, prompt, files, quantization="weights None, cache auto")
    with open_shared(model, files) as cache:
        assert num_loaded(cache, prompt) == 64


def test_pages_of_another_size_or_model_are_refused(tmp_path: Path) -> None:
    model, prompt, files = saved_model(tmp_path / "model"), prompt_of(70), tmp_path / "files"
    store_as_vllm(model, prompt, files)
    with pytest.raises(InvalidArgumentError, match="tokens_per_page is 32; expected 16"):
        open_shared(model, files, tokens_per_page=32)
    other = saved_model(tmp_path / "other", "gpt2")
    revision = find_weights_revision(model.config.name_or_path)
    store_as_vllm(other, prompt, tmp_path / "files of other", revision=revision)
    with pytest.raises(ValueError, match="namespaces differ in groups"):
        open_shared(model, tmp_path / "files of other")


@pytest.mark.parametrize("hash_name", ["sha256", "xxhash"])
@pytest.mark.parametrize("seed", ["0", "another", "", None])
def test_keys_are_those_of_vllm(
    hash_name: Any, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="needs vLLM")
    hashing = pytest.importorskip("vllm.utils.hashing", reason="needs vLLM")
    function = getattr(hashing, hash_name)
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    if seed is None and hash_name == "xxhash":
        with pytest.raises(InvalidArgumentError, match="without which its hashes are random"):
            VLLMKeys(hash=hash_name)
        return
    if seed is None and not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        pytest.skip("hashes of this vLLM are random without a seed")
    kv_cache_utils.init_none_hash(function)
    tokens = [*range(1000, 1050), 2**31, 0, 255, 256, 65536, -1]
    parent, expected = None, []
    for start in range(0, len(tokens) - 3, 4):
        parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[start : start + 4])
        expected.append(kvxfer.make_block_key(parent, 3))
    keys = VLLMKeys(hash=hash_name)
    assert keys.chunk_keys(tokens, tokens_per_chunk=4, group=3) == expected
    of_blocks = dataclasses.replace(keys, tokens_per_block=4)
    assert of_blocks.chunk_keys(tokens, tokens_per_chunk=8, group=3) == expected[1::2]
