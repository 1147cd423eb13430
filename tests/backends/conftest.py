"""Servers that the tests of a process share; only the fixtures import their modules."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.backends.mooncake_servers import Cluster
    from tests.backends.nixl_wire import Authority
    from tests.backends.object_servers import ObjectServer, Place


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator["ObjectServer"]:
    """Run SeaweedFS; no test may stop it."""
    from tests.backends.object_servers import seaweedfs

    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator["ObjectServer"]:
    """Run moto; no test may stop it."""
    from tests.backends.object_servers import moto

    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def mooncake() -> Iterator["Cluster"]:
    """Run a cluster of Mooncake Store; no test may stop it."""
    from tests.backends.mooncake_servers import mooncake_cluster

    with mooncake_cluster() as cluster:
        yield cluster


@pytest.fixture
def shared_client(mooncake: "Cluster", monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.backends.mooncake import MooncakeConfig
    from tests.backends.mooncake_servers import SharedClient

    monkeypatch.setattr(MooncakeConfig, "open_store", lambda _: SharedClient(mooncake))


@pytest.fixture(scope="session")
def nixl() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    from kvxfer.backends.nixl.agents.nixl_module import import_nixl

    import_nixl(otherwise="skip these tests")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> "Authority":
    """Make a certificate authority, whose files no test changes."""
    from tests.backends.nixl_wire import Authority

    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the credentials of the servers into the environment, where the backend reads them."""
    from tests.backends.object_servers import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def place(seaweedfs_server: "ObjectServer", s3_credentials: None) -> "Place":
    """Make a store of the test's own in the bucket of SeaweedFS."""
    from tests.backends.object_servers import Place

    return Place(seaweedfs_server)
