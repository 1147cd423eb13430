"""Fixtures of tests of the explanation: a journal, and the command that is asked about it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.storage.keys import BlockKey
from kvxfer.telemetry.journal import flush_journal

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "journal"
    monkeypatch.setenv("KVXFER_JOURNAL", str(folder))
    return folder


@pytest.fixture
def ask(journal: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Ask the command about keys or a request; return its only report."""

    def ask(what: str | Sequence[BlockKey], *more: str) -> dict[str, Any]:
        flush_journal()
        names = [what] if isinstance(what, str) else [key.hex() for key in what]
        capsys.readouterr()
        assert main(["explain", *names, *more, "--journal", str(journal), "--json"]) == 0
        (report,) = json.loads(capsys.readouterr().out)
        assert isinstance(report, dict)
        return report

    return ask
