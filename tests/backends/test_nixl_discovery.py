"""Discovery without a server: its configuration, what is announced, and the roster of holders."""

import contextlib
import logging
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backends.nixl import (
    Announcement,
    Endpoint,
    NixlBackend,
    NixlConfig,
    StaticPeers,
)
from kvxfer.backends.nixl.discovery import MAX_PEERS, Roster, decode_announcement
from kvxfer.connect import parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import MissingExtraError
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize

URL = "etcd://127.0.0.1:2379/kvxfer"
GRACE_S = 10.0
OURS = "ours"
MIB = ByteSize(1 << 20)


def name_of(port: int) -> bytes:
    return f"127.0.0.1:{port}".encode()


def announced(*ports: int, namespace: str = OURS) -> dict[bytes, bytes]:
    return {name_of(port): Announcement(namespace=namespace).encode() for port in ports}


def ports_of(roster: Roster) -> list[int]:
    return sorted(endpoint.port for endpoint in roster.endpoints)


@pytest.fixture
def roster() -> Roster:
    return Roster(OURS, lambda peer: NixlConfig().require_proof("peer", peer), grace_s=GRACE_S)


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
        "etcd://127.0.0.1:2379",
        "etcd://127.0.0.1:2379/",
        "etcd://127.0.0.1/kvxfer",
        "etcd://127.0.0.1:2379,/kvxfer",
        "etcd:///kvxfer",
        "consul://127.0.0.1:2379/kvxfer",
        "etcd://127.0.0.1:2379/kv xfer",
        "etcd://127.0.0.1:2379/kvxfer?password=hunter2",
        "etcd://127.0.0.1:2379/kvxfer#hunter2",
        "etcd://root:hunter2@127.0.0.1:2379/kvxfer",
        "etcd://root:hunter2?#@127.0.0.1:2379/kvxfer",
        "etcd://[::1:2379/kvxfer",
    ],
)
def test_what_is_no_such_url_is_an_error_without_a_password(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="discover is") as caught:
        NixlConfig(discover=url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"discover": URL, "address": "127.0.0.1:1"}, "address"),
        ({"advertise": "127.0.0.1:1"}, "advertise"),
        ({"etcd_ca": "ca.pem"}, "etcd_ca"),
        ({"etcd_user_file": "user"}, "etcd_user_file"),
        ({"discover": URL, "advertise": "127.0.0.1:1"}, "advertise"),
        ({"discover": URL, "advertise": "127.0.0.1", "listen": "127.0.0.1:1"}, "advertise"),
        ({"discover": URL, "listen": "0.0.0.0:1"}, "listen"),
        ({"discover": URL, "listen": "127.0.0.1:1", "advertise": "[::]:1"}, "advertise"),
        ({"discover": URL, "etcd_cert": "a", "etcd_ca": "b"}, "etcd_ca, etcd_cert, etcd_key"),
        ({"discover": URL, "etcd_cert": "a", "etcd_key": "b"}, "etcd_ca, etcd_cert, etcd_key"),
    ],
)
def test_parameters_that_make_no_sense_together_are_errors(
    fields: dict[str, str], argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        NixlConfig(**fields)  # type: ignore[arg-type]
    assert caught.value.argument == argument


@pytest.mark.parametrize("text", ["", "root", "root:", ":password", "root:pass\nword"])
def test_a_file_without_name_and_password_is_an_error_that_tells_neither(
    tmp_path: object, text: str
) -> None:
    path = f"{tmp_path}/user"
    with open(path, "w") as file:  # noqa: PTH123 - as short as that
        file.write(text)
    etcd = NixlConfig(discover=URL, etcd_user_file=path).etcd
    assert etcd is not None
    with pytest.raises(InvalidArgumentError, match=r"etcd_user_file is .*name:password") as caught:
        etcd.read_credentials()
    assert "word" not in str(caught.value).replace("name:password", "")


def test_credentials_do_not_show_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_USER", "root:hunter2")
    etcd = NixlConfig(discover=URL).etcd
    assert etcd is not None
    credentials = etcd.read_credentials()
    assert credentials.user == ("root", "hunter2")
    assert "hunter2" not in f"{credentials} {credentials!r} {etcd!r}"


def test_a_password_that_goes_over_the_network_without_tls_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ETCDCTL_USER", "root:hunter2")
    for host, num_warnings in (("127.0.0.1", 0), ("10.0.0.5", 1)):
        etcd = NixlConfig(discover=f"etcd://{host}:2379/kvxfer").etcd
        assert etcd is not None
        etcd.check()
        assert len(caplog.records) == num_warnings
    assert "without TLS" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("advertise", "reached"),
    [("node-1:8000", Endpoint("node-1", 8002)), ("node-1:0", Endpoint("node-1", 7002))],
)
def test_workers_advertise_their_own_ports(advertise: str, reached: Endpoint) -> None:
    config = NixlConfig(listen="[::]:7000", capacity=MIB, discover=URL, advertise=advertise)
    assert config.at_rank(2).advertised(Endpoint("::", 7002)) == reached


def test_a_directory_of_ones_own_is_not_taken_beside_discovery() -> None:
    namespace = BlockMemory([[4096]], num_blocks=1).namespace()
    with pytest.raises(InvalidArgumentError, match="directory"):
        NixlBackend(NixlConfig(discover=URL), namespace, directory=StaticPeers([]))


def test_without_aetcd_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aetcd", None)
    namespace = BlockMemory([[4096]], num_blocks=1).namespace()
    needed = r"discover=etcd:// needs the package aetcd: pip install 'kvxfer\[etcd\]'"
    with pytest.raises(MissingExtraError, match=needed):
        NixlBackend(NixlConfig(discover=URL), namespace)


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


def test_a_port_for_data_that_a_worker_would_listen_at_is_named() -> None:
    config = NixlConfig(listen="127.0.0.1:7000", capacity=MIB, data_port=7002)
    assert config.at_rank(1).data_port == 7003
    with pytest.raises(InvalidArgumentError, match="data_port is 7002"):
        config.at_rank(2)


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
    assert "announced as x:" in caplog.text
