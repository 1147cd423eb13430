"""Check of discovery: a real etcd with and without holders, dead, frozen, and not told enough."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.nixl import Announcement
from kvxfer.doctor import Check, Finding, Severity, examine
from tests import needs
from tests.backends.etcd_server import EtcdServer, etcd
from tests.doctor.test_machine import is_complete

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def server(shared: EtcdServer) -> EtcdServer:
    shared.delete()
    return shared


def find(url: str, timeout_s: float = TIMEOUT_S, parameters: str = "") -> Finding:
    findings = examine([f"nixl://?discover={url}{parameters}"], timeout_s=timeout_s)
    (finding,) = (each for each in findings if each.check is Check.DISCOVERY)
    assert is_complete(finding)
    assert finding.subject == url
    return finding


@needs.etcd
@pytest.mark.processes
def test_who_is_announced_is_said(server: EtcdServer) -> None:
    finding = find(server.url)
    assert finding.severity is Severity.WARNING
    assert finding.mend.endswith(f"--discover {server.url}")
    for port in range(1, 11):
        server.put(f"127.0.0.1:{port}", Announcement().encode())
    finding = find(server.url)
    assert finding.severity is Severity.OK
    assert finding.found.startswith("answers; 10 holders are announced: 127.0.0.1:1, ")
    assert finding.found.count("127.0.0.1") == 8


@needs.etcd
@pytest.mark.processes
def test_entries_that_are_skipped_are_a_warning(server: EtcdServer) -> None:
    server.put("127.0.0.1:1", Announcement().encode())
    server.put("10.0.0.1:1", Announcement().encode())
    server.put("noise", b"\x1b[2J")
    finding = find(server.url)
    assert finding.severity is Severity.WARNING
    assert finding.found.startswith("2 of 3 entries are skipped")
    assert finding.found.isprintable()


@needs.etcd
@pytest.mark.processes
@pytest.mark.parametrize("frozen", [True, False])
def test_an_etcd_that_does_not_answer_is_an_error_in_time(tmp_path: Path, *, frozen: bool) -> None:
    with etcd(tmp_path) as server:
        if frozen:
            server.freeze()
        else:
            server.kill()
        began = time.monotonic()
        finding = find(server.url, 5.0)
        assert time.monotonic() - began < TIMEOUT_S
    assert finding.severity is Severity.ERROR
    assert ("no answer within 1 s" if frozen else "unavailable") in finding.found
    assert "--prefix /kvxfer/test/" in finding.mend


def test_credentials_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    url = "etcd://127.0.0.1:1/kvxfer"
    finding = find(url, parameters=f"&etcd_user_file={tmp_path}/missing")
    assert finding.severity is Severity.ERROR
    assert finding.found.startswith("etcd_user_file is ")
