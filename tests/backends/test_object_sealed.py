"""Sealed pages in a bucket: bound to their names, and nothing to who has another key."""

from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.object import S3Backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from tests.backends.file_store import open_store, sealed
from tests.backends.object_servers import ObjectServer, Place

pytestmark = pytest.mark.processes

MEMORY = make_memory()
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(4)


class Bucket(Place):
    """Place for sealed pages, by the names of their secrets; without one, for others."""

    def __init__(self, server: ObjectServer, folder: Path) -> None:
        super().__init__(server)
        self.secrets = folder / "bucket"

    def open_sealed(self, *names: str, tenant: str = "", **fields: Any) -> S3Backend:
        return self.open(NAMESPACE, **sealed(self.secrets, *names, tenant=tenant), **fields)


@pytest.fixture
def bucket(seaweedfs_server: ObjectServer, s3_credentials: None, tmp_path: Path) -> Bucket:
    return Bucket(seaweedfs_server, tmp_path)


async def load(backend: S3Backend) -> list[Status]:
    """Load blocks, and check that memory of those that are not done is as before."""
    target = MEMORY.describe(0, range(8, 12))
    before = read_payloads(target)
    outcomes = statuses(await backend.load(KEYS, target))
    for old, new, status in zip(before, read_payloads(target), outcomes, strict=True):
        assert status is Status.DONE or old == new
    return outcomes


async def test_no_object_has_anything_of_a_block(bucket: Bucket, tmp_path: Path) -> None:
    async with bucket.open_sealed("ours") as backend:
        payloads = await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
        assert await load(backend) == [Status.DONE] * 4
        assert read_payloads(MEMORY.describe(0, range(8, 12))) == payloads
    assert len(bucket.paths()) == 2 + len(KEYS)
    objects = b"".join(bucket.get(path) for path in bucket.paths())
    for payload in payloads:
        assert not any(payload[at : at + 8] in objects for at in range(0, len(payload) - 7, 8))
    bucket.copy_to(tmp_path / "store")  # is a store in files, for who has the secret
    root = tmp_path / "store"
    async with open_store(root, NAMESPACE, **sealed(root, "ours")) as files:
        target = MEMORY.describe(0, range(8, 12))
        assert statuses(await files.load(KEYS, target)) == [Status.DONE] * 4
        assert read_payloads(target) == payloads


@pytest.mark.parametrize(("name", "tenant"), [("theirs", ""), ("ours", "another")])
async def test_with_another_key_a_page_is_a_miss_and_stays(
    bucket: Bucket, name: str, tenant: str
) -> None:
    async with bucket.open_sealed("ours") as owner:
        await store_generated(owner, KEYS[:2], MEMORY.describe(0, range(2)))
        bucket.flip(bucket.path(NAMESPACE, KEYS[1]), -1)
        before = bucket.pages()
        async with bucket.open_sealed(name, tenant=tenant, missing_ttl_s=60.0) as backend:
            assert await load(backend) == [Status.MISSING] * 4
            assert await backend.lookup(KEYS) == [False] * 4
            for _ in range(6):  # the bucket is well: other stores go on
                outcomes = await backend.store(KEYS[:2], MEMORY.describe(0, range(2)))
                assert statuses(outcomes) == [Status.FAILED] * 2
            outcomes = await backend.store(KEYS, MEMORY.describe(0, range(4)))
            assert statuses(outcomes) == [Status.FAILED] * 2 + [Status.DONE] * 2
            assert "sealed with another key" in outcomes[0].reason
        assert {path: page for path, page in bucket.pages().items() if path in before} == before
        assert await load(owner) == [Status.DONE, Status.CORRUPT, Status.MISSING, Status.MISSING]


UNREADABLE = [
    ("fast", "sealed"),
    ("off", "sealed"),
    ("off", "fast"),
    ("sealed", "fast"),
    ("sealed", "off"),
    ("sealed", "sealed with another"),
]


def open_kind(bucket: Bucket, kind: str, **fields: Any) -> S3Backend:
    secrets = {"sealed": "ours", "sealed with another": "theirs"}
    if kind in secrets:
        return bucket.open_sealed(secrets[kind], **fields)
    return bucket.open(NAMESPACE, integrity=kind, **fields)


@pytest.mark.parametrize(("theirs", "ours"), UNREADABLE)
async def test_pages_of_others_are_not_promised_not_taken_for_ours_and_not_sent_again(
    bucket: Bucket, theirs: str, ours: str
) -> None:
    async with open_kind(bucket, theirs) as backend:
        await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
    pages = bucket.pages()
    unread = Status.MISSING if theirs in ours else Status.FAILED
    async with open_kind(bucket, ours, missing_ttl_s=0.0) as backend:
        for _ in range(3):  # before, during and after the list
            assert await backend.lookup(KEYS) == [False] * 4
            assert backend._listing is not None
            await backend._listing
        sent = backend.counts.sent_bytes
        for _ in range(2):
            outcomes = await backend.store(KEYS, MEMORY.describe(0, range(4)))
            assert statuses(outcomes) == [Status.FAILED] * 4
        assert backend.counts.sent_bytes - sent < MEMORY.chunk_size_bytes(0), "pages were sent"
        assert await load(backend) == [unread] * 4
    assert pages.items() <= bucket.pages().items()


@pytest.mark.parametrize(("theirs", "ours"), UNREADABLE)
async def test_others_who_begin_later_are_noticed(bucket: Bucket, theirs: str, ours: str) -> None:
    (own,) = make_keys(1, first=9)
    async with open_kind(bucket, ours) as backend, open_kind(bucket, theirs) as other:
        await store_generated(backend, [own], MEMORY.describe(0, [0]))
        await store_generated(other, KEYS, MEMORY.describe(0, range(4)))
        outcomes = await backend.store(KEYS, MEMORY.describe(0, range(4)))
        assert statuses(outcomes) == [Status.FAILED] * 4
        assert await backend.lookup([*KEYS, own]) == [False] * 4 + [True]


def test_what_is_missing_is_named(bucket: Bucket) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        bucket.open(NAMESPACE, integrity="sealed")
    assert raised.value.argument == "secret_file"
