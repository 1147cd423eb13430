"""Fixtures for tests of the commands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.cli import main
from tests.cli.stores import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit status, and what it printed as output and as errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(each) for each in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    return path
