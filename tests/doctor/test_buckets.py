"""Check of buckets: a real server that answers, refuses, is gone or frozen, or overwrites."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore

from kvxfer.backends.object import S3Config
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
def test_a_bucket_that_is_not_there_is_an_error(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, CREDENTIALS)
    finding = find(server.endpoint, "nobucket")
    assert finding.severity is Severity.ERROR
    assert "NoSuchBucket" in finding.found


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


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(S3Config, "open_store", lambda _: store)
    return store


def test_a_server_that_overwrites_is_a_warning(
    in_memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put_async

    async def overwrite(*where: Any, **how: Any) -> Any:
        return await put(*where, **(how | {"mode": "overwrite"}))

    monkeypatch.setattr(obstore, "put_async", overwrite)
    finding = find("http://127.0.0.1:1")
    assert finding.severity is Severity.WARNING
    assert "If-None-Match" in finding.found
    assert not obstore.list(in_memory).collect()


def test_who_may_not_remove_is_told_that_corrupt_blocks_stay(
    in_memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        await asyncio.sleep(0)
        raise PermissionDeniedError("no")

    monkeypatch.setattr(obstore, "delete_async", refuse)
    for _ in range(2):  # also where the first one has left its object
        finding = find("http://127.0.0.1:1")
        assert finding.severity is Severity.WARNING
        assert finding.found.startswith("objects cannot be removed: DELETE: ")
    assert len(obstore.list(in_memory).collect()) == 1
