"""Discovery by a real etcd: who is there, and what is known while etcd cannot tell."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aetcd import rpc

from kvxfer.backends.nixl import Announcement, Endpoint, NixlConfig
from kvxfer.backends.nixl.discovery import EtcdConfig, EtcdDiscovery, EtcdSession
from kvxfer.storage.gauge import Gauge
from tests import needs
from tests.backends.etcd_server import LIMIT_S, EtcdServer, etcd, until

pytestmark = [needs.etcd, pytest.mark.processes]

LEASE_S = 2
A, B, C = (Endpoint("127.0.0.1", port) for port in (7001, 7002, 7003))
OURS = "fingerprint"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def server(shared: EtcdServer) -> EtcdServer:
    """Server without entries; no test may stop it."""
    shared.revoke_leases()
    shared.delete()
    return shared


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd(tmp_path) as server:
        yield server


def configure(server: EtcdServer, **fields: Any) -> EtcdConfig:
    config = NixlConfig(discover=server.url, **fields).etcd
    assert config is not None
    return config


def require_proof(peer: Endpoint) -> None:
    NixlConfig().require_proof("peer", peer)


@contextlib.asynccontextmanager
async def following(server: EtcdServer, **fields: Any) -> AsyncIterator[EtcdDiscovery]:
    """Follow who is there."""
    config = configure(server, **fields)
    discovery = EtcdDiscovery(config, namespace=OURS, require=require_proof, lease_s=LEASE_S)
    async with contextlib.aclosing(discovery):
        await discovery.follow()
        yield discovery


@contextlib.asynccontextmanager
async def announcing(
    server: EtcdServer, *at: Endpoint, namespace: str = OURS, **fields: Any
) -> AsyncIterator[list[EtcdDiscovery]]:
    """Announce holders."""
    holders = []
    announcement = Announcement(namespace=namespace)
    async with contextlib.AsyncExitStack() as stack:
        for endpoint in at:
            holder = EtcdDiscovery(configure(server, **fields), lease_s=LEASE_S)
            await stack.enter_async_context(contextlib.aclosing(holder))
            await holder.announce(endpoint, lambda: announcement)
            holders.append(holder)
        yield holders


def knows(discovery: EtcdDiscovery, *peers: Endpoint) -> bool:
    return set(discovery._follower.roster.endpoints) == set(peers)


def works(discovery: EtcdDiscovery) -> bool:
    return discovery.gauges()[Gauge.DISCOVERY_FAILING] == 0.0


async def test_holders_are_found_when_they_come_and_gone_when_they_close(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.backends.nixl.discovery.FIRST_LIST_S", LIMIT_S)
    async with following(server) as engine:
        await until(lambda: works(engine))
        assert await engine.peers() == ()
        async with announcing(server, A, B):
            await until(lambda: knows(engine, A, B))
            async with announcing(server, C), following(server) as late:
                assert {A, B} <= {*await late.peers()}  # opening has waited for the first list
                await until(lambda: knows(engine, A, B, C) and knows(late, A, B, C))
                assert late.gauges() == {Gauge.DISCOVERY_FAILING: 0.0, Gauge.PEERS_KNOWN: 3}
            took_s = await until(lambda: knows(engine, A, B))
            assert took_s < LEASE_S / 2  # by the end of the lease, not by its time
        await until(lambda: knows(engine))
    assert server.leases() == []


async def test_a_lease_that_is_lost_is_taken_again(server: EtcdServer) -> None:
    async with following(server) as engine, announcing(server, A):
        await until(lambda: knows(engine, A))
        server.revoke_leases()
        await until(lambda: knows(engine))
        await until(lambda: knows(engine, A))


async def test_what_is_announced_says_who_it_is_and_nothing_secret(server: EtcdServer) -> None:
    async with announcing(server, A):
        await until(lambda: bool(server.entries()))
        [(name, value)] = server.entries().items()
    assert name == str(A)
    said = msgspec.json.decode(value)
    assert sorted(said) == [
        *("capacity", "namespace", "oldest_protocol", "protocol", "started", "version")
    ]
    assert abs(said["started"] - time.time()) < LIMIT_S


async def test_a_holder_that_settles_for_another_model_is_left_alone(server: EtcdServer) -> None:
    settled = ""
    holder = EtcdDiscovery(configure(server), lease_s=LEASE_S)
    async with contextlib.aclosing(holder), following(server) as engine:
        await holder.announce(A, lambda: Announcement(namespace=settled))
        await until(lambda: knows(engine, A))
        settled = "another"
        await until(lambda: knows(engine))
        settled = OURS
        await until(lambda: knows(engine, A))


async def test_strange_entries_are_skipped_and_warned_about_once(
    server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    good = Announcement(namespace=OURS).encode()
    for name in ("not an address", "127.0.0.1:07001", "127.0.0.1:0", "10.0.0.1:7000", "\x1b[2J:1"):
        server.put(name, good)
    server.put(str(B), b"\xff" * 5000)
    server.put(str(C), b'{"capacity": -1}')
    async with following(server) as engine:
        server.put(str(A), good)
        await until(lambda: knows(engine, A))
        server.put(str(C), b"[" * 4000)
        server.put(str(B), good)
        await until(lambda: knows(engine, A, B))
    warned = [each.getMessage() for each in caplog.records if "skipped" in each.msg]
    assert len(warned) == 7, warned
    assert all(each.isprintable() and len(each) < 1000 for each in warned)
    assert any("10.0.0.1:7000" in each and "secret_file or TLS" in each for each in warned)


async def test_while_etcd_is_dead_those_known_are_the_peers_and_come_back_with_it(
    own_server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(own_server) as engine, announcing(own_server, A, B):
        await until(lambda: knows(engine, A, B))
        own_server.kill()
        await until(lambda: not works(engine))
        await asyncio.sleep(1.2 * LEASE_S)  # longer than any lease
        assert knows(engine, A, B)
        assert "2 holders are known" in caplog.text
        own_server.start()
        await until(lambda: works(engine))
        assert knows(engine, A, B)
        async with announcing(own_server, C):
            await until(lambda: knows(engine, A, B, C))


async def test_closing_takes_seconds_at_most_while_etcd_is_frozen(own_server: EtcdServer) -> None:
    async with following(own_server) as engine, announcing(own_server, A) as (holder,):
        await until(lambda: knows(engine, A))
        own_server.freeze()
        began = time.monotonic()
        await asyncio.gather(engine.aclose(), holder.aclose())
        assert time.monotonic() - began < 8.0
        await engine.follow()  # and nothing begins again
        await holder.announce(A, Announcement)
    own_server.thaw()


async def test_changes_that_etcd_has_forgotten_are_listed_again(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries, lists = EtcdSession.entries, 0

    async def list_then_compact(
        session: EtcdSession, prefix: bytes
    ) -> tuple[int, dict[bytes, bytes]]:
        nonlocal lists
        lists += 1
        listed = await entries(session, prefix)
        if lists == 1:  # the change after the list is gone before it can be watched
            server.put(str(A), Announcement().encode())
            revision = server.put(str(B), Announcement().encode())
            server.call(rpc.KVStub, "Compact", rpc.CompactionRequest(revision=revision))
        return listed

    monkeypatch.setattr(EtcdSession, "entries", list_then_compact)
    async with following(server) as engine:
        await until(lambda: knows(engine, A, B))
    assert lists == 2
    assert "discovery by etcd" not in caplog.text  # nothing failed
