"""Keys and values of a real model go from transformers to vLLM and back, bit by bit the same."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from kvxfer import (
    CanonicalKVCaches,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    Namespace,
    WorkerShard,
    canonicalize,
    connect,
    make_block_key,
    map_caches,
)
from kvxfer.bench.vllm.engine_process import ENVIRONMENT
from kvxfer.storage.keys import BlockKey
from tests.e2e import models, text
from tests.e2e.harness import REPOSITORY, AuditedEngine, run_engine

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
NUM_BLOCKS = 3
TOKENS = NUM_BLOCKS * BLOCK_TOKENS
MAX_TOKENS = 12
KV_TOLERANCE = 1e-3
"""Tolerance: both engines compute in float32 and sum in another order; measured were 1e-4."""
VLLM_CPU_AXES = {"k": ("head", "dim", "token")}


class Transformers:
    """Model in transformers, one sequence at a time, without pages."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self.model.config
        self.names = tuple(f"model.layers.{i}" for i in range(config.num_hidden_layers))
        self.heads, self.dim = config.num_key_value_heads, config.head_dim

    def generate(self, prompt: Sequence[int], past: Any = None) -> list[int]:
        """Generate greedily after a prompt, of which `past` may have a part."""
        output = self.model.generate(
            torch.tensor([prompt]),
            past_key_values=past,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def compute(self, prompt: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute keys and values of every layer, `(heads, tokens, dim)`."""
        with torch.inference_mode():
            past = self.model(torch.tensor([prompt])).past_key_values
        return [(layer.keys[0], layer.values[0]) for layer in past.layers]

    def empty(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate memory for keys and values of every layer."""
        shape = (self.heads, TOKENS, self.dim)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.names]

    def past(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Convert keys and values to the model's own form."""
        from transformers import DynamicCache

        past = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            past.update(keys[None], values[None], index)
        return past

    def canonicalize(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> CanonicalKVCaches:
        """View the memory as blocks of vLLM's size."""
        spec = FullAttentionSpec(
            tokens_per_block=BLOCK_TOKENS,
            num_kv_heads=self.heads,
            head_dim=self.dim,
            dtype=torch.float32,
        )
        config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, self.names),))
        entries = dict(zip(self.names, layers, strict=True))
        return canonicalize(entries, config, layouts=dict.fromkeys(self.names, "head block dim"))


def move(
    caches: CanonicalKVCaches, namespace: Namespace, keys: list[BlockKey], url: str, *, load: bool
) -> None:
    """Store blocks of transformers' memory as vLLM's pages, or load such pages into it."""
    (spec,) = caches.group_specs
    assert isinstance(spec, FullAttentionSpec)
    whole = WorkerShard(num_kv_heads=spec.num_kv_heads)
    mappings = map_caches(caches, whole, axes=VLLM_CPU_AXES)

    async def run() -> None:
        async with connect(url, caches, namespace=namespace, mappings=mappings) as engine:
            act = engine.load if load else engine.store
            outcomes = await act(keys, [range(NUM_BLOCKS)])
            assert all(outcome.done for outcome in outcomes), outcomes

    asyncio.run(run())


def run_vllm(tmp_path: Path, files: Path, name: str) -> AbstractContextManager[AuditedEngine]:
    return run_engine(
        "smollm2",
        tmp_path / name,
        files=files,
        kv_cache_memory_bytes=128 << 20,
        max_model_len=1024,
    )


def block_keys(prompt: Sequence[int]) -> list[BlockKey]:
    """Compute vLLM's keys of a prompt's blocks."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    os.environ.setdefault("PYTHONHASHSEED", ENVIRONMENT["PYTHONHASHSEED"])
    kv_cache_utils.init_none_hash(sha256)
    keys, parent = [], None
    for start in range(0, TOKENS, BLOCK_TOKENS):
        tokens = prompt[start : start + BLOCK_TOKENS]
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens)
        keys.append(make_block_key(parent, 0))
    return keys


def read_namespace(files: Path) -> Namespace:
    """Read the namespace of vLLM's pages, as it wrote it; the groups follow from a mapping."""
    (path,) = files.glob("*/namespace.json")
    found = msgspec.json.decode(path.read_bytes(), type=Namespace)
    return msgspec.structs.replace(found, groups=())


def test_transformers_and_vllm_continue_each_others_prompts(
    tmp_path: Path, record_property: Any
) -> None:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    (prompt,) = text.prompts(folder / "tokenizer.json", 1, shared_tokens=TOKENS + 10)
    of_vllm, of_transformers = tmp_path / "vllm", tmp_path / "transformers"
    with run_vllm(tmp_path, of_vllm, "first") as engine:
        (computed,) = engine.computed([prompt], max_tokens=MAX_TOKENS)
        engine.settle()
    keys, namespace = block_keys(prompt), read_namespace(of_vllm)
    stored = {file.name.split(".")[0]: file for file in of_vllm.rglob("*.safetensors")}
    assert set(stored) == {key.hex() for key in keys}

    transformers = Transformers(folder)
    layers = transformers.compute(prompt[:TOKENS])
    url = f"file://{of_transformers}?capacity=1GiB"
    move(transformers.canonicalize(layers), namespace, keys, url, load=False)

    largest = 0.0
    for key in keys:
        (ours,) = of_transformers.rglob(f"{key.hex()}.safetensors")
        theirs, mine = load_file(stored[key.hex()]), load_file(ours)
        assert theirs.keys() == mine.keys()
        largest = max(largest, *((theirs[name] - mine[name]).abs().max().item() for name in theirs))
    record_property("largest difference of keys and values", largest)
    assert largest < KV_TOLERANCE, f"keys and values differ by {largest}"

    with run_vllm(tmp_path, of_transformers, "second") as engine:
        (continued,) = engine.generate([prompt], max_tokens=MAX_TOKENS)
    assert continued.cached_tokens == TOKENS
    assert continued.token_ids == computed.token_ids

    room = transformers.empty()
    url = f"file://{of_vllm}?capacity=1GiB"
    move(transformers.canonicalize(room), namespace, keys, url, load=True)
    alone = transformers.generate(prompt)
    assert transformers.generate(prompt, transformers.past(room)) == alone
    assert alone == computed.token_ids
