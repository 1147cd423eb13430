"""Check of buckets: a real server that answers, refuses, is gone or frozen, or overwrites."""

import time
from collections.abc import Iterator, Mapping

import obstore
import pytest

from kvxfer.doctor import Check, Finding, Severity, examine
from tests.backends.object_servers import BUCKET, CREDENTIALS, READER, ObjectServer, seaweedfs
from tests.doctor.test_machine import is_complete

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with seaweedfs() as server:
        yield server


def become(monkeypatch: pytest.MonkeyPatch, credentials: Mapping[str, str]) -> None:
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)


def find(endpoint: str, bucket: str = BUCKET, timeout_s: float = TIMEOUT_S) -> Finding:
    url = f"s3://{bucket}/examined?endpoint={endpoint}&region=us-east-1"
    findings = examine([url], timeout_s=timeout_s)
    (finding,) = (each for each in findings if each.check is Check.BUCKET)
    assert is_complete(finding)
    assert finding.subject == f"s3://{bucket}/examined/"
    return finding


@pytest.mark.processes
def test_a_bucket_that_can_be_used_is_good_and_nothing_is_left_there(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, CREDENTIALS)
    for _ in range(2):
        finding = find(server.endpoint)
        assert finding.severity is Severity.OK, finding
    assert finding.found.endswith("blocks can be read and stored")
    assert not obstore.list(server.open_client(), prefix="examined").collect()


@pytest.mark.processes
def test_who_may_only_read_is_told_that_nothing_is_stored(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, READER)
    finding = find(server.endpoint)
    assert finding.severity is Severity.WARNING
    assert finding.found.startswith("may be read only: PUT: PermissionDeniedError AccessDenied")


@pytest.mark.processes
def test_credentials_that_are_refused_are_an_error_and_are_not_told(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"AWS_ACCESS_KEY_ID": "somebodyelse", "AWS_SECRET_ACCESS_KEY": "their-secret"}
    become(monkeypatch, wrong)
    finding = find(server.endpoint)
    assert finding.severity is Severity.ERROR
    assert finding.mend.startswith("docs/objects.md#credentials")
    assert not any(value in repr(finding) for value in wrong.values())


@pytest.mark.processes
@pytest.mark.parametrize("frozen", [True, False])
def test_a_server_that_does_not_answer_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch, *, frozen: bool
) -> None:
    become(monkeypatch, CREDENTIALS)
    with seaweedfs() as server:
        if frozen:
            server.freeze()
        else:
            server.kill()
        began = time.monotonic()
        finding = find(server.endpoint, timeout_s=1.0)
        assert time.monotonic() - began < TIMEOUT_S
    assert finding.severity is Severity.ERROR
    assert finding.found.startswith("LIST: ")
