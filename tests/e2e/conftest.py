"""Fixtures of end-to-end tests: engines, each in processes of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import AuditedEngine

Start = Callable[..., AuditedEngine]


def _engines(directories: Callable[[], Path]) -> Iterator[Start]:
    engines: list[AuditedEngine] = []

    def start(model: str, **settings: Any) -> AuditedEngine:
        engine = AuditedEngine(model, directories(), **settings)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
    for engine in engines:
        assert "Traceback" not in engine.log(), engine.log()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start an audited engine that lives until the end of the test."""
    yield from _engines(lambda: tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedEngine]:
    """Start one engine in one process, shared by tests of a module that leave it unchanged."""
    engines = _engines(lambda: tmp_path_factory.mktemp("audit"))
    yield next(engines)("llama", kv_cache_memory_bytes=32 << 20, max_model_len=2048)
    next(engines, None)
