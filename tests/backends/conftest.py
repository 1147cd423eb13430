"""Servers that the tests of a process share."""

from collections.abc import Iterator

import pytest

from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.bench.object_servers import CREDENTIALS, ObjectServer, seaweedfs
from tests.backends.mooncake_servers import Cluster, SharedClient, mooncake_cluster
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


@pytest.fixture(scope="session")
def mooncake() -> Iterator[Cluster]:
    """Run a cluster of Mooncake Store; no test may stop it."""
    with mooncake_cluster() as cluster:
        yield cluster


@pytest.fixture
def shared_client(mooncake: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have backends share one client of Mooncake."""
    monkeypatch.setattr(MooncakeConfig, "open_store", lambda _: SharedClient(mooncake))


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the credentials of the servers into the environment, where the backend looks for them."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
