"""`make bench NAME=transformers`: its rows, with a tiny model in its place."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import transformers
from benchmarks.file import FOLDER_VARIABLE
from benchmarks.vllm.model import DTYPE_VARIABLE, MODEL_VARIABLE
from tests.integrations.tiny_transformers import make_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_model("LlamaConfig", {"vocab_size": 40_000, "num_hidden_layers": 2})
    made.save_pretrained(tmp_path / "model")
    monkeypatch.setenv(MODEL_VARIABLE, str(tmp_path / "model"))
    monkeypatch.setenv(DTYPE_VARIABLE, "float32")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "stores"))
    return made


@pytest.mark.slow
def test_rows_are_first_tokens_against_computed_and_copied_prefixes(
    model: Any, tmp_path: Path
) -> None:
    rows = transformers.run(quick=True, num_tokens=300)
    assert [row.goal for row in rows] == [">= 5", ">= 5", "", ""]
    assert all(row.case.startswith("first token of 300 tokens in float32, ") for row in rows)
    in_files, in_host = rows[:2]
    assert in_files.baseline == in_host.baseline > 0
    assert in_files.ratio == pytest.approx(in_files.baseline / in_files.value, rel=1)
    assert not list((tmp_path / "stores").iterdir()), "files are left behind"


@pytest.mark.slow
def test_a_prefix_that_is_not_found_is_an_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvxfer.integrations.transformers import PrefixCache

    monkeypatch.setattr(PrefixCache, "store", lambda *_: 0)
    with pytest.raises(RuntimeError, match="0 tokens of the prompt are stored"):
        transformers.run(quick=True, num_tokens=300)
