"""Discovery by a real etcd: which holders are live, access control, and outages of etcd."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from aetcd import rpc

from kvxfer.backends.nixl import Announcement, Endpoint, NixlBackend, NixlConfig
from kvxfer.backends.nixl.discovery import EtcdConfig, EtcdDiscovery, EtcdError, look_once
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.telemetry.metrics import Metrics
from kvxfer.units import ByteSize
from tests import needs
from tests.backends.etcd_server import HOST, LIMIT_S, PREFIX, EtcdServer, etcd_cluster
from tests.backends.nixl_wire import Authority
from tests.cli.peers import KEYS, PAYLOADS, ServeProcess, load, namespace, serving, store

pytestmark = [needs.etcd, pytest.mark.processes]

LEASE_S = 2
A, B, C = (Endpoint("127.0.0.1", port) for port in (7001, 7002, 7003))
OURS = "fingerprint"
PASSWORD = "correct horse: battery"
OWN = ("etcd_ca", "etcd_cert", "etcd_key")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def server(shared: EtcdServer) -> EtcdServer:
    """Server without entries, since ending all leases removed them; no test may stop it."""
    shared.revoke_leases()
    return shared


def configure(servers: Sequence[EtcdServer], **fields: Any) -> EtcdConfig:
    places = ",".join(f"{HOST}:{server.port}" for server in servers)
    config = NixlConfig(discover=f"etcd://{places}{PREFIX}", **fields).etcd
    assert config is not None
    return config


@contextlib.asynccontextmanager
async def following(*servers: EtcdServer, **fields: Any) -> AsyncIterator[EtcdDiscovery]:
    discovery = EtcdDiscovery(
        configure(servers, **fields),
        namespace=OURS,
        require=lambda peer: NixlConfig().require_proof("peer", peer),
        lease_s=LEASE_S,
    )
    async with contextlib.aclosing(discovery):
        await discovery.follow()
        yield discovery


@contextlib.asynccontextmanager
async def announcing(
    at: Endpoint, *servers: EtcdServer, **fields: Any
) -> AsyncIterator[EtcdDiscovery]:
    holder = EtcdDiscovery(configure(servers, **fields), lease_s=LEASE_S)
    async with contextlib.aclosing(holder):
        await holder.announce(at, lambda: Announcement(namespace=OURS))
        yield holder


def knows(discovery: EtcdDiscovery, *peers: Endpoint) -> bool:
    return set(discovery._roster.endpoints) == set(peers)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.05)


def works(discovery: EtcdDiscovery) -> bool:
    return discovery.gauges()[Gauge.DISCOVERY_FAILING] == 0.0


async def test_members_that_die_are_left_for_others_and_none_is_believed_without_a_leader(
    tmp_path: Path,
) -> None:
    with etcd_cluster(tmp_path, 3) as members:
        first, second, third = members
        async with announcing(A, second), following(first, second) as engine:
            await until(lambda: knows(engine, A))
            first.kill()
            async with announcing(B, second):
                await until(lambda: knows(engine, A, B))
                third.kill()
                await until(lambda: not works(engine))
                assert knows(engine, A, B), "cannot tell is not nobody"
                third.start()
                await asyncio.to_thread(third.wait)
                await until(lambda: works(engine))


@pytest.fixture
def served(server: EtcdServer) -> Iterator[ServeProcess]:
    options = ("--capacity", "1MiB", "--transport", "socket", "--discover", server.url)
    with serving(*options) as peer:
        yield peer


async def test_a_served_peer_is_found_settles_and_leaves_when_it_is_asked_to_end(
    server: EtcdServer, served: ServeProcess
) -> None:
    def known(backend: NixlBackend) -> set[str]:
        return {str(each) for each in backend._discovery._roster.endpoints}  # type: ignore[union-attr]

    config = NixlConfig(discover=server.url, transport="socket")
    ours = msgspec.structs.replace(config, listen=f"{HOST}:0", capacity=ByteSize(1 << 20))
    async with NixlBackend(config, namespace()) as backend:
        await backend.start()
        await until(lambda: known(backend) == {str(served.endpoint)})
        assert all(outcome.done for outcome in await store(backend))
        assert await load(backend) == PAYLOADS
        settled = namespace().fingerprint.encode()
        await until(lambda: settled in server.entries()[str(served.endpoint)])
        async with NixlBackend(config, namespace("another/model")) as other:
            await other.start()
            assert known(other) == set()
        async with NixlBackend(ours, namespace()) as sharing:  # holds blocks, too
            await sharing.start()
            await until(lambda: len(known(backend)) == len(known(sharing)) == 2)
            metrics = Metrics()
            sharing.observe(Reports([metrics], "nixl"))
            assert b'kvxfer_peers_known{tier="nixl"} 2.0' in metrics.text()
            assert b'kvxfer_discovery_failing{tier="nixl"} 0.0' in metrics.text()
            assert all(outcome.done for outcome in await store(sharing))
            assert await load(backend) == PAYLOADS
        assert await asyncio.to_thread(served.end) == 0
        await until(lambda: not known(backend))
        assert await backend.lookup(KEYS) == [False] * len(KEYS)
    assert server.entries() == {}
    assert f"announced {served.endpoint} at {server.url}" in "".join(served.said)


async def test_a_withdrawal_that_was_cancelled_is_completed_by_the_next_one(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    async def hang(*_: object) -> None:
        begun.set()
        await asyncio.sleep(LIMIT_S)

    async with announcing(A, server) as holder:
        await until(lambda: works(holder))
        with monkeypatch.context() as patched:
            patched.setattr("kvxfer.backends.nixl.discovery.EtcdSession.revoke", hang)
            withdrawing = asyncio.create_task(holder.withdraw())
            await until(begun.is_set)
            withdrawing.cancel()
            await asyncio.wait([withdrawing])
        await holder.withdraw()
        assert server.entries() == {}


def add_user(server: EtcdServer, name: str, permission: str) -> None:
    """Add a user who may READ or READWRITE entries below the prefix."""
    server.call(rpc.AuthStub, "UserAdd", rpc.AuthUserAddRequest(name=name, password=PASSWORD))
    server.call(rpc.AuthStub, "RoleAdd", rpc.AuthRoleAddRequest(name=name))
    allowed = rpc.Permission(
        permType=getattr(rpc.Permission, permission),
        key=f"{PREFIX}/".encode(),
        range_end=f"{PREFIX}0".encode(),
    )
    granted = rpc.AuthRoleGrantPermissionRequest(name=name, perm=allowed)
    server.call(rpc.AuthStub, "RoleGrantPermission", granted)
    server.call(rpc.AuthStub, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=name))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Run an etcd that requires a password."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        for name, permission in (("holder", "READWRITE"), ("engine", "READ"), ("root", "READ")):
            add_user(server, name, permission)
        server.call(rpc.AuthStub, "AuthEnable", rpc.AuthEnableRequest())
        yield server


def user_file(tmp_path: Path, user: str) -> str:
    path = tmp_path / "user"
    path.write_text(f"{user}\n")
    path.chmod(0o600)
    return str(path)


async def test_with_name_and_password_holders_are_found_also_after_a_restart(
    guarded: EtcdServer, tmp_path: Path
) -> None:
    fields = {"etcd_user_file": user_file(tmp_path, f"holder:{PASSWORD}")}
    async with following(guarded, **fields) as engine, announcing(A, guarded, **fields) as holder:
        await until(lambda: knows(engine, A))
        guarded.kill()  # it forgets the tokens
        await until(lambda: not works(engine))
        guarded.start()
        await until(lambda: works(engine) and works(holder))
        assert engine.peers == (A,)


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ("holder:wrong secret", "authentication failed"),
        ("", "user name is empty"),
        (f"engine:{PASSWORD}", "permission denied"),
    ],
)
async def test_who_may_not_announce_says_why_and_tells_no_password(
    guarded: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, user: str, reason: str
) -> None:
    caplog.set_level(logging.DEBUG)
    fields = {"etcd_user_file": user_file(tmp_path, user)} if user else {}
    async with announcing(A, guarded, **fields), following(guarded, **fields) as engine:
        await until(lambda: f"{A} is not announced until it answers" in caplog.text)
        assert reason in caplog.text
        assert engine.peers == ()
        assert works(engine) == user.startswith("engine")
    assert "wrong secret" not in caplog.text
    assert PASSWORD not in caplog.text


@pytest.fixture(scope="module")
def encrypted(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[EtcdServer]:
    """Run an etcd that accepts only clients with a certificate."""
    ca, cert, key = authority.files(*OWN).values()
    trusted = (Path(path).read_bytes() for path in (ca, key, cert))
    credentials = grpc.ssl_channel_credentials(*trusted)
    options = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca)
    with EtcdServer(
        tmp_path_factory.mktemp("etcd"),
        scheme="https",
        options=[*options, "--client-cert-auth"],
        credentials=credentials,
    ) as server:
        yield server


async def test_with_tls_holders_are_found(encrypted: EtcdServer, authority: Authority) -> None:
    fields = authority.files(*OWN)
    async with announcing(A, encrypted, **fields), following(encrypted, **fields) as engine:
        await until(lambda: knows(engine, A))
    assert encrypted.entries() == {}


@pytest.mark.parametrize("case", ["without TLS", "another authority", "without a certificate"])
async def test_who_cannot_be_trusted_is_not_told_anything(
    encrypted: EtcdServer, authority: Authority, tmp_path: Path, case: str
) -> None:
    other = Authority(tmp_path / "other")
    fields: dict[str, Any] = {
        "without TLS": {},
        "another authority": other.files(*OWN),
        "without a certificate": authority.files("etcd_ca"),
    }[case]
    with pytest.raises(EtcdError):
        await look_once(configure([encrypted], **fields), 5.0)
