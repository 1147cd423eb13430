"""Sealed blocks: unreadable on the disk, bound to their place, a miss to who has another key."""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kvxfer.backends.file import BlockHeader, Digester, FileBackend, Integrity
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.extras import MissingExtraError
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import (
    make_payload,
    read_payloads,
    write_payloads,
)
from tests.backends.file_store import (
    PAGE_BYTES,
    flip_bit,
    hashed_keys,
    listed,
    load_verified,
    open_store,
    path_of,
    sealed,
    secret_of,
    store,
    temporary_folder,
)
from tests.examples import examples

NUM_KEYS = 4
DATA_BYTES = 512
MEMORY = BlockMemory([[DATA_BYTES]], num_blocks=2 * NUM_KEYS)
NAMESPACE = MEMORY.namespace()
KEYS = hashed_keys(NUM_KEYS)
DONE, MISSING, FAILED, CORRUPT = Status.DONE, Status.MISSING, Status.FAILED, Status.CORRUPT
FAST = Digester(Integrity.FAST)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_sealed(root: Path, *names: str, tenant: str = "", **fields: Any) -> FileBackend:
    return open_store(root, NAMESPACE, **sealed(root, *names, tenant=tenant), **fields)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*.safetensors")}


async def fill(backend: FileBackend, keys: Sequence[BlockKey] = KEYS) -> None:
    outcomes = await store(backend, keys, MEMORY.describe(0, range(len(keys))))
    assert statuses(outcomes) == [DONE] * len(keys)


async def load(backend: FileBackend, keys: Sequence[BlockKey] = KEYS) -> list[Outcome]:
    """Load blocks; memory of those that are not done must not be written."""
    target = MEMORY.describe(0, range(NUM_KEYS, NUM_KEYS + len(keys)))
    before = [bytes([number + 1]) * DATA_BYTES for number in range(len(keys))]
    write_payloads(target, before)
    outcomes = await backend.load(keys, target)
    found = zip(keys, outcomes, before, read_payloads(target), strict=True)
    for key, outcome, untouched, payload in found:
        assert payload == (make_payload(key, DATA_BYTES) if outcome.done else untouched)
    return outcomes


Forgery = Callable[[BlockHeader, bytes, BlockHeader, bytes], tuple[BlockHeader, bytes]]
"""Makes a header and data in place of ours, out of ours and of those of another block."""


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


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("model", ["", "another"])
async def test_a_block_is_bound_to_its_key_and_its_namespace(
    root: Path, forgery: str, model: str
) -> None:
    ours = MEMORY.namespace()
    theirs = MEMORY.namespace(model=model) if model else ours
    async with open_store(root, theirs, **sealed(root, "ours")) as other:
        await fill(other, KEYS[1:2])
    async with open_sealed(root, "ours") as backend:
        await fill(backend, KEYS[:1])
        path = path_of(root, ours, KEYS[0])
        made = [each.read_bytes() for each in (path, path_of(root, theirs, KEYS[1]))]
        heads = [BlockHeader.decode(data[:PAGE_BYTES]) for data in made]
        header, data = FORGERIES[forgery](
            heads[0], made[0][PAGE_BYTES:], heads[1], made[1][PAGE_BYTES:]
        )
        path.write_bytes(header.encode(FAST) + data)  # with a seal that anybody can make
        [outcome] = await load(backend, KEYS[:1])
        is_foreign = model and forgery == "their key"  # the key of another namespace
        assert outcome.status is (MISSING if is_foreign else CORRUPT)


async def test_a_part_is_bound_to_its_place_in_the_chunk(root: Path) -> None:
    memory = BlockMemory([[64]], num_blocks=16, blocks_per_chunk=4)
    namespace, keys = memory.namespace(), hashed_keys(1)
    async with open_store(root, namespace, **sealed(root, "ours")) as backend:
        head, tail = memory.describe(0, [0, 1]), memory.describe(0, [4, 5], first_block_index=2)
        assert statuses(await store(backend, keys, head)) == [DONE]
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
        assert statuses(await load(backend)) == [DONE] * 4
    async with open_sealed(root, "new") as backend:
        assert statuses(await load(backend)) == [MISSING] * 2 + [DONE] * 2


async def test_equal_blocks_are_never_sealed_alike(root: Path) -> None:
    async with open_sealed(root, "ours") as backend:
        blocks = MEMORY.describe(0, range(NUM_KEYS))
        write_payloads(blocks, [bytes(DATA_BYTES)] * NUM_KEYS)
        first = []
        for _ in range(2):
            assert statuses(await backend.store(KEYS, blocks)) == [DONE] * NUM_KEYS
            first += [data[PAGE_BYTES:] for data in files(root).values()]
            await backend.delete(KEYS)
        assert len(set(first)) == 2 * NUM_KEYS
        assert not any(bytes(8) in data for data in first)


def contents(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in root.rglob("*") if path.is_file()]


def words_in_common(root: Path, payloads: list[bytes]) -> int:
    """Count the words of blocks that are somewhere in a file of a store."""
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
    namespace, keys = memory.namespace(), hashed_keys(4)
    if num_tensors:
        namespace = listed(namespace, num_tensors)
    source = memory.describe(0, range(4 * per_chunk))
    target = memory.describe(0, range(4 * per_chunk, 8 * per_chunk))
    with temporary_folder("tmpfs") as folder:
        root = folder / "store"
        fields = sealed(root, "ours") | {"direct": direct, "engine": engine}
        async with open_store(root, namespace, **fields) as backend:
            assert set(statuses(await store(backend, keys, source))) == {DONE}
            assert await asyncio.to_thread(words_in_common, root, read_payloads(source)) == 0
            assert await load_verified(backend, keys, target) == [DONE] * 4
        [path, *_] = files(root)
        assert b"layers." not in path.read_bytes()
        with safe_open(path, "numpy") as file:
            assert list(file.keys()) == ["sealed"]
            assert file.get_tensor("sealed").shape == (memory.chunk_size_bytes(0),)


@pytest.mark.parametrize(
    ("fields", "argument", "length"),
    [
        ({"integrity": Integrity.SEALED}, "secret_file", 32),
        ({"integrity": Integrity.SEALED, "secret_file": "gone"}, "secret_file", 32),
        ({"integrity": Integrity.FAST, "tenant": "somebody"}, "tenant", 32),
        *(({"integrity": Integrity.SEALED}, "secret_file", length) for length in (0, 31, 33, 65)),
    ],
)
def test_what_is_missing_is_named(
    root: Path, fields: dict[str, Any], argument: str, length: int
) -> None:
    if length != 32:
        secret = secret_of(root, "secret")
        secret.write_bytes(b"x" * length)
        fields = fields | {"secret_file": str(secret)}
    with pytest.raises(InvalidArgumentError) as raised:
        open_store(root, NAMESPACE, **fields)
    assert raised.value.argument == argument
    assert length == 32 or f"'{length} bytes'" in str(raised.value)
    assert not root.exists()


def test_the_package_that_is_missing_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtraError, match=r"integrity=sealed .* 'kvxfer\[sealed\]'"):
        open_sealed(root, "ours")


async def test_no_key_is_in_any_text_or_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    with caplog.at_level(logging.DEBUG):
        async with open_sealed(root, "ours", "old", tenant="tenant") as backend:
            await fill(backend)
            flip_bit(path_of(root, NAMESPACE, KEYS[0]), 8 * PAGE_BYTES)
            told += [await load(backend)]
        async with open_sealed(root, "theirs") as other:
            told += [await load(other)]
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
