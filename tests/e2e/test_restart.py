"""An engine that is stopped and started again finds on disk what it had computed."""

from pathlib import Path

import pytest

from tests.e2e import models, oracle, text
from tests.e2e.audit import flip_a_bit
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import REPOSITORY, require_same, require_same_bits

pytestmark = pytest.mark.e2e

SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 3 * TOKENS_PER_BLOCK
MAX_TOKENS = 8
NUM_PROMPTS = 2
PROCESSES = pytest.mark.parametrize(
    "processes",
    [
        pytest.param({"multiprocessing": False}, id="one-process"),
        pytest.param(
            {"multiprocessing": True}, id="several-processes", marks=pytest.mark.exhaustive
        ),
    ],
)
HITS = "vllm:external_prefix_cache_hits"


@pytest.fixture
def prompts() -> list[list[int]]:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    return text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)


@pytest.mark.sample
@PROCESSES
def test_a_restarted_engine_gets_the_shared_prefix_from_disk(
    start: Start, prompts: list[list[int]], tmp_path: Path, processes: dict[str, bool]
) -> None:
    first = start("smollm2", files=tmp_path, **processes)
    reference = oracle.run_reference(first, prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()

    second = start("smollm2", files=tmp_path, **processes)
    returned = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.offload()
    returned_alone = oracle.run_one_by_one(second, prompts, max_tokens=MAX_TOKENS)

    require_same(returned, reference.computed, dtype=second.dtype)
    require_same_bits(returned_alone, reference.device_hits)
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert metrics[HITS] >= WHOLE_BLOCKS_TOKENS
    loaded = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="done",tier="file"}'
    assert metrics[loaded] >= WHOLE_BLOCKS_TOKENS // TOKENS_PER_BLOCK
    of_file = '{cause="request",outcome="done",tier="file"}'
    assert 1 <= metrics[f"vllm:kvxfer_load_seconds{of_file}"] <= metrics[loaded]
    assert metrics['vllm:kvxfer_used_bytes{tier="file"}'] > 0
    assert second.audit().clean, second.audit()


@PROCESSES
def test_a_restarted_engine_recomputes_what_is_corrupt_on_disk_and_stores_it_again(
    start: Start, prompts: list[list[int]], tmp_path: Path, processes: dict[str, bool]
) -> None:
    first = start("smollm2", files=tmp_path, **processes)
    computed = first.computed(prompts, max_tokens=MAX_TOKENS)
    first.settle()
    first.close()
    files = list(tmp_path.rglob("*.safetensors"))
    assert files
    for file in files:
        flip_a_bit(file)

    second = start("smollm2", files=tmp_path, **processes)
    recomputed = second.generate(prompts, max_tokens=MAX_TOKENS)
    metrics = second.metrics()
    second.settle()
    second.close()
    third = start("smollm2", files=tmp_path, **processes)
    returned = third.generate(prompts, max_tokens=MAX_TOKENS)

    require_same([*recomputed, *returned], computed * 2, dtype=second.dtype)
    assert metrics.get(HITS, 0) == 0
    corrupt = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="corrupt",tier="file"}'
    assert metrics[corrupt] > 0
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert third.audit().clean, third.audit()
