"""Model of the benchmarks with real engines, and the data type that it computes in."""

import os
import random
from pathlib import Path
from typing import NamedTuple

import torch

MODEL_VARIABLE = "KVXFER_BENCH_MODEL"


class EngineModel(NamedTuple):
    """Model of engines: its folder, and the data type that they compute in."""

    folder: Path
    dtype: str


def find_model() -> EngineModel:
    """Find the model: its folder in `KVXFER_BENCH_MODEL`, its data type in `KVXFER_BENCH_DTYPE`.

    Raises:
        FileNotFoundError: There is no model.
    """
    folder = Path(os.environ.get(MODEL_VARIABLE, "build/models/smollm2"))
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no model at {folder}; name its folder in {MODEL_VARIABLE}")
    return EngineModel(folder, os.environ.get("KVXFER_BENCH_DTYPE") or fast_dtype())


def random_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """Make a prompt that shares no block with any other."""
    return [chance.randrange(3, 40_000) for _ in range(num_tokens)]


def fast_dtype() -> str:
    """Return bfloat16 if there is a GPU, or the processor computes with it, else float32."""
    processor = Path("/proc/cpuinfo")
    flags = processor.read_text().split() if processor.exists() else []
    has_bfloat16 = not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags)
    return "bfloat16" if has_bfloat16 or torch.cuda.is_available() else "float32"
