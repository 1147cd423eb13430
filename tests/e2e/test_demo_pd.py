"""The demo of prefill and decode passes, and fails where a page was altered."""

import re

import pytest

from tests.e2e import demo_pd

# Three engines are started, one of them twice.
pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_pd, "NUM_BLOCKS", 3)


def test_it_ends_with_what_to_try_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_pd.main(["--dtype", "float32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search("kvxfer handed over 115[25] tokens", shown)  # the last one of each may count
    assert "to the last bit" in shown
    assert "What to try next" in shown


def test_it_fails_where_a_page_was_altered(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_pd.main(["--dtype", "float32", "--plant", "page"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "question 1: " in shown
    assert "question 3: " not in shown  # nothing was loaded
    assert "What to try next" not in shown
