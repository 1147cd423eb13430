"""What is in a bucket, and what it costs: pages that others read, requests, credentials."""

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import kvxfer
from kvxfer.backends.file import FileBackend, FileConfig, load_namespace
from kvxfer.backends.object import S3Backend
from kvxfer.connect import open_backend
from kvxfer.storage.backend import Status
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Reports
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize
from tests.backends.object_servers import BUCKET, READER, ObjectServer, open_bucket
from tests.recorder import Recorder

pytestmark = pytest.mark.processes

MEMORY = make_memory()
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(8)
PATIENCE_S = 20.0

_numbers = itertools.count()


class Place:
    """Place of its own in the bucket of a server."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.prefix = f"pages/{next(_numbers)}"
        self.client = server.open_client()

    def open(self, **fields: Any) -> S3Backend:
        return open_bucket(self.server, NAMESPACE, path=f"/{self.prefix}", **fields)

    def names(self) -> list[str]:
        return sorted(each["path"] for each in self.client.list(self.prefix).collect())

    def name(self, key: BlockKey) -> str:
        digits = key.hex()
        return f"{self.prefix}/{NAMESPACE.fingerprint}/{digits[:2]}/{digits}.safetensors"

    def copy_to(self, folder: Path) -> list[Path]:
        """Copy all objects to a folder; return the pages."""
        for name in self.names():
            path = folder / name.removeprefix(f"{self.prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.client.get(name).bytes())
        return sorted(folder.rglob("*.safetensors"))

    def spoil(self, key: BlockKey) -> None:
        page = bytearray(self.client.get(self.name(key)).bytes())
        page[5000] ^= 1
        self.client.put(self.name(key), bytes(page))


@pytest.fixture
def place(seaweedfs_server: ObjectServer, s3_credentials: None) -> Place:
    return Place(seaweedfs_server)


def become_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in READER.items():
        monkeypatch.setenv(name, value)


async def test_a_bucket_copied_to_a_folder_is_a_file_store(place: Place, tmp_path: Path) -> None:
    async with place.open() as backend:
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(8)))
    pages = place.copy_to(tmp_path)
    found = load_namespace(str(tmp_path / NAMESPACE.fingerprint / "namespace.json"))
    assert found == NAMESPACE
    assert len(pages) == len(KEYS)
    with safe_open(pages[0], "numpy") as page:
        assert page.get_tensor("blocks").tobytes() in payloads
    config = FileConfig(path=str(tmp_path), capacity=ByteSize(1 << 30), min_free=ByteSize(1))
    async with FileBackend(config, NAMESPACE) as files:
        target = MEMORY.describe(0, range(8, 16))
        assert statuses(await files.load(KEYS, target)) == [Status.DONE] * 8
        assert read_payloads(target) == payloads


async def test_a_corrupt_page_that_a_reader_may_not_remove_is_a_miss_to_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.open() as backend:
        await store_generated(backend, KEYS, MEMORY.describe(0, range(8)))
    place.spoil(KEYS[0])
    become_reader(monkeypatch)
    async with place.open(missing_ttl_s=60.0) as reader:
        outcomes = await reader.load(KEYS, MEMORY.describe(0, range(8, 16)))
        assert statuses(outcomes) == [Status.CORRUPT] + [Status.DONE] * 7
        assert await reader.lookup(KEYS) == [False] + [True] * 7
    assert place.name(KEYS[0]) in place.names()
    assert "cannot remove corrupt block" in caplog.text
    assert "AccessDenied" in caplog.text


async def test_a_reader_loads_and_does_not_store(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.open() as backend:
        await store_generated(backend, KEYS[:4], MEMORY.describe(0, range(4)))
    before = place.names()
    become_reader(monkeypatch)
    async with place.open() as reader:
        blocks = MEMORY.describe(0, range(4, 8))
        first = await reader.store(KEYS[4:], blocks)
        sent, requests = reader.counts.sent_bytes, reader.counts.requests
        again = await reader.store(KEYS[4:], blocks)
        assert statuses(first) == statuses(again) == [Status.FAILED] * 4
        assert "AccessDenied" in first[0].reason
        assert "paused" in again[0].reason
        assert (reader.counts.sent_bytes, reader.counts.requests) == (sent, requests)
        loaded = await reader.load(KEYS[:4], MEMORY.describe(0, range(8, 12)))
        assert statuses(loaded) == [Status.DONE] * 4
        assert await reader.delete(KEYS[:4]) == [False] * 4
        assert await reader.lookup(KEYS[:4]) == [True] * 4
    assert place.names() == before


async def test_credentials_are_in_no_reason_and_in_no_log(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong_secret = "a-secret-that-is-wrong"
    with caplog.at_level(logging.DEBUG):
        for variable, value in READER.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong_secret)
        async with place.open() as backend:
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
    async with place.open() as backend:
        await store_generated(backend, KEYS[3:4], MEMORY.describe(0, [3]))
        whole = place.client.get(place.name(KEYS[3])).bytes()
        for key, data in zip(
            KEYS, (bytes(1 << 20), b"short", b"", bytes(whole) + b"1"), strict=False
        ):
            place.client.put(place.name(key), data)
        before_bytes = backend.counts.received_bytes
        target = MEMORY.describe(0, range(4))
        before = read_payloads(target)
        outcomes = await backend.load(KEYS[:4], target)
        assert statuses(outcomes) == [Status.CORRUPT] * 4
        assert read_payloads(target) == before
        received = backend.counts.received_bytes - before_bytes
        assert received == 2 * (len(whole) + 1) + len(b"short")
        await store_generated(backend, KEYS[:4], MEMORY.describe(0, range(4)))


async def test_requests_are_paced_and_counted(place: Place) -> None:
    async with place.open(max_requests_per_s=100.0, missing_ttl_s=60.0) as backend:
        recorder = Recorder()
        backend.observe(Reports([recorder], "s3"))
        began = asyncio.get_running_loop().time()
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(8)))
        assert statuses(await backend.load(KEYS, MEMORY.describe(0, range(8)))) == [Status.DONE] * 8
        # The description twice, to find out whether the server overwrites; the kind of our pages,
        # asked for and noted; a list of the kinds; eight pages, and eight loads.
        others = 2 + 2 + 1
        assert asyncio.get_running_loop().time() - began >= (others + 8 + 8 - 2) / 100
        gauges = recorder.gauges("s3")
        assert gauges[Gauge.REQUESTS] == others + 8 + 8
        pages = sum(len(payload) + 4096 for payload in payloads)
        assert gauges[Gauge.RECEIVED_BYTES] == pages
        texts = 2 * len(backend._pages.description) + len("fast\n")
        assert gauges[Gauge.SENT_BYTES] == pages + texts
        assert not gauges[Gauge.BREAKER_OPEN]
        assert await backend.delete(KEYS[:2]) == [True, True]
        assert recorder.kept["s3"] == set(KEYS[2:])
        assert not recorder.mistakes


async def test_an_engine_opens_a_bucket_by_its_url(place: Place) -> None:
    memory = BlockMemory([[4096]], num_blocks=8)
    url = f"s3://{BUCKET}/{place.prefix}?endpoint={place.server.endpoint}&region=us-east-1"
    namespace = kvxfer.Namespace(model="model", revision="1")
    async with kvxfer.connect(url, memory.caches, namespace=namespace) as engine:
        assert all(each.done for each in await engine.store(KEYS[:4], [[0, 1, 2, 3]]))
        assert all(each.done for each in await engine.load(KEYS[:4], [[4, 5, 6, 7]]))
    assert len(place.names()) == 6


async def test_an_engine_with_an_empty_disk_has_its_hits_from_the_bucket(
    place: Place, tmp_path: Path
) -> None:
    memory = BlockMemory([[4096]], num_blocks=16)
    bucket = f"s3://{BUCKET}/{place.prefix}?endpoint={place.server.endpoint}&region=us-east-1"

    def tiers(folder: str) -> list[str]:
        disk = f"file://{tmp_path / folder}?capacity=8MiB&min_free=1"
        return ["host://?capacity=1MiB", disk, f"{bucket}&lookup_timeout_s=60"]

    async with open_backend(tiers("old"), memory.namespace()) as backend:
        payloads = await store_generated(backend, KEYS, memory.describe(0, range(8)))
        await backend.flush()
    async with open_backend(tiers("new"), memory.namespace()) as backend:
        async with asyncio.timeout(PATIENCE_S):
            while not all(await backend.lookup(KEYS)):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        target = memory.describe(0, range(8, 16))
        assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 8
        assert read_payloads(target) == payloads
