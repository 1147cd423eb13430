"""Discovery without a server: its configuration, what is announced, and the roster of holders."""

import contextlib
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backends.nixl import (
    Announcement,
    NixlConfig,
)
from kvxfer.backends.nixl.discovery import MAX_PEERS, Roster, decode_announcement
from kvxfer.errors import InvalidArgumentError
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
    assert "announced as x:" in caplog.text
