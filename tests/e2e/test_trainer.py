"""Trainers that change the weights of an engine: no page of other weights, and no file is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import REPOSITORY
from tests.e2e.trainer import PROMPT

LIMIT_S = 300
WHOLE_BLOCKS = len(PROMPT) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * LIMIT_S)]


def train(stop: str, *folder: str) -> tuple[list[dict[str, Any]], str]:
    """Run the trainer; return its rollouts and what it logged."""
    model = models.make("llama", REPOSITORY / models.DEFAULT_DIRECTORY)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.e2e.trainer", str(model), stop, *folder],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    rollouts: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return rollouts, ended.stderr


@pytest.mark.parametrize("stop", ["pause", pytest.param("sleep", marks=pytest.mark.exhaustive)])
def test_weights_that_change_get_no_page_of_others_and_files_stay_for_the_next_engine(
    stop: str, tmp_path: Path
) -> None:
    computed, _ = train(stop)
    assert computed[0]["tokens"] == computed[1]["tokens"] != computed[2]["tokens"]
    for from_files in (0, WHOLE_BLOCKS):  # the second engine begins with the weights on disk
        rollouts, log = train(stop, str(tmp_path))
        assert [each["tokens"] for each in rollouts] == [each["tokens"] for each in computed]
        loaded = [each["loaded"] for each in rollouts]
        assert loaded == [from_files, WHOLE_BLOCKS, 0, WHOLE_BLOCKS]
        assert "vLLM has reset its cache, as for new weights" in log
        assert "blocks of before stay, for others" in log
