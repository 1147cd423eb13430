"""Copy engine of all tests in this folder."""

from collections.abc import Iterator

import pytest

from kvxfer.copy_engine.cpu import CPUCopyEngine


@pytest.fixture(scope="session")
def copies() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=1)
    yield engine
    engine.close()
