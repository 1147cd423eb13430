"""Contents of a bucket, and its cost: pages that other programs read, requests, credentials."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from kvxfer.pages.texts import load_namespace
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_large_memory,
    make_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import open_store, sealed
from tests.backends.object_servers import READER, ObjectServer, Place, open_bucket, seaweedfs
from tests.backends.outages import require_back

pytestmark = pytest.mark.processes

MEMORY, LARGE = make_memory(), make_large_memory()
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(8)


def become_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in READER.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_bucket_copied_to_a_folder_is_a_file_store(
    place: Place, tmp_path: Path, *, is_sealed: bool
) -> None:
    root = tmp_path / "store"
    fields = sealed(root, "ours") if is_sealed else {}
    async with place.open(NAMESPACE, **fields) as backend:
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(8)))
    place.copy_to(root)
    found = load_namespace(str(root / NAMESPACE.fingerprint / "namespace.json"))
    assert found == NAMESPACE
    pages = place.pages()
    assert len(pages) == len(KEYS)
    with safe_open(root / next(iter(pages)), "numpy") as page:
        name = "sealed" if is_sealed else "blocks"
        assert (page.get_tensor(name).tobytes() in payloads) is not is_sealed
    objects = b"".join(place.get(path) for path in place.paths())
    for payload in payloads:
        words = [payload[at : at + 8] for at in range(0, len(payload) - 7, 8)]
        assert not is_sealed or not any(word in objects for word in words)
    async with open_store(root, NAMESPACE, **fields) as files:
        target = MEMORY.describe(0, range(8, 16))
        assert statuses(await files.load(KEYS, target)) == [Status.DONE] * 8
        assert read_payloads(target) == payloads


async def test_a_reader_loads_and_neither_stores_nor_removes(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.open(NAMESPACE) as backend:
        await store_generated(backend, KEYS[:4], MEMORY.describe(0, range(4)))
    place.flip(place.path(NAMESPACE, KEYS[0]), 5000)
    before = place.paths()
    become_reader(monkeypatch)
    async with place.open(NAMESPACE, missing_ttl_s=60.0) as reader:
        blocks = MEMORY.describe(0, range(4, 8))
        first = await reader.store(KEYS[4:], blocks)
        sent, requests = reader.counts.sent_bytes, reader.counts.requests
        again = await reader.store(KEYS[4:], blocks)
        assert statuses(first) == statuses(again) == [Status.FAILED] * 4
        assert "AccessDenied" in first[0].reason
        assert "paused" in again[0].reason
        assert (reader.counts.sent_bytes, reader.counts.requests) == (sent, requests)
        loaded = await reader.load(KEYS[:4], MEMORY.describe(0, range(8, 12)))
        assert statuses(loaded) == [Status.CORRUPT] + [Status.DONE] * 3
        assert "cannot remove corrupt block" in caplog.text
        assert await reader.lookup(KEYS[:4]) == [False] + [True] * 3
        assert await reader.delete(KEYS[1:4]) == [False] * 3
        assert await reader.lookup(KEYS[1:4]) == [True] * 3
    assert place.paths() == before


async def test_credentials_are_in_no_reason_and_in_no_log(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_secret = "a-secret-that-is-wrong"
    with caplog.at_level(logging.DEBUG):
        become_reader(monkeypatch)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong_secret)
        async with place.open(NAMESPACE) as backend:
            assert await backend.lookup(KEYS) == [False] * 8
            loaded = await backend.load(KEYS, MEMORY.describe(0, range(8)))
            stored = await backend.store(KEYS, MEMORY.describe(0, range(8)))
            assert statuses(loaded) == statuses(stored) == [Status.FAILED] * 8
            assert await backend.delete(KEYS) == [False] * 8
            told = caplog.text + repr(loaded) + repr(stored) + repr(backend._config)
    assert "SignatureDoesNotMatch" in told
    for secret in (wrong_secret, *READER.values()):
        assert secret not in told


async def test_of_an_object_that_is_no_page_no_more_is_read_than_a_page_has(place: Place) -> None:
    async with place.open(NAMESPACE) as backend:
        await store_generated(backend, KEYS[3:4], MEMORY.describe(0, [3]))
        whole = place.get(place.path(NAMESPACE, KEYS[3]))
        for key, data in zip(KEYS, (bytes(1 << 20), b"short", b"", whole + b"1"), strict=False):
            place.put(place.path(NAMESPACE, key), data)
        before_bytes = backend.counts.received_bytes
        target = MEMORY.describe(0, range(4))
        before = read_payloads(target)
        outcomes = await backend.load(KEYS[:4], target)
        assert statuses(outcomes) == [Status.CORRUPT] * 4
        assert read_payloads(target) == before
        received = backend.counts.received_bytes - before_bytes
        assert received == 2 * (len(whole) + 1) + len(b"short")
        await store_generated(backend, KEYS[:4], MEMORY.describe(0, range(4)))


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    """Start a server that a test may freeze, before its event loop runs."""
    with seaweedfs() as server:
        yield server


@pytest.mark.usefixtures("s3_credentials")
async def test_a_frozen_server_costs_one_timeout_and_then_nothing(server: ObjectServer) -> None:
    limits = {"timeout_s": 3.0, "lookup_timeout_s": 3.0, "retry_after_s": 0.5}
    blocks, target = LARGE.describe(0, range(8)), LARGE.describe(0, range(8, 16))
    async with open_bucket(server, LARGE.namespace()) as backend:
        await store_generated(backend, KEYS, blocks)
    async with open_bucket(server, LARGE.namespace(), **limits) as backend:
        server.freeze()
        try:
            outcomes = await backend.load(KEYS, target)
            assert statuses(outcomes) == [Status.TIMED_OUT] * 8
            for call in (backend.load, backend.store):
                found = statuses(await call(KEYS, blocks))
                assert set(found) <= {Status.FAILED, Status.TIMED_OUT}
                assert found.count(Status.TIMED_OUT) <= 1, "more than a probe was sent"
            assert await backend.lookup(KEYS) == [False] * 8
        finally:
            server.thaw()
        await require_back(backend, LARGE)


async def test_requests_are_paced(place: Place) -> None:
    async with place.open(NAMESPACE, max_requests_per_s=100.0) as backend:
        began = asyncio.get_running_loop().time()
        await store_generated(backend, KEYS, MEMORY.describe(0, range(8)))
        took_s = asyncio.get_running_loop().time() - began
        assert took_s >= (backend.counts.requests - 2) / 100
        assert backend.counts.requests > len(KEYS)
