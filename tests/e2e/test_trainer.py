"""Trainers that change the weights of an engine: no page of other weights, and no file is lost."""

from pathlib import Path

import pytest

from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineProcess
from tests.e2e.harness import llama

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPT = [3 + (7 * n) % 200 for n in range(1000)]
WHOLE_BLOCKS = len(PROMPT) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
HITS = "vllm:external_prefix_cache_hits"


def train(stop: str, folder: Path | None = None) -> tuple[list[list[int]], list[float], str]:
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
    computed, _, _ = train(stop)
    assert computed[0] == computed[1] != computed[2]
    for from_files in (0, WHOLE_BLOCKS):  # the second engine begins with the weights on disk
        tokens, loaded, log = train(stop, tmp_path)
        assert tokens == computed
        assert loaded == [from_files, WHOLE_BLOCKS, 0, WHOLE_BLOCKS]
        assert "vLLM has reset its cache, as for new weights" in log
        assert "blocks of before stay, for others" in log
