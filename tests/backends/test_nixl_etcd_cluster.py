"""Discovery by a cluster of etcd: members that are dead, and members that have no leader."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvxfer.backends.nixl import Announcement, Endpoint, NixlConfig
from kvxfer.backends.nixl.discovery import EtcdConfig, EtcdDiscovery, EtcdError, open_session
from kvxfer.storage.gauge import Gauge
from tests import needs
from tests.backends.etcd_server import HOST, PREFIX, EtcdServer, etcd_cluster, until

pytestmark = [needs.etcd, pytest.mark.processes]

LEASE_S = 2
A, B = Endpoint("127.0.0.1", 7001), Endpoint("127.0.0.1", 7002)
OURS = "fingerprint"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    with etcd_cluster(tmp_path, 3) as members:
        yield members


def configure(*members: EtcdServer) -> EtcdConfig:
    places = ",".join(f"{HOST}:{member.port}" for member in members)
    config = NixlConfig(discover=f"etcd://{places}{PREFIX}").etcd
    assert config is not None
    return config


@contextlib.asynccontextmanager
async def following(*members: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    discovery = EtcdDiscovery(configure(*members), namespace=OURS, lease_s=LEASE_S)
    async with contextlib.aclosing(discovery):
        await discovery.follow()
        yield discovery


@contextlib.asynccontextmanager
async def announcing(at: Endpoint, *members: EtcdServer) -> AsyncIterator[None]:
    holder = EtcdDiscovery(configure(*members), lease_s=LEASE_S)
    async with contextlib.aclosing(holder):
        await holder.announce(at, lambda: Announcement(namespace=OURS))
        yield


def knows(discovery: EtcdDiscovery, *peers: Endpoint) -> bool:
    return set(discovery._follower.roster.endpoints) == set(peers)


def fails(discovery: EtcdDiscovery) -> bool:
    return discovery.gauges()[Gauge.DISCOVERY_FAILING] == 1.0


async def test_a_member_that_dies_is_left_for_another(cluster: list[EtcdServer]) -> None:
    first, second, _ = cluster
    async with announcing(A, second), following(first, second) as engine:
        await until(lambda: knows(engine, A))
        first.kill()
        async with announcing(B, second):
            await until(lambda: knows(engine, A, B))


async def test_a_member_without_a_leader_is_not_believed(cluster: list[EtcdServer]) -> None:
    member, *others = cluster
    async with announcing(A, *cluster), following(member) as engine:
        await until(lambda: knows(engine, A) and not fails(engine))
        for other in others:
            other.kill()
        await until(lambda: fails(engine))
        assert knows(engine, A), "cannot tell is not nobody"
        async with open_session(configure(member), configure(member).endpoints[0], 1.0) as session:
            with pytest.raises(EtcdError, match="no leader"):
                await session.has(b"key")
        for other in others:
            other.spawn()
        for other in others:
            await asyncio.to_thread(other.wait)
        await until(lambda: not fails(engine))
        async with announcing(B, member):
            await until(lambda: knows(engine, A, B))
