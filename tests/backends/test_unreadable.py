"""Blocks of another integrity or secret are kept but not loaded; sealed ones reveal nothing."""

import asyncio
import dataclasses
import errno
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kvxfer.backends.file import FileBackend, Integrity
from kvxfer.backends.file.folders import integrity_record
from kvxfer.backends.object import S3Backend
from kvxfer.cli import main
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, KVXferError
from kvxfer.extras import MissingExtraError
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockHeader
from kvxfer.storage import Backend, BlockKey, Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.file_store import (
    PAGE_BYTES,
    flip_bit,
    listed,
    open_descriptors,
    open_store,
    path_of,
    quarantine_of,
    remove_folder,
    sealed,
    secret_of,
    temporary_folder,
)
from tests.backends.object_servers import Place
from tests.examples import examples

MEMORY = BlockMemory([[512]], num_blocks=8)
NAMESPACE = MEMORY.namespace()
*KEYS, OWN = make_keys(5)
DONE, MISSING, FAILED, CORRUPT = Status.DONE, Status.MISSING, Status.FAILED, Status.CORRUPT


def fields_of(kind: str, root: Path, *, owner: str = "ours", tenant: str = "") -> dict[str, Any]:
    """Make the fields of a store by its integrity; a secret, if any, is its owner's."""
    if kind == "sealed":
        return sealed(root, owner, tenant=tenant)
    secret = {"secret_file": str(secret_of(root, owner))} if kind == "keyed" else {}
    return {"integrity": Integrity(kind)} | secret


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, kind: str, **owner: str) -> FileBackend:
        return open_store(self.root, NAMESPACE, **fields_of(kind, self.root, **owner))

    def blocks(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.root.rglob("*.safetensors")}

    def flip(self, key: BlockKey) -> None:
        flip_bit(path_of(self.root, NAMESPACE, key), 8 * (PAGE_BYTES + 1))

    def forget(self) -> None:
        """Turn it into a store of an earlier version, which did not record its integrity."""
        for path in (self.root / NAMESPACE.fingerprint).glob("integrity.*"):
            path.unlink()


class Bucket:
    def __init__(self, place: Place, secrets: Path) -> None:
        self._place = place
        self._secrets = secrets

    def open(self, kind: str, **owner: str) -> S3Backend:
        """Open a backend that does not cache misses."""
        fields = fields_of(kind, self._secrets, **owner)
        return self._place.open(NAMESPACE, missing_ttl_s=0.0, **fields)

    def blocks(self) -> dict[str, bytes]:
        return self._place.pages()

    def flip(self, key: BlockKey) -> None:
        self._place.flip(self._place.path(NAMESPACE, key), -1)


