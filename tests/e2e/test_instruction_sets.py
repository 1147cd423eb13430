"""An engine that packs keys for another instruction set hits what was stored, or misses it."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from kvxfer.integrations.vllm.common.cpu_packing import cpu_kernels
from tests.e2e import instruction_set
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import (
    AuditedEngine,
    on_cpu,
    random_prompts,
    require_same,
    run_engine,
)

pytestmark = [pytest.mark.e2e, on_cpu]

MAX_TOKENS = 8
SHARED_BLOCKS = 3


def run(
    tmp_path: Path, name: str, isa: str, workers: int, dtype: str
) -> AbstractContextManager[AuditedEngine]:
    return run_engine(
        "llama",
        tmp_path / name,
        dtype=dtype,
        files=tmp_path / "files",
        tensor_parallel_size=workers,
        multiprocessing=workers > 1,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        **instruction_set.settings(tmp_path / f"plug-in of {name}", isa),
    )


@pytest.mark.parametrize(
    ("first", "second", "dtype"), [(("vec", 2), ("vec16", 1), "float32")], ids=str
)
def test_packings_that_are_known_element_by_element_are_shared(
    tmp_path: Path, first: tuple[str, int], second: tuple[str, int], dtype: str
) -> None:
    prompts = random_prompts(2, shared_tokens=SHARED_BLOCKS * TOKENS_PER_BLOCK, own_tokens=64)
    with run(tmp_path, "first", *first, dtype) as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    with run(tmp_path, "second", *second, dtype) as engine:
        returned = engine.generate(prompts, max_tokens=MAX_TOKENS)
    require_same(returned, computed, dtype=dtype)
    assert all(one.cached_tokens == SHARED_BLOCKS * TOKENS_PER_BLOCK for one in returned)
    assert len(list((tmp_path / "files").glob("*/namespace.json"))) == 1


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason=f"amx not run: no amx_tile on {cpu_kernels()}, whose attention kernel needs it",
)
@pytest.mark.parametrize(("first", "second"), [(("amx", 2), ("vec", 1)), (("vec", 1), ("amx", 2))])
def test_what_is_packed_for_amx_is_found_by_engines_that_pack_so(
    tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    prompts = random_prompts(2, shared_tokens=SHARED_BLOCKS * TOKENS_PER_BLOCK, own_tokens=64)
    with run(tmp_path, "first", *first, "bfloat16") as engine:
        computed = engine.computed(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
    with run(tmp_path, "second", *second, "bfloat16") as engine:
        missed = engine.computed(prompts[:1], max_tokens=MAX_TOKENS)
        returned = engine.generate(prompts[:1], max_tokens=MAX_TOKENS)
        assert not engine.metrics().get("vllm:external_prefix_cache_hits")
        engine.settle()
    require_same(missed + returned, computed[:1] * 2, dtype="bfloat16")
    with run(tmp_path, "third", first[0], 3 - first[1], "bfloat16") as engine:
        (hit, _) = engine.generate(prompts, max_tokens=MAX_TOKENS)
    assert hit.cached_tokens == SHARED_BLOCKS * TOKENS_PER_BLOCK
    names = [path.read_text() for path in (tmp_path / "files").glob("*/namespace.json")]
    assert sorted("packed for amx" in name for name in names) == [False, True]
