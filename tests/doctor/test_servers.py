"""Checks of servers: real ones that answer, refuse, have ended or are frozen."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import obstore
import pytest

from kvxfer.backends.nixl import Announcement
from kvxfer.doctor import Finding, Severity, examine
from tests import needs
from tests.backends.etcd_server import EtcdServer
from tests.backends.mooncake_servers import mooncake_cluster
from tests.backends.nixl_wire import Authority
from tests.backends.object_servers import BUCKET, CREDENTIALS, READER, ObjectServer, seaweedfs
from tests.backends.pool_servers import running_pool
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving
from tests.doctor.findings import ERROR, OK, TIMEOUT_S, WARNING, expect, find
from tests.ports import free_ports

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SMALL = ("--capacity", "1MiB")
GONE = pytest.mark.parametrize("fault", ["freeze", "kill"])


# Buckets


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectServer]:
    with seaweedfs() as server:
        yield server


def find_bucket(server: ObjectServer, timeout_s: float = TIMEOUT_S) -> Finding:
    url = f"s3://{BUCKET}/examined?endpoint={server.endpoint}&region=us-east-1"
    return find(url, "bucket", timeout_s, subject=f"s3://{BUCKET}/examined/")


WRONG = {"AWS_ACCESS_KEY_ID": "somebodyelse", "AWS_SECRET_ACCESS_KEY": "their-secret"}
READ_ONLY = "^may be read only: PUT: PermissionDeniedError AccessDenied"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("credentials", "severity", "words"),
    [
        (CREDENTIALS, OK, "blocks can be read and stored\n"),
        (READER, WARNING, READ_ONLY),
        (WRONG, ERROR, "(?m)^docs/objects.md#credentials"),
    ],
)
def test_what_credentials_may_do_in_a_bucket_is_said_and_nothing_is_left_there(
    bucket: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    credentials: dict[str, str],
    severity: Severity,
    words: str,
) -> None:
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        finding = find_bucket(bucket)
        expect(finding, severity, words)
        assert not any(value in repr(finding) for value in WRONG.values())
    assert not obstore.list(bucket.open_client(), prefix="examined").collect()


@pytest.mark.processes
@GONE
def test_a_bucket_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with seaweedfs() as server:
        getattr(server, fault)()
        expect(find_bucket(server, timeout_s=1.0), ERROR, "^LIST: ")


# Discovery


@needs.etcd
@pytest.mark.processes
def test_who_is_announced_and_what_is_skipped_is_said(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as server:
        nobody = find_holders(server)
        expect(nobody, WARNING)
        assert nobody.mend.endswith(f"--discover {server.url}")
        for port in range(1, 11):
            server.put(f"127.0.0.1:{port}", Announcement().encode())
        finding = find_holders(server)
        expect(finding, OK, "^answers; 10 holders are announced: 127.0.0.1:1, ")
        assert finding.found.count("127.0.0.1") == 8
        server.put("10.0.0.1:1", Announcement().encode())
        server.put("noise", b"\x1b[2J")
        finding = find_holders(server)
        expect(finding, WARNING, "^2 of 12 entries are skipped")
        assert finding.found.isprintable()


@needs.etcd
@pytest.mark.processes
@GONE
def test_an_etcd_that_does_not_answer_is_an_error(tmp_path: Path, fault: str) -> None:
    with EtcdServer(tmp_path) as server:
        getattr(server, fault)()
        told = {"freeze": "no answer within 1 s", "kill": "unavailable"}[fault]
        expect(find_holders(server, 5.0), ERROR, told, "--prefix /kvxfer/test/")


def test_the_command_that_asks_an_encrypted_etcd_has_its_files(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls").files("etcd_ca", "etcd_cert", "etcd_key")
    given = "&".join(f"{name}={path}" for name, path in files.items())
    url = f"etcd://127.0.0.1:{free_ports()}/rack"
    finding = find(f"nixl://?discover={url}&{given}", "discovery", subject=url)
    options = " --cacert {etcd_ca} --cert {etcd_cert} --key {etcd_key} get".format(**files)
    expect(finding, ERROR, "unavailable", options)


def find_holders(server: EtcdServer, timeout_s: float = TIMEOUT_S) -> Finding:
    return find(f"nixl://?discover={server.url}", "discovery", timeout_s, subject=server.url)


# Mooncake


@needs.mooncake
@pytest.mark.processes
def test_a_master_answers_and_a_frozen_one_does_not() -> None:
    with mooncake_cluster() as cluster:
        url = f"mooncake://{cluster.address}"
        expect(find(url, "mooncake", subject=url), OK)
        cluster.master.freeze()
        expect(find(url, "mooncake", 1.0), ERROR)


# Host pools


def test_a_pool_that_nobody_serves_is_named_with_the_command_that_serves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pool.sock"
    named = f"no process serves {path}", f"--pool {path}"
    expect(find(f"pool://{path}", "pool"), ERROR, *named, "No such file")
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    expect(find(f"pool://{path}", "pool"), ERROR, *named, "refused")
    path.unlink()
    with running_pool(path):
        expect(find(f"pool://{path}", "pool"), OK)
    with socket.socket(socket.AF_UNIX) as stuck, socket.socket(socket.AF_UNIX) as waiting:
        stuck.bind(f"{path}2")
        stuck.listen(0)
        waiting.connect(f"{path}2")
        expect(find(f"pool://{path}2", "pool"), ERROR, f"serves {path}2 accepts no connection")
    assert "refused" not in caplog.text, "no more than a connection was noticed"


# Peers


@pytest.fixture(scope="module")
def namespace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("namespace") / "namespace.json"
    path.write_bytes(msgspec.json.encode(peers.namespace().fields()))
    return str(path)


@pytest.fixture(scope="module")
def peer(namespace_file: str) -> Iterator[ServeProcess]:
    with serving(*SMALL, "--namespace", namespace_file) as peer:
        yield peer


def find_peer(
    endpoint: object, parameters: str = "", timeout_s: float = TIMEOUT_S
) -> tuple[Finding, Finding | None]:
    """Examine a peer; return the findings about it and, if it was reached, its carrier."""
    findings = examine([f"nixl://{endpoint}{parameters}"], timeout_s=timeout_s)
    found = {each.check: each for each in findings if each.subject == f"nixl://{endpoint}"}
    return found["peer"], found.get("peer-carrier")


@pytest.mark.processes
def test_a_sound_peer_tells_its_carrier_its_round_trip_and_its_model(peer: ServeProcess) -> None:
    reached, carrier = find_peer(peer.endpoint)
    model = f"'example/model', namespace {peers.namespace().fingerprint}"
    expect(reached, OK, "reached by cma, round trip ", model)
    assert carrier
    expect(carrier, OK, "^cma\n")
    carrier = find_peer(peer.endpoint, "?transport=socket")[1]
    assert carrier
    expect(carrier, OK, "^socket, as asked for\n")
    assert not [line for line in peer.said if "WARNING" in line]


@pytest.mark.processes
def test_a_peer_in_a_container_of_its_own_on_this_machine_is_named(
    namespace_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    monkeypatch.setattr(peers, "COMMAND", [*CONTAINER, *peers.COMMAND])
    with serving(*SMALL, "--namespace", namespace_file) as peer:
        reached, carrier = find_peer(peer.endpoint)
    expect(reached, OK)
    assert carrier
    expect(carrier, WARNING, "--pid=host")


@pytest.mark.processes
def test_what_is_no_peer_is_named() -> None:
    with socket.create_server((peers.HOST, 0)) as server:
        endpoint = f"{peers.HOST}:{server.getsockname()[1]}"
        finding, carrier = find_peer(endpoint, timeout_s=0.3)
        told = "the handshake took longer than 0.3 s", "restart the peer"
        expect(finding, ERROR, *told)
        assert carrier is None
    told = "cannot connect: .Errno 111", f"kvxfer serve --listen {endpoint}"
    expect(find_peer(endpoint)[0], ERROR, *told)


@pytest.mark.processes
def test_another_secret_is_named(tmp_path: Path) -> None:
    right, wrong = (tmp_path / name for name in ("right", "wrong"))
    for path in (right, wrong):
        path.write_text(f"the {path.name} secret of all peers")
        path.chmod(0o600)
    with serving(*SMALL, "--secret-file", str(right)) as peer:
        expect(find_peer(peer.endpoint, f"?secret_file={right}")[0], OK)
        finding, carrier = find_peer(peer.endpoint, f"?secret_file={wrong}")
    expect(finding, ERROR, "secret differs", "the same secret_file")
    assert carrier is None