@pytest.fixture(params=["files", pytest.param("bucket", marks=pytest.mark.processes)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Folder | Bucket:
    if request.param == "files":
        return Folder(tmp_path / "store")
    return Bucket(request.getfixturevalue("place"), tmp_path / "store")


async def fill(backend: Backend, keys: Sequence[BlockKey]) -> None:
    await store_generated(backend, keys, MEMORY.describe(0, range(len(keys))))


async def store_again(backend: Backend) -> list[Status]:
    return statuses(await backend.store(KEYS, MEMORY.describe(0, range(4))))


async def load(backend: Backend, keys: Sequence[BlockKey]) -> tuple[list[Status], list[str]]:
    """Load blocks; memory of blocks that are not done must not be written."""
    target = MEMORY.describe(0, range(4, 4 + len(keys)))
    before = [bytes([number + 1]) * 512 for number in range(len(keys))]
    write_payloads(target, before)
    outcomes = await backend.load(keys, target)
    found = zip(keys, outcomes, before, read_payloads(target), strict=True)
    for key, outcome, untouched, payload in found:
        assert payload == (make_payload(key, 512) if outcome.done else untouched)
    return statuses(outcomes), [outcome.reason for outcome in outcomes]


PAIRS = [
    ("off", "fast"),
    ("fast", "sealed"),
    ("off", "sealed"),
    ("sealed", "fast"),
    ("sealed", "off"),
    ("fast", "keyed"),
    ("keyed", "fast"),
    ("off", "keyed"),
    ("sealed", "keyed"),
]


IN_FILES = [("files", *pair, is_recorded) for pair in PAIRS for is_recorded in (True, False)]
IN_BUCKETS = [
    pytest.param("bucket", *pair, True, marks=pytest.mark.processes)
    for pair in PAIRS
    if "keyed" not in pair
]


@pytest.mark.parametrize(
    ("store", "theirs", "ours", "is_recorded"), [*IN_FILES, *IN_BUCKETS], indirect=["store"]
)
async def test_blocks_of_another_integrity_are_failed_and_stay(
    store: Folder | Bucket, theirs: str, ours: str, *, is_recorded: bool
) -> None:
    is_folder = isinstance(store, Folder)
    async with store.open(theirs) as backend:
        await fill(backend, KEYS)
    if isinstance(store, Folder) and not is_recorded:
        store.forget()
    before = store.blocks()
    async with store.open(ours) as backend:
        for _ in range(3):  # of a bucket before, during and after a list
            assert not any(await backend.lookup(KEYS))
            if isinstance(backend, S3Backend):
                assert backend._listing is not None
                await backend._listing
        found, reasons = await load(backend, KEYS)
        assert found == [FAILED] * 4
        assert not is_folder or set(reasons) == {f"integrity is {theirs!r}; expected {ours!r}"}
        sent = backend.counts.sent_bytes if isinstance(backend, S3Backend) else 0
        for _ in range(6):  # the medium is healthy: other stores succeed
            assert await store_again(backend) == [FAILED] * 4
        if isinstance(backend, S3Backend):
            assert backend.counts.sent_bytes - sent < 512, "pages were sent"
        await fill(backend, [OWN])
        assert await load(backend, [OWN]) == ([DONE], [""])
        assert await backend.lookup([OWN, *KEYS]) == [True] + [False] * 4
        await backend.delete([OWN])
    assert store.blocks() == before
    async with store.open(theirs) as backend:
        assert (await load(backend, KEYS))[0] == [DONE] * 4


@pytest.mark.parametrize(("theirs", "ours"), [*PAIRS[:5], ("sealed", "sealed")])
async def test_others_who_begin_later_are_noticed(
    store: Folder | Bucket, theirs: str, ours: str
) -> None:
    owner = "theirs" if theirs == ours else "ours"
    async with store.open(ours) as backend, store.open(theirs, owner=owner) as other:
        await fill(backend, [OWN])
        await fill(other, KEYS)
        assert await store_again(backend) == [FAILED] * 4
        assert await backend.lookup([*KEYS, OWN]) == [False] * 4 + [True]
        unread = MISSING if theirs == ours else FAILED
        assert (await load(backend, [*KEYS[:3], OWN]))[0] == [unread] * 3 + [DONE]
        assert (await load(other, KEYS))[0] == [DONE] * 4


@pytest.mark.parametrize(("owner", "tenant"), [("theirs", ""), ("ours", "another"), ("new", "")])
@pytest.mark.parametrize("is_recorded", [True, False])
async def test_with_another_key_a_block_is_a_miss_and_stays(
    store: Folder | Bucket, owner: str, tenant: str, *, is_recorded: bool
) -> None:
    async with store.open("sealed") as ours:
        await fill(ours, KEYS[:2])
        if isinstance(store, Folder) and not is_recorded:
            store.forget()
        store.flip(KEYS[1])
        before = store.blocks()
        async with store.open("sealed", owner=owner, tenant=tenant) as backend:
            found, reasons = await load(backend, KEYS)
            assert found == [MISSING] * 4
            by_another = ["sealed with another key" in reason for reason in reasons]
            assert by_another == [True] * 2 + [False] * 2
            assert await backend.lookup(KEYS) == [False] * 4
            assert await store_again(backend) == [FAILED] * 2 + [DONE] * 2
            for _ in range(6):  # the medium is healthy: other stores succeed
                assert await store_again(backend) == [FAILED] * 2 + [DONE] * 2
            assert await backend.lookup(KEYS) == [False, False, True, True]
        after = store.blocks()
        assert {path: after[path] for path in before} == before
        if isinstance(store, Folder):
            assert await ours.lookup(KEYS) == [True, True, False, False]
        assert (await load(ours, KEYS))[0] == [DONE, CORRUPT, MISSING, MISSING]
        if isinstance(store, Folder):
            assert quarantine_of(store.root, NAMESPACE, KEYS[1]).exists()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda record: record,
    "empty": lambda record: b"",
    "noise": lambda record: b"noise",
    "a bit": lambda record: bytes([record[0] ^ 1]) + record[1:],
    "cut off": lambda record: record[:-5],
}


@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
async def test_another_secret_is_refused_and_every_block_stays(folder: Folder, damage: str) -> None:
    async with folder.open("keyed") as backend:
        await fill(backend, KEYS)
    record = folder.root / NAMESPACE.fingerprint / "integrity.keyed"
    whole = record.read_bytes()
    if damage == "gone":
        record.unlink()
    else:
        record.write_bytes(DAMAGES[damage](whole))
    before, opened = folder.blocks(), open_descriptors()
    with pytest.raises(InvalidArgumentError, match="secret_file") as raised:
        folder.open("keyed", owner="theirs")
    assert NAMESPACE.fingerprint in str(raised.value)
    assert open_descriptors() == opened
    for owner, status in (("theirs", 2), ("ours", 0)):
        secret = str(secret_of(folder.root, owner))
        command = ["fsck", str(folder.root), "--repair", "--secret-file", secret]
        assert await asyncio.to_thread(main, command) == status
        assert folder.blocks() == before
    async with folder.open("keyed") as backend:
        assert (await load(backend, KEYS))[0] == [DONE] * 4
    assert record.read_bytes() == whole


@pytest.mark.parametrize("kind", ["keyed", "fast"])
async def test_a_header_that_fails_is_corrupt_and_keeps_no_owner_of_an_old_store_out(
    folder: Folder, kind: str
) -> None:
    async with folder.open(kind) as backend:
        await fill(backend, KEYS)
    folder.forget()
    path = path_of(folder.root, NAMESPACE, KEYS[0])
    path.write_bytes(path.read_bytes().replace(b'"start":"0"', b'"start":"1"'))
    async with folder.open("keyed") as backend:
        others = [DONE if kind == "keyed" else FAILED] * 3
        assert (await load(backend, KEYS))[0] == [CORRUPT, *others]


async def test_a_store_that_was_emptied_may_have_another_secret_and_engines_that_run_notice(
    folder: Folder,
) -> None:
    async with folder.open("keyed") as ours:
        await fill(ours, KEYS)
        remove_folder(folder.root)
        async with folder.open("keyed", owner="theirs") as theirs:
            await fill(theirs, KEYS[:3])
            before = folder.blocks()
            assert not any(await ours.lookup(KEYS))
            assert (await load(ours, KEYS[:3]))[0] == [FAILED] * 3
            outcomes = await ours.store(KEYS, MEMORY.describe(0, range(4)))
            assert statuses(outcomes) == [FAILED] * 4
            assert all("secret_file" in outcome.reason for outcome in outcomes)
            assert folder.blocks() == before
            assert (await load(theirs, KEYS[:3]))[0] == [DONE] * 3


async def test_a_header_that_cannot_be_read_fails_its_own_block_alone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with folder.open("keyed") as backend:
        await fill(backend, KEYS[:1])
    async with folder.open("fast") as backend:
        failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        monkeypatch.setattr(integrity_record, "_read_head", failing)
        outcomes = await backend.store([KEYS[0], OWN], MEMORY.describe(0, [0, 1]))
        assert statuses(outcomes) == [FAILED, DONE]
        with pytest.raises(BackendUnavailableError, match="Input/output error"):
            await backend.lookup([KEYS[0]])


FAST = Digester(Integrity.FAST)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_sealed(root: Path, *names: str, tenant: str = "", **fields: Any) -> FileBackend:
    return open_store(root, NAMESPACE, **sealed(root, *names, tenant=tenant), **fields)


Forgery = Callable[[BlockHeader, bytes, BlockHeader, bytes], tuple[BlockHeader, bytes]]
"""Function that forges a header and data from those of our block and of another block."""


def with_checksum(header: BlockHeader, place: int, digits: str) -> BlockHeader:
    told = header.checksum[:place] + digits + header.checksum[place + len(digits) :]
    return dataclasses.replace(header, checksum=told)


FORGERIES: dict[str, Forgery] = {
    "theirs": lambda head, data, other, theirs: (other, theirs),
    "their data": lambda head, data, other, theirs: (head, theirs),
    "their header": lambda head, data, other, theirs: (other, data),
    "their key": lambda head, data, other, theirs: (
        dataclasses.replace(other, key=head.key, namespace=head.namespace),
        theirs,
    ),
    "another salt": lambda head, data, *_: (with_checksum(head, 32, "0123456789abcdef"), data),
    "another tag": lambda head, data, *_: (with_checksum(head, 80, "0123456789abcdef"), data),
    "no checksum": lambda head, data, *_: (dataclasses.replace(head, checksum=""), data),
}


@pytest.mark.parametrize(
    ("kind", "forgery"), [*(("sealed", each) for each in FORGERIES), ("fast", "theirs")]
)
@pytest.mark.parametrize("model", ["", "another"])
async def test_a_block_is_bound_to_its_key_and_its_namespace(
    root: Path, kind: str, forgery: str, model: str
) -> None:
    ours, fields = MEMORY.namespace(), fields_of(kind, root)
    theirs, their_key = MEMORY.namespace(model=model or ours.model), KEYS[0 if model else 1]
    async with open_store(root, theirs, **fields) as other:
        await fill(other, [their_key])
    async with open_store(root, ours, **fields) as backend:
        await fill(backend, KEYS[:1])
        path = path_of(root, ours, KEYS[0])
        made = [each.read_bytes() for each in (path, path_of(root, theirs, their_key))]
        heads = [BlockHeader.decode(data[:PAGE_BYTES]) for data in made]
        header, data = FORGERIES[forgery](
            heads[0], made[0][PAGE_BYTES:], heads[1], made[1][PAGE_BYTES:]
        )
        path.write_bytes(header.encode(FAST) + data)  # with a seal that anybody can make
        [status], _ = await load(backend, KEYS[:1])
        is_foreign = model and forgery == "their key"  # the key of another namespace
        assert status is (MISSING if is_foreign else CORRUPT)


async def test_a_part_is_bound_to_its_place_in_the_chunk(root: Path) -> None:
    memory = BlockMemory([[64]], num_blocks=16, blocks_per_chunk=4)
    namespace, keys = memory.namespace(), KEYS[:1]
    async with open_store(root, namespace, **sealed(root, "ours")) as backend:
        head, tail = memory.describe(0, [0, 1]), memory.describe(0, [4, 5], first_block_index=2)
        await store_generated(backend, keys, head)
        assert statuses(await backend.load(keys, tail)) == [MISSING]
        path = path_of(root, namespace, keys[0])
        data = path.read_bytes()
        moved = dataclasses.replace(BlockHeader.decode(data[:PAGE_BYTES]), start=128)
        path.write_bytes(moved.encode(FAST) + data[PAGE_BYTES:])
        assert statuses(await backend.load(keys, tail)) == [CORRUPT]


async def test_a_new_secret_stores_and_old_ones_are_read(root: Path) -> None:
    async with open_sealed(root, "old") as backend:
        await fill(backend, KEYS[:2])
    async with open_sealed(root, "new", "old") as backend:
        await fill(backend, KEYS[2:])
        assert await backend.lookup(KEYS) == [True] * 4
        assert (await load(backend, KEYS))[0] == [DONE] * 4
    async with open_sealed(root, "new") as backend:
        assert (await load(backend, KEYS))[0] == [MISSING] * 2 + [DONE] * 2


async def test_equal_blocks_are_never_sealed_alike(root: Path) -> None:
    async with open_sealed(root, "ours") as backend:
        blocks = MEMORY.describe(0, range(4))
        write_payloads(blocks, [bytes(512)] * 4)
        first = []
        for _ in range(2):
            assert statuses(await backend.store(KEYS, blocks)) == [DONE] * 4
            first += [data[PAGE_BYTES:] for data in Folder(root).blocks().values()]
            await backend.delete(KEYS)
        assert len(set(first)) == 8
        assert not any(bytes(8) in data for data in first)


def contents(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in root.rglob("*") if path.is_file()]


def words_in_common(root: Path, payloads: list[bytes]) -> int:
    """Count the words of blocks that occur anywhere in a file of a store."""
    words = np.frombuffer(b"".join(payloads), np.uint64)
    found = 0
    for data in contents(root):
        for offset in range(words.itemsize):
            size = (len(data) - offset) // words.itemsize * words.itemsize
            found += len(np.intersect1d(words, np.frombuffer(data[offset:][:size], np.uint64)))
    return found


# Every example opens a backend, with its threads.
@examples(5)
@given(
    sizes=st.lists(st.sampled_from([16, 48, 1000, 4096, 70_000]), min_size=1, max_size=3),
    per_chunk=st.integers(1, 3),
    num_tensors=st.sampled_from([0, 1, 160]),
    direct=st.sampled_from(["auto", "off"]),
    engine=st.sampled_from(["auto", "posix"]),
)
async def test_no_file_has_anything_of_a_block(
    sizes: list[int], per_chunk: int, num_tensors: int, direct: str, engine: str
) -> None:
    memory = BlockMemory([sizes], num_blocks=8 * per_chunk, blocks_per_chunk=per_chunk)
    namespace = memory.namespace()
    if num_tensors:
        namespace = listed(namespace, num_tensors)
    source = memory.describe(0, range(4 * per_chunk))
    target = memory.describe(0, range(4 * per_chunk, 8 * per_chunk))
    with temporary_folder("tmpfs") as folder:
        root = folder / "store"
        fields = sealed(root, "ours") | {"direct": direct, "engine": engine}
        async with open_store(root, namespace, **fields) as backend:
            payloads = await store_generated(backend, KEYS, source)
            assert await asyncio.to_thread(words_in_common, root, payloads) == 0
            assert statuses(await backend.load(KEYS, target)) == [DONE] * 4
            assert read_payloads(target) == payloads
        [(path, data), *_] = Folder(root).blocks().items()
        assert b"layers." not in data
        with safe_open(path, "numpy") as file:
            assert list(file.keys()) == ["sealed"]
            assert file.get_tensor("sealed").shape == (memory.chunk_size_bytes(0),)


@pytest.mark.parametrize("length", [None, 0, 31, 33, 65])
def test_a_secret_that_is_missing_or_of_another_length_is_named(
    root: Path, length: int | None
) -> None:
    secret = root.with_name("secret")
    if length is not None:
        secret.write_bytes(b"x" * length)
    with pytest.raises(InvalidArgumentError, match="secret_file is ") as raised:
        open_store(root, NAMESPACE, integrity=Integrity.SEALED, secret_file=str(secret))
    assert length is None or f"'{length} bytes'" in str(raised.value)
    with pytest.raises(InvalidArgumentError, match="secret_file is "):
        open_store(root, NAMESPACE, integrity=Integrity.SEALED)
    with pytest.raises(InvalidArgumentError, match="tenant is "):
        open_store(root, NAMESPACE, integrity=Integrity.FAST, tenant="somebody")
    assert not root.exists()


def test_the_package_that_is_missing_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtraError, match=r"integrity=sealed .* 'kvxfer\[sealed\]'"):
        open_sealed(root, "ours")


async def test_no_key_is_in_any_text_or_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    with caplog.at_level(logging.DEBUG):
        async with open_sealed(root, "ours", "old", tenant="tenant") as backend:
            await fill(backend, KEYS)
            flip_bit(path_of(root, NAMESPACE, KEYS[0]), 8 * PAGE_BYTES)
            told += [await load(backend, KEYS)]
        async with open_sealed(root, "theirs") as other:
            told += [await load(other, KEYS)]
        for name in ("ours", "old", "theirs"):
            try:
                open_store(root, NAMESPACE, secret_file=str(secret_of(root, name)))
            except KVXferError as exc:
                told += [exc]
        cipher = backend._files.digester.cipher
        assert cipher is not None
        told += [cipher, backend._files.digester, backend, sealed(root, "ours"), vars(backend)]
    text = "\n".join([caplog.text, *map(repr, told)]).encode()
    stored = b"".join(contents(root))
    names = ("ours", "old", "theirs")
    secrets = [name.encode().ljust(32) for name in names]
    derived = [key for keys in cipher._keys.values() for key in keys.values()]
    assert len(derived) == 2
    for key in (*secrets, *derived):
        for form in (key, key.hex().encode(), repr(key).encode()[2:-1]):
            assert form not in text
            assert form not in stored
