"""Blocks of another integrity or secret: not loaded, and kept for engines that can read them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.backends.file import BlockHeader, Digester, FileBackend, Integrity
from kvxfer.cli import main
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    PAGE_BYTES,
    flip_bit,
    hashed_keys,
    load_verified,
    open_store,
    path_of,
    remove_folder,
    sealed,
    secret_of,
    store,
)

NUM_KEYS = 20
SOURCE, TARGET = range(NUM_KEYS), range(NUM_KEYS, 2 * NUM_KEYS)
MEMORY = BlockMemory([[512]], num_blocks=2 * NUM_KEYS)
NAMESPACE = MEMORY.namespace()
KEYS = hashed_keys(NUM_KEYS)


def open_kind(root: Path, kind: str, owner: str = "ours") -> FileBackend:
    if kind == "sealed":
        return open_store(root, NAMESPACE, **sealed(root, owner))
    fields = {"secret_file": str(secret_of(root, owner))} if kind == "keyed" else {}
    return open_store(root, NAMESPACE, integrity=Integrity(kind), **fields)


async def fill(backend: FileBackend, keys: Sequence[BlockKey] = KEYS) -> None:
    outcomes = await store(backend, keys, MEMORY.describe(0, range(len(keys))))
    assert all(outcome.done for outcome in outcomes), outcomes


async def load(backend: FileBackend, keys: Sequence[BlockKey] = KEYS) -> list[Status]:
    return await load_verified(backend, keys, MEMORY.describe(0, TARGET[: len(keys)]))


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*.safetensors")}


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def forget_integrity(root: Path) -> None:
    """Turn a store into one of an earlier version."""
    for path in (root / NAMESPACE.fingerprint).glob("integrity.*"):
        path.unlink()


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("fast", "keyed"),
        ("keyed", "fast"),
        ("off", "fast"),
        ("off", "keyed"),
        ("fast", "sealed"),
        ("sealed", "fast"),
        ("sealed", "keyed"),
        ("sealed", "off"),
    ],
)
async def test_blocks_of_another_integrity_are_failed_and_stay(
    tmp_path: Path, theirs: str, ours: str, *, is_recorded: bool
) -> None:
    root = tmp_path / "store"
    async with open_kind(root, theirs) as backend:
        await fill(backend)
    if not is_recorded:
        forget_integrity(root)
    before = files(root)
    async with open_kind(root, ours) as backend:
        outcomes = await backend.load(KEYS, MEMORY.describe(0, TARGET))
        assert {outcome.status for outcome in outcomes} == {Status.FAILED}
        assert {outcome.reason for outcome in outcomes} == {
            f"integrity is {theirs!r}; expected {ours!r}"
        }
        assert backend.num_corrupt == 0
        assert not any(await backend.lookup(KEYS))
        for _ in range(2):  # the disk is well: other stores go on
            outcomes = await backend.store(KEYS, MEMORY.describe(0, SOURCE))
            assert {outcome.status for outcome in outcomes} == {Status.FAILED}
            assert all(repr(theirs) in outcome.reason for outcome in outcomes)
        (new,) = hashed_keys(1, first=99)
        await fill(backend, [new])
        assert await load(backend, [new]) == [Status.DONE]
        assert await backend.lookup([new, *KEYS]) == [True] + [False] * NUM_KEYS
        await backend.delete([new])
    assert files(root) == before
    async with open_kind(root, theirs) as backend:
        assert await load(backend) == [Status.DONE] * NUM_KEYS


async def test_an_engine_that_runs_notices_one_of_another_integrity(tmp_path: Path) -> None:
    root = tmp_path / "store"
    async with open_kind(root, "fast") as ours, open_kind(root, "keyed") as theirs:
        await fill(theirs, KEYS[:1])
        await fill(ours, KEYS[1:2])
        assert await ours.lookup(KEYS[:2]) == [False, True]
        assert await theirs.lookup(KEYS[:2]) == [True, False]
        assert await load(ours, KEYS[:2]) == [Status.FAILED, Status.DONE]
        assert await load(theirs, KEYS[:2]) == [Status.DONE, Status.FAILED]


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_another_secret_is_refused_and_every_block_stays(
    tmp_path: Path, *, is_recorded: bool
) -> None:
    root = tmp_path / "store"
    async with open_kind(root, "keyed") as backend:
        await fill(backend)
    if not is_recorded:
        forget_integrity(root)
    before = files(root)
    before_opening = num_open()
    with pytest.raises(InvalidArgumentError, match="secret_file") as raised:
        open_kind(root, "keyed", "theirs")
    assert NAMESPACE.fingerprint in str(raised.value)
    assert num_open() == before_opening
    command = ["fsck", str(root), "--repair", "--secret-file", str(secret_of(root, "theirs"))]
    assert await asyncio.to_thread(main, command) == 2
    assert files(root) == before
    async with open_kind(root, "keyed") as backend:
        assert await load(backend) == [Status.DONE] * NUM_KEYS
    assert await asyncio.to_thread(main, [*command[:-1], str(secret_of(root, "ours"))]) == 0


async def test_a_damaged_record_is_made_anew_by_who_has_the_secret(tmp_path: Path) -> None:
    root = tmp_path / "store"
    record = root / NAMESPACE.fingerprint / "integrity.keyed"
    async with open_kind(root, "keyed") as backend:
        await fill(backend)
    whole = record.read_bytes()
    for damage in (b"", b"noise", bytes([whole[0] ^ 1]) + whole[1:], whole[:-5]):
        record.write_bytes(damage)
        with pytest.raises(InvalidArgumentError, match="secret_file"):
            open_kind(root, "keyed", "theirs")
        async with open_kind(root, "keyed") as backend:
            assert await load(backend) == [Status.DONE] * NUM_KEYS
        assert record.read_bytes() == whole


@pytest.mark.parametrize("kind", ["keyed", "fast"])
async def test_a_header_that_fails_is_corrupt_and_keeps_no_owner_of_an_old_store_out(
    tmp_path: Path, kind: str
) -> None:
    root = tmp_path / "store"
    async with open_kind(root, kind) as backend:
        await fill(backend, KEYS[:2])
    forget_integrity(root)
    path = path_of(root, NAMESPACE, KEYS[0])
    path.write_bytes(path.read_bytes().replace(b'"start":"0"', b'"start":"1"'))
    async with open_kind(root, "keyed") as backend:
        other = Status.DONE if kind == "keyed" else Status.FAILED
        assert await load(backend, KEYS[:2]) == [Status.CORRUPT, other]


async def test_a_store_that_was_emptied_may_have_another_secret_and_engines_that_run_notice(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    async with open_kind(root, "keyed") as ours:
        await fill(ours)
        remove_folder(root)
        async with open_kind(root, "keyed", "theirs") as theirs:
            await fill(theirs, KEYS[:3])
            before = files(root)
            assert not any(await ours.lookup(KEYS))
            assert await load(ours, KEYS[:3]) == [Status.FAILED] * 3
            outcomes = await ours.store(KEYS, MEMORY.describe(0, SOURCE))
            assert {outcome.status for outcome in outcomes} == {Status.FAILED}
            assert all("secret_file" in outcome.reason for outcome in outcomes)
            assert files(root) == before
            assert await load(theirs, KEYS[:3]) == [Status.DONE] * 3


async def test_with_a_secret_a_bit_flip_that_was_sealed_again_is_found(tmp_path: Path) -> None:
    root = tmp_path / "store"
    path = path_of(root, NAMESPACE, KEYS[0])
    async with open_kind(root, "keyed") as backend:
        await fill(backend, KEYS[:1])
        flip_bit(path, 8 * 4100)
        header, data = path.read_bytes()[:PAGE_BYTES], path.read_bytes()[PAGE_BYTES:]
        forger = Digester(Integrity.KEYED, b"a guess".ljust(32))
        forged = replace(BlockHeader.decode(header), checksum=forger.checksum([memoryview(data)]))
        path.write_bytes(forged.encode(forger) + data)
        assert await load(backend, KEYS[:1]) == [Status.CORRUPT]
