"""Fixtures of end-to-end tests: engines, each in processes of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.harness import AuditedEngine

Start = Callable[..., AuditedEngine]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start an audited engine that lives until the end of the test, unless it is closed before.

    Engines of one test share their audit: what one stored, another may load.
    """
    engines: list[AuditedEngine] = []
    directory = tmp_path_factory.mktemp("audit")

    def start(model: str, **settings: Any) -> AuditedEngine:
        engines.append(AuditedEngine(model, directory, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    for engine in engines:
        assert "Traceback" not in engine.log(), engine.log()
