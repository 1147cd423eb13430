"""Servers that the tests of a process share."""

from collections.abc import Iterator

import pytest

from kvxfer.bench.object_servers import CREDENTIALS, ObjectServer, seaweedfs
from tests.backends.object_servers import moto


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[ObjectServer]:
    """Run SeaweedFS; no test may stop it."""
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[ObjectServer]:
    """Run moto; no test may stop it."""
    with moto() as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the credentials of the servers into the environment, where the backend looks for them."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
