"""Configurations that cannot work, the roster of announced holders, and placement at them."""

import contextlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.backends.nixl import (
    SECRET_VARIABLE,
    Announcement,
    Endpoint,
    NixlBackend,
    NixlConfig,
    rank,
)
from kvxfer.backends.nixl.discovery import MAX_PEERS, Roster, decode_announcement
from kvxfer.connect import parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import MissingExtraError
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize

GIB = ByteSize(1 << 30)
SECRET = bytes(range(33, 65))
URL = "etcd://127.0.0.1:2379/kvxfer"
NAMESPACE = BlockMemory([[4096]], num_blocks=1).namespace()


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-1:7000", "node-1", 7000),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0.4]:7000", "fe80::1%eth0.4", 7000),
    ],
)
def test_an_endpoint_is_written_as_it_was_read(text: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse("listen", text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7000",
        "node-1:70000",
        "node-1:+1",
        f"{64 * 'n'}.example:7000",
        "node-1:\N{FULLWIDTH DIGIT SEVEN}",
        " node-1:7000",
        "http://node-1:7000",
        "::1:7000",
        "[::1:7000",
        "[node-1]:7000",
        "[::1%eth0\nforged line]:7000",
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Endpoint.parse("listen", text)
    assert (caught.value.argument, caught.value.value) == ("listen", text)


@pytest.mark.parametrize(
    ("parameters", "argument"),
    [
        ({"address": "a:1,"}, "address"),
        ({"address": "a:1,a:1"}, "address"),
        ({"address": "a:0"}, "address"),
        ({"address": "a:1", "max_connections": 1 << 31}, "max_connections"),
        ({"listen": "a", "capacity": GIB}, "listen"),
        ({"address": "a:1", "capacity": GIB}, "capacity"),
        ({"address": "a:1", "tls_ca": "ca.pem"}, "tls_cert, tls_key, tls_ca"),
        ({"address": "a:1", "replicas": 0}, "replicas"),
        ({"address": "a:1", "timeout_s": 0.0}, "timeout_s"),
        ({"address": "a:1", "lease_s": float("nan")}, "lease_s"),
        ({"address": "a:1", "lease_s": 3.0, "heartbeat_s": 2.0}, "lease_s"),
        ({"address": "a:1", "transport": "tcp"}, "transport"),
        ({"address": "a:1", "quarantine": -1}, "quarantine"),
        ({"address": "a:1", "data_port": 7001}, "data_port"),
        ({"listen": "127.0.0.1:7000", "capacity": GIB, "data_port": 7000}, "data_port"),
        ({"listen": "127.0.0.1:7000", "capacity": GIB, "data_port": 1 << 16}, "data_port"),
        ({"discover": URL, "address": "127.0.0.1:1"}, "address"),
        ({"advertise": "127.0.0.1:1"}, "advertise"),
        ({"etcd_ca": "ca.pem"}, "etcd_ca"),
        ({"etcd_user_file": "user"}, "etcd_user_file"),
        ({"discover": URL, "advertise": "127.0.0.1:1"}, "advertise"),
        ({"discover": URL, "listen": "0.0.0.0:1"}, "listen"),
        ({"discover": URL, "listen": "127.0.0.1:1", "advertise": "[::]:1"}, "advertise"),
        ({"discover": URL, "listen": "127.0.0.1:1", "advertise": "0:1"}, "advertise"),
        ({"discover": URL, "listen": "127.0.0.1:1", "advertise": "[0::0]:1"}, "advertise"),
        ({"discover": URL, "etcd_cert": "a", "etcd_key": "b"}, "etcd_ca, etcd_cert, etcd_key"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(
    parameters: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        NixlConfig(**parameters)
    assert caught.value.argument == argument


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_secret_comes_from_the_file_or_else_the_environment_without_the_end_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    path = tmp_path / "secret"
    config = NixlConfig(address="127.0.0.1:1", secret_file=str(path))
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), bytes(reversed(SECRET)) + end)
    with pytest.raises(InvalidArgumentError, match="secret_file"):  # and not no secret, or another
        config.read_secret()
    path.write_bytes(SECRET + end)
    assert config.read_secret() == SECRET
    assert NixlConfig(address="a:1").read_secret() == bytes(reversed(SECRET))


@pytest.mark.parametrize("secret", [b"", b"\n", b"fifteen bytes..", b"fifteen bytes..\n"])
def test_a_secret_that_is_too_short_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    (tmp_path / "file").write_bytes(secret)
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes") as of_file:
        NixlConfig(address="a:1", secret_file=str(tmp_path / "file")).read_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes") as of_variable:
        NixlConfig(address="a:1").read_secret()
    assert (of_file.value.argument, of_file.value.value) == ("secret_file", str(tmp_path / "file"))
    assert of_variable.value.value == SECRET_VARIABLE
    assert "fifteen" not in f"{of_file.value} {of_variable.value}"


def test_addresses_of_ipv6_may_follow_others_in_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if `urlsplit` refuses text in front of a bracket, as in current Python."""

    def split(url: str) -> SplitResult:
        if re.match(r"[^/?#]*//[^/?#]+\[", url):
            raise ValueError("Invalid IPv6 URL")
        return urlsplit(url)

    monkeypatch.setattr("kvxfer.endpoint.urlsplit", split)
    hosts = "127.0.0.1:1,[::1]:2"
    listed, found = (
        parse_backend(f"nixl://{place}")[1] for place in (hosts, f"?discover=etcd://{hosts}/p")
    )
    assert isinstance(listed, NixlConfig)
    assert isinstance(found, NixlConfig)
    assert found.etcd is not None
    assert listed.peers == found.etcd.endpoints == (Endpoint("127.0.0.1", 1), Endpoint("::1", 2))
    with pytest.raises(InvalidArgumentError, match="expected a URL"):
        parse_backend("nixl://127.0.0.1:1,[::1:2")


def test_without_a_secret_and_tls_every_address_is_on_this_machine() -> None:
    hosts = "127.0.0.1:1,[::1]:2,[::ffff:127.0.0.1]:3"
    local = NixlConfig(address=hosts, listen="localhost:0", capacity=GIB)
    assert local.read_secret() is None
    for strange in (
        NixlConfig(address="127.0.0.1:1,10.0.0.1:1"),
        NixlConfig(listen="0.0.0.0:1", capacity=GIB),
        NixlConfig(listen="[::]:1", capacity=GIB),
        NixlConfig(address="[::ffff:10.0.0.1]:1"),
        NixlConfig(address="localhost.example.com:1"),
    ):
        with pytest.raises(InvalidArgumentError, match="a loopback address; any other needs"):
            strange.read_secret()
    tls = NixlConfig(address="10.0.0.1:1", tls_cert="c", tls_key="k", tls_ca="a")
    assert tls.read_secret() is None


def test_a_url_names_the_members_of_a_cluster_and_a_prefix() -> None:
    _, config = parse_backend("nixl://?discover=etcd://10.0.0.5:2379,10.0.0.6:2379/a/b-c/")
    assert isinstance(config, NixlConfig)
    assert config.etcd is not None
    assert config.etcd.endpoints == (Endpoint("10.0.0.5", 2379), Endpoint("10.0.0.6", 2379))
    assert config.etcd.prefix == "/a/b-c/"
    assert str(config.etcd) == "etcd://10.0.0.5:2379,10.0.0.6:2379/a/b-c"


@pytest.mark.parametrize(
    "url",
    [
        "etcd://127.0.0.1:2379/",
        "etcd://127.0.0.1:2379,/kvxfer",
        "consul://127.0.0.1:2379/kvxfer",
        "etcd://127.0.0.1:2379/kvxfer?password=hunter2",
        "etcd://127.0.0.1:2379/kvxfer#hunter2",
        "etcd://root:hunter2?#@127.0.0.1:2379/kvxfer",
        "etcd://root:hunter2?x=y@127.0.0.1:2379/kvxfer",
        "root:hunter2@127.0.0.1:2379/kvxfer",
        "etcd://[::1:2379/kvxfer",
    ],
)
def test_what_is_no_such_url_is_an_error_without_a_password(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="discover is") as caught:
        NixlConfig(discover=url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "root", "root:", ":password", "root:pass\nword"])
def test_a_file_without_name_and_password_is_an_error_that_tells_neither(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "user"
    path.write_text(text)
    etcd = NixlConfig(discover=URL, etcd_user_file=str(path)).etcd
    assert etcd is not None
    with pytest.raises(InvalidArgumentError, match=r"etcd_user_file is .*name:password") as caught:
        etcd.read_credentials()
    assert "word" not in str(caught.value).replace("name:password", "")


def test_a_password_is_not_shown_and_is_warned_about_where_it_goes_over_the_network_without_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "user"
    path.write_text("root:hunter2")
    path.chmod(0o600)
    for host, num_warnings in (("127.0.0.1", 0), ("10.0.0.5", 1)):
        etcd = NixlConfig(discover=f"etcd://{host}:2379/kvxfer", etcd_user_file=str(path)).etcd
        assert etcd is not None
        etcd.check()
        assert len(caplog.records) == num_warnings
        credentials = etcd.read_credentials()
        assert credentials.user == ("root", "hunter2")
        assert "hunter2" not in f"{credentials} {credentials!r} {etcd!r} {caplog.text}"
    assert "without TLS" in caplog.text


def test_without_aetcd_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aetcd", None)
    needed = r"discover=etcd:// needs the package aetcd: pip install 'kvxfer\[etcd\]'"
    with pytest.raises(MissingExtraError, match=needed):
        NixlBackend(NixlConfig(discover=URL), NAMESPACE)


def test_workers_advertise_their_own_ports_and_none_is_taken_twice() -> None:
    config = NixlConfig(listen="[::]:7000", capacity=GIB, discover=URL, advertise="node-1:8000")
    for advertise, port in (("node-1:8000", 8002), ("node-1:0", 7002)):
        worker = msgspec.structs.replace(config, advertise=advertise).at_rank(2)
        assert worker.advertised(Endpoint("::", 7002)) == Endpoint("node-1", port)
    config = NixlConfig(listen="127.0.0.1:7000", capacity=GIB, data_port=7002)
    with pytest.raises(InvalidArgumentError, match="data_port is 7002"):
        config.at_rank(2)


GRACE_S = 10.0
OURS = "ours"


def name_of(port: int) -> bytes:
    return f"127.0.0.1:{port}".encode()


def announced(*ports: int, namespace: str = OURS) -> dict[bytes, bytes]:
    return {name_of(port): Announcement(namespace=namespace).encode() for port in ports}


def ports_of(roster: Roster) -> list[int]:
    return sorted(endpoint.port for endpoint in roster.endpoints)


@pytest.fixture
def roster() -> Roster:
    return Roster(OURS, lambda peer: NixlConfig().require_proof("peer", peer), grace_s=GRACE_S)


@example(b"", b'{"namespace": "\xff"}')
@given(st.binary(max_size=400), st.binary(max_size=5000))
def test_any_bytes_are_an_announcement_or_an_argument_error(name: bytes, data: bytes) -> None:
    for each in (name, b"127.0.0.1:1"):
        with contextlib.suppress(InvalidArgumentError):
            endpoint, announcement = decode_announcement(each, data)
            assert endpoint.port
            assert announcement.capacity >= 0


def test_holders_of_another_namespace_and_protocol_are_left_out(
    roster: Roster, caplog: pytest.LogCaptureFixture
) -> None:
    later = msgspec.structs.replace(Announcement(), protocol=99, oldest_protocol=99)
    entries = announced(1, namespace="") | announced(2, namespace="theirs")
    roster.replace(entries | {name_of(3): later.encode()}, 0.0)
    assert ports_of(roster) == [1]
    warned = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage().split(":")[1] for each in warned] == ["3"]
    roster.change(announced(1, namespace="theirs"), 1.0)  # it has settled for another one
    assert ports_of(roster) == []


def test_strange_entries_are_skipped_and_warned_about_once(
    roster: Roster, caplog: pytest.LogCaptureFixture
) -> None:
    good = Announcement(namespace=OURS).encode()
    names = ("not an address", "127.0.0.1:07001", "127.0.0.1:0", "10.0.0.1:7000", "\x1b[2J:1")
    strange = {name.encode(): good for name in names}
    strange |= {name_of(2): b"\xff" * 5000, name_of(3): b'{"capacity": -1}'}
    roster.replace(strange | announced(1), 0.0)
    assert ports_of(roster) == [1]
    roster.change({name_of(3): b"[" * 4000} | announced(2), 1.0)
    assert ports_of(roster) == [1, 2]
    warned = [each.getMessage() for each in caplog.records if "skipped" in each.msg]
    assert len(warned) == 7, warned
    assert all(each.isprintable() and len(each) < 1000 for each in warned)
    assert any("10.0.0.1:7000" in each and "secret_file or TLS" in each for each in warned)


def test_the_number_of_holders_and_of_warnings_is_bounded(
    roster: Roster, caplog: pytest.LogCaptureFixture
) -> None:
    roster.replace(announced(*range(1, MAX_PEERS + 10)), 0.0)
    assert len(roster.endpoints) == MAX_PEERS
    caplog.clear()
    for round_ in range(3):
        roster.change({name_of(port) + b"x": b"" for port in range(1000)}, float(round_))
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 64
    roster.replace({}, 1.0)
    roster.settle(1.0 + GRACE_S)
    roster.change({b"x": b""}, 20.0)  # those that are gone are forgotten
    assert "announcement of x:" in caplog.text


ENDPOINTS = st.builds(
    Endpoint, st.sampled_from(["10.0.0.1", "::1", "node-1", "node-2"]), st.integers(1, 99)
)


@given(
    keys=st.lists(st.binary(min_size=5, max_size=40).map(BlockKey), min_size=1, unique=True),
    endpoints=st.lists(ENDPOINTS, min_size=2, max_size=8, unique=True),
    replicas=st.integers(1, 4),
    data=st.data(),
)
def test_when_a_peer_leaves_only_its_keys_move_and_each_to_one_new_peer(
    keys: list[BlockKey], endpoints: list[Endpoint], replicas: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(endpoints))
    rest = [endpoint for endpoint in endpoints if endpoint != gone]
    columns = rank(keys, endpoints, replicas).T, rank(keys, rest, replicas).T
    for before, after in zip(*columns, strict=True):
        stayed = [endpoints[peer] for peer in before if endpoints[peer] != gone]
        assert [rest[peer] for peer in after[: len(stayed)]] == stayed


def test_the_placement_is_that_of_the_protocol() -> None:
    endpoints = [Endpoint("10.0.0.1", 7000), Endpoint("::1", 7001), Endpoint("node-3", 7002)]
    keys = [make_block_key(index.to_bytes(32, "big"), 0) for index in range(8)]
    assert rank(keys, endpoints, 2).tolist() == [[2, 2, 2, 1, 0, 2, 1, 1], [0, 0, 0, 2, 2, 0, 0, 2]]
