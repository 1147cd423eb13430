"""Engines under audit, and the questions that every scenario asks them."""

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import audit, models, oracle
from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineConfig, EngineProcess, Generation

DTYPES = {"qwen3-next": "bfloat16"}  # every other one computes exactly enough in float32
if torch.cuda.is_available():
    DTYPES["mla"] = "bfloat16"  # MLA's kernels for GPUs know no float32
CHOOSES_BLOCKS = {"qwen3-next", "mla"}
"""Models whose block size vLLM chooses itself, to fit their states or their kernel."""


class AuditedEngine(EngineProcess):
    """A vLLM engine with kvxfer under audit: host memory, and files or peers below it.

    Args:
        directory: Folder of the audit, with the records of earlier engines.
        peers: URL of a tier of peers below host memory.
        blocks_per_chunk: Blocks stored under one key.
        environment: Environment variables on top of what the audit needs.
        settings: Fields of `EngineConfig`; by default blocks have `TOKENS_PER_BLOCK`.
    """

    def __init__(
        self,
        model: str,
        directory: Path,
        *,
        capacity: str = "256MiB",
        files: Path | None = None,
        peers: str = "",
        hooks: Collection[audit.Hook] = (),
        blocks_per_chunk: int = 1,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.dtype = DTYPES.get(model, "float32")
        self._directory = directory
        require_gpus(settings.get("tensor_parallel_size", 1))
        if model not in CHOOSES_BLOCKS:
            settings.setdefault("block_size", TOKENS_PER_BLOCK)
        backend = [f"host://?capacity={capacity}"]
        backend += [f"file://{files}?capacity=4GiB"] if files else []
        backend += [peers] if peers else []
        config = EngineConfig(
            model=str(models.make(model)),
            dtype=self.dtype,
            connector=audit.SPEC | {"backend": backend, "blocks_per_chunk": blocks_per_chunk},
            environment={**(environment or {}), **audit.environment(directory, hooks)},
            **settings,
        )
        super().__init__(config)

    def audit(self) -> audit.Audit:
        return audit.read(self._directory)

    def computed(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Generation]:
        """Run prompts one by one, every token computed."""
        return oracle.run_one_by_one(self, prompts, max_tokens=max_tokens, read_cache=False)

    def offload(self) -> None:
        """Wait until everything is stored, and reset the device's prefix cache."""
        self.settle()
        assert self.reset(), "blocks are still in use"


def require_gpus(number: int) -> None:
    """Skip a test if there are too few GPUs for its workers."""
    there = torch.cuda.device_count()
    if 0 < there < number:
        pytest.skip(f"{number} workers need a GPU each, and there is {there}")


def require_same(
    actual: Sequence[Generation], expected: Sequence[Generation], *, dtype: str
) -> None:
    """Fail unless generations equal the computed ones, as closely as the dtype allows."""
    pairs = zip(actual, expected, strict=True)
    differences = [oracle.rounding_difference(*pair, dtype=dtype) for pair in pairs]
    assert not any(differences), differences


def require_same_bits(hits: Sequence[Generation], device_hits: Sequence[Generation]) -> None:
    """Fail unless hits of single requests equal those in the device's cache to the last bit."""
    pairs = zip(hits, device_hits, strict=True)
    differences = [oracle.hit_difference(*pair) for pair in pairs]
    assert not any(differences), differences


def llama(**settings: Any) -> EngineConfig:
    """Configure an engine of the tiny Llama, without an audit."""
    settings.setdefault("block_size", TOKENS_PER_BLOCK)
    return EngineConfig(
        model=str(models.make("llama")),
        dtype="float32",
        max_model_len=2048,
        kv_cache_memory_bytes=32 << 20,
        **settings,
    )


def random_prompts(
    number: int, *, shared_tokens: int, own_tokens: int, seed: int = 0
) -> list[list[int]]:
    """Token ids of prompts that share a prefix, for the models with random weights."""
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, models.VOCAB_SIZE) for _ in range(count)]

    shared = tokens(shared_tokens)
    return [shared + tokens(own_tokens) for _ in range(number)]
