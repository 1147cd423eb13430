"""Discovery by an etcd that asks who one is: names and passwords, roles, TLS."""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc

from kvxfer.backends.nixl import Announcement, Endpoint, NixlConfig
from kvxfer.backends.nixl.discovery import (
    EtcdConfig,
    EtcdDiscovery,
    EtcdError,
    open_session,
    run_there,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.gauge import Gauge
from tests import needs
from tests.backends.etcd_server import LIMIT_S, PREFIX, EtcdServer, etcd, until
from tests.backends.nixl_wire import Authority

pytestmark = [needs.etcd, pytest.mark.processes]

LEASE_S = 2
A = Endpoint("127.0.0.1", 7001)
PASSWORD = "correct horse: battery"


def add_user(server: EtcdServer, name: str, permission: str) -> None:
    """Add a user who may READ, WRITE or READWRITE what is below the prefix."""
    server.call(rpc.AuthStub, "UserAdd", rpc.AuthUserAddRequest(name=name, password=PASSWORD))
    server.call(rpc.AuthStub, "RoleAdd", rpc.AuthRoleAddRequest(name=name))
    allowed = rpc.Permission(
        permType=getattr(rpc.Permission, permission),
        key=f"{PREFIX}/".encode(),
        range_end=f"{PREFIX}0".encode(),
    )
    server.call(
        rpc.AuthStub,
        "RoleGrantPermission",
        rpc.AuthRoleGrantPermissionRequest(name=name, perm=allowed),
    )
    server.call(rpc.AuthStub, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=name))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Run an etcd that nobody may ask without a password."""
    with etcd(tmp_path_factory.mktemp("etcd")) as server:
        for name, permission in (("holder", "READWRITE"), ("engine", "READ"), ("root", "READ")):
            add_user(server, name, permission)
        server.call(rpc.AuthStub, "AuthEnable", rpc.AuthEnableRequest())
        yield server


def configure(server: EtcdServer, tmp_path: Path, user: str) -> EtcdConfig:
    path = tmp_path / "user"
    path.write_text(f"{user}\n")
    path.chmod(0o600)
    config = NixlConfig(discover=server.url, etcd_user_file=str(path)).etcd
    assert config is not None
    return config


async def test_with_name_and_password_holders_are_found_also_after_a_restart(
    guarded: EtcdServer, tmp_path: Path
) -> None:
    config = configure(guarded, tmp_path, f"holder:{PASSWORD}")
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    holder = EtcdDiscovery(config, lease_s=LEASE_S)
    async with contextlib.aclosing(engine), contextlib.aclosing(holder):
        await engine.follow()
        await holder.announce(A, Announcement)
        await until(lambda: engine._follower.roster.endpoints == (A,))
        guarded.kill()  # it forgets the tokens
        await until(lambda: engine.gauges()[Gauge.DISCOVERY_FAILING] == 1.0)
        guarded.start()
        await until(lambda: engine.gauges()[Gauge.DISCOVERY_FAILING] == 0.0)
        await until(lambda: holder.gauges()[Gauge.DISCOVERY_FAILING] == 0.0)
        assert await engine.peers() == (A,)
    assert engine.gauges()[Gauge.DISCOVERY_FAILING] == 0.0  # nothing is asked any more


async def test_the_environment_may_have_name_and_password(
    guarded: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCDCTL_USER", "engine")
    monkeypatch.setenv("ETCDCTL_PASSWORD", PASSWORD)
    config = NixlConfig(discover=guarded.url).etcd
    assert config is not None
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    async with contextlib.aclosing(engine):
        await engine.follow()
        await until(lambda: engine.gauges()[Gauge.DISCOVERY_FAILING] == 0.0)


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ("holder:wrong secret", "authentication failed"),
        ("nobody:wrong secret", "authentication failed"),
        ("", "user name is empty"),
    ],
)
async def test_who_is_not_let_in_says_why_and_tells_no_password(
    guarded: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, user: str, reason: str
) -> None:
    caplog.set_level(logging.DEBUG)
    config = configure(guarded, tmp_path, user) if user else NixlConfig(discover=guarded.url).etcd
    assert config is not None
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    async with contextlib.aclosing(engine):
        await engine.follow()
        await until(lambda: reason in caplog.text)
        assert await engine.peers() == ()
    assert "wrong secret" not in caplog.text


async def test_who_may_only_read_finds_holders_and_announces_none(
    guarded: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(guarded, tmp_path, f"engine:{PASSWORD}")
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    async with contextlib.aclosing(engine):
        await engine.announce(A, Announcement)
        await engine.follow()
        await until(lambda: "permission denied" in caplog.text)
        assert await engine.peers() == ()
    assert f"{A} is not announced until it answers" in caplog.text


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ours")


@pytest.fixture(scope="module")
def encrypted(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[EtcdServer]:
    """Run an etcd that takes those alone who have a certificate."""
    ca, cert, key = (str(authority.folder / f"{name}.pem") for name in ("ca", "cert", "key"))
    pair = (Path(ca), Path(key), Path(cert))
    credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in pair))
    options = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca)
    with etcd(
        tmp_path_factory.mktemp("etcd"),
        scheme="https",
        options=[*options, "--client-cert-auth"],
        credentials=credentials,
    ) as server:
        yield server


def of(authority: Authority, *names: str) -> dict[str, Any]:
    return {f"etcd_{name}": str(authority.folder / f"{name}.pem") for name in names}


async def test_with_tls_holders_are_found(encrypted: EtcdServer, authority: Authority) -> None:
    config = NixlConfig(discover=encrypted.url, **of(authority, "ca", "cert", "key")).etcd
    assert config is not None
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    async with contextlib.aclosing(engine):
        await engine.announce(A, Announcement)
        await engine.follow()
        await until(lambda: engine._follower.roster.endpoints == (A,))
    assert encrypted.entries() == {}


@pytest.mark.parametrize("case", ["without TLS", "another authority", "without a certificate"])
async def test_who_cannot_be_trusted_is_not_told_anything(
    encrypted: EtcdServer, authority: Authority, tmp_path: Path, case: str
) -> None:
    other = Authority(tmp_path / "other")
    fields: dict[str, Any] = {
        "without TLS": {},
        "another authority": of(other, "ca", "cert", "key"),
        "without a certificate": of(authority, "ca"),
    }[case]
    config = NixlConfig(discover=encrypted.url, **fields).etcd
    assert config is not None
    with pytest.raises(EtcdError):
        await run_there(partial(list_entries, config), LIMIT_S)


async def test_credentials_that_vanish_while_it_runs_are_said_so(
    encrypted: EtcdServer, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Authority(tmp_path / "mine")
    config = NixlConfig(discover=encrypted.url, **of(mine, "ca", "cert", "key")).etcd
    assert config is not None
    engine = EtcdDiscovery(config, lease_s=LEASE_S)
    (mine.folder / "key.pem").unlink()
    async with contextlib.aclosing(engine):
        await engine.follow()
        assert "cannot read the credentials: etcd_key is" in caplog.text
        for name in ("ca", "cert", "key"):  # replaced, as by a mounted secret
            (mine.folder / f"{name}.pem").write_bytes(
                (authority.folder / f"{name}.pem").read_bytes()
            )
        await until(lambda: engine.gauges()[Gauge.DISCOVERY_FAILING] == 0.0)


@pytest.mark.parametrize("name", ["etcd_ca", "etcd_cert", "etcd_key"])
def test_files_that_are_no_certificates_are_errors_at_once(
    authority: Authority, tmp_path: Path, name: str
) -> None:
    (tmp_path / "noise").write_text("noise")
    for path, wanted in (("noise", "in PEM"), ("missing", "a readable file")):
        fields = of(authority, "ca", "cert", "key") | {name: str(tmp_path / path)}
        config = NixlConfig(discover="etcd://127.0.0.1:1/kvxfer", **fields).etcd
        assert config is not None
        with pytest.raises(InvalidArgumentError, match=wanted):
            EtcdDiscovery(config)


async def list_entries(config: EtcdConfig) -> None:
    async with open_session(config, config.endpoints[0], 5.0) as session:
        await session.entries(b"/")
