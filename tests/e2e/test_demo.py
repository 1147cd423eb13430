"""The demos pass, and fail where a single byte was altered."""

import re
from pathlib import Path

import pytest

from tests.e2e import demo, demo_pd
from tests.e2e.engine_process import TOKENS_PER_BLOCK

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 3


@pytest.fixture(autouse=True)
def _small_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_PROMPTS", 1)
    for each in (demo, demo_pd):
        monkeypatch.setattr(each, "NUM_BLOCKS", NUM_BLOCKS)
    monkeypatch.setattr(demo, "FILES", tmp_path / "files")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.sample)])
def test_it_ends_with_what_to_try_next(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--dtype", dtype]) == 0
    shown = capsys.readouterr().out
    assert "to the last bit" in " ".join(shown.split())
    assert "What to try next" in shown


# At which token a page shows depends on the prompt, which is the text of this repository.
@pytest.mark.parametrize(
    ("plant", "said", "unsaid"),
    [
        (
            "page",
            r"kvxfer's memory: (the log-probability of )?output token \d.* kvxfer's files: ",
            "What to try next",
        ),
        pytest.param(
            "file",
            f"and {NUM_BLOCKS * TOKENS_PER_BLOCK} in the engine's own hit",
            "kvxfer's memory: ",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_it_fails_where_a_byte_was_altered(
    plant: str, said: str, unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--plant", plant]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(said, shown)
    assert unsaid not in shown


# Three engines are started, one of them twice.
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plant", ["", "page"])
def test_the_demo_of_prefill_and_decode_passes_unless_a_page_was_altered(
    plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = ["--plant", plant] if plant else []
    assert demo_pd.main(["--dtype", "float32", *planted]) == bool(plant)
    shown = " ".join(capsys.readouterr().out.split())
    # The last one of each may count; the third question loads nothing.
    said = ("question 1: ",) if plant else ("over 115[25] tokens", "to the last bit")
    assert all(re.search(each, shown) for each in said)
    assert "question 3: " not in shown
    assert ("What to try next" in shown) is not bool(plant)
