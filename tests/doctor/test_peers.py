"""Checks of a peer: real ones in processes of their own, and what else may listen there."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.doctor import Check, Finding, PlannedCheck, Severity, run_checks
from kvxfer.doctor.places import check_peer, hasten
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving
from tests.doctor.test_machine import is_complete

pytestmark = pytest.mark.processes

TIMEOUT_S = 20.0
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SMALL = ("--capacity", "1MiB")


@pytest.fixture(scope="module")
def namespace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("namespace") / "namespace.json"
    path.write_bytes(msgspec.json.encode(peers.namespace().fields()))
    return str(path)


@pytest.fixture(scope="module")
def peer(namespace_file: str) -> Iterator[ServeProcess]:
    with serving(*SMALL, "--namespace", namespace_file) as peer:
        yield peer


@pytest.fixture
def secrets(tmp_path: Path) -> list[str]:
    paths = [tmp_path / name for name in ("right", "wrong")]
    for path in paths:
        path.write_text(f"the {path.name} secret of all peers")
        path.chmod(0o600)
    return [str(path) for path in paths]


def find(endpoint: Endpoint, timeout_s: float = TIMEOUT_S, **fields: Any) -> list[Finding]:
    config = hasten(NixlConfig(**fields), timeout_s)
    planned = PlannedCheck(
        Check.PEER, f"nixl://{endpoint}", lambda: check_peer(config, endpoint), num_steps=10
    )
    findings = run_checks([planned], timeout_s=TIMEOUT_S)
    findings.sort(key=lambda finding: finding.check is not Check.PEER)
    assert all(map(is_complete, findings))
    assert {finding.subject for finding in findings} == {f"nixl://{endpoint}"}
    return findings


def refused(endpoint: Endpoint, timeout_s: float = TIMEOUT_S, **fields: Any) -> Finding:
    """Check a peer about which one thing is wrong."""
    (finding,) = find(endpoint, timeout_s, **fields)
    assert (finding.check, finding.severity) == (Check.PEER, Severity.ERROR)
    return finding


def test_a_sound_peer_tells_its_carrier_its_round_trip_and_its_model(peer: ServeProcess) -> None:
    reached, carrier = find(peer.endpoint)
    assert (reached.severity, carrier.severity) == (Severity.OK, Severity.OK)
    assert "reached by cma, round trip " in reached.found
    assert f"'example/model', namespace {peers.namespace().fingerprint}" in reached.found
    assert carrier.found == "cma"
    assert find(peer.endpoint, transport="socket")[1].found == "socket, as asked for"
    assert not [line for line in peer.said if "WARNING" in line]


def test_a_peer_in_a_container_of_its_own_on_this_machine_is_named(
    namespace_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    monkeypatch.setattr(peers, "COMMAND", [*CONTAINER, *peers.COMMAND])
    with serving(*SMALL, "--namespace", namespace_file) as peer:
        reached, carrier = find(peer.endpoint)
    assert reached.severity is Severity.OK
    assert (carrier.check, carrier.severity) == (Check.PEER_CARRIER, Severity.WARNING)
    assert "--pid=host" in carrier.mend


def test_a_dead_port_is_named(peer: ServeProcess) -> None:
    with socket.create_server((peers.HOST, 0)) as taken:
        port = taken.getsockname()[1]
    finding = refused(Endpoint(peers.HOST, port))
    assert "cannot connect: [Errno 111]" in finding.found
    assert f"kvxfer serve --listen {peers.HOST}:{port}" in finding.mend


def test_a_peer_that_never_answers_is_named_within_the_deadline() -> None:
    with socket.create_server((peers.HOST, 0)) as silent:
        endpoint = Endpoint(peers.HOST, silent.getsockname()[1])
        finding = refused(endpoint, timeout_s=0.3)
    assert "the handshake took longer than 0.3 s" in finding.found
    assert "restart the peer" in finding.mend


def test_what_is_no_peer_is_named() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server((peers.HOST, 0)) as server:
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        finding = refused(Endpoint(peers.HOST, server.getsockname()[1]))
        thread.join()
    assert "something else listens" in finding.mend


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "not settled"])
def test_another_secret_is_named(secrets: list[str], namespace_file: str, *, settled: bool) -> None:
    right, wrong = secrets
    options = ["--namespace", namespace_file] if settled else []
    with serving(*SMALL, "--secret-file", right, *options) as peer:
        assert {each.severity for each in find(peer.endpoint, secret_file=right)} == {Severity.OK}
        finding = refused(peer.endpoint, secret_file=wrong)
    assert "secret differs" in finding.found
    assert "the same secret_file" in finding.mend
