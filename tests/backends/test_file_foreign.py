"""Foreign files in a store are never followed, written to or removed, and its own are safe."""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.cli import main
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.keys import Namespace, make_block_key
from tests.backends.file_store import (
    GIB,
    flip_bit,
    hashed_keys,
    indexed_store,
    listed,
    load_verified,
    one_page_memory,
    open_store,
    path_of,
    store,
)

DEAD = "01" * 8
MEMORY = one_page_memory()
NAMESPACE = MEMORY.namespace()


async def fill(root: Path) -> Path:
    async with indexed_store(root, NAMESPACE) as backend:
        (outcome,) = await store(backend, hashed_keys(1), MEMORY.describe(0, [0]))
        assert outcome.done, outcome
    return path_of(root, NAMESPACE, hashed_keys(1)[0]).parent


async def require_commands(root: Path) -> None:
    for command in (["gc", str(root)], ["fsck", str(root), "--repair"]):
        assert await asyncio.to_thread(main, command) == 0


async def test_files_that_only_look_like_ours_stay(tmp_path: Path) -> None:
    folder = await fill(tmp_path)
    foreign = [
        tmp_path / "insurance.claim",
        tmp_path / f"{DEAD}.claim.bak",
        tmp_path / ("AB" * 8 + ".claim"),
        tmp_path / f"{DEAD}-0.safetensors.tmp",
        folder / "mine.tmp",
        folder / "mine-0.safetensors.tmp",
        folder / f"{hashed_keys(1)[0].hex()}.safetensors.tmp",
        folder / f"{DEAD}-xyz.safetensors.tmp",
        folder / f"{DEAD}-.safetensors.tmp",
        folder / f"{DEAD}-0.safetensors.tmp.tmp",
        folder.parent / "notes.tmp",
    ]
    for path in foreign:
        path.write_text("mine")
    ours = [folder / f"{DEAD}-1f.safetensors.tmp", folder.parent / f"{DEAD}-0.safetensors.tmp"]
    for path in ours:
        path.write_text("half a block")
    await fill(tmp_path)
    await require_commands(tmp_path)
    assert all(path.read_text() == "mine" for path in foreign)
    assert not any(path.exists() for path in ours)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, partial(os.symlink, "nothing")])
async def test_what_is_no_file_stays_whatever_its_name(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = await fill(tmp_path)
    odd = [
        folder / "x.tmp",
        folder / f"{DEAD}-0.safetensors.tmp",
        folder / f"{'02' * 8}-0.safetensors.tmp",
        folder.parent / f"{DEAD}-0.safetensors.tmp",
        tmp_path / f"{'02' * 8}.claim",
    ]
    for path in odd:
        make(path)
    await fill(tmp_path)
    await require_commands(tmp_path)
    assert all(path.is_symlink() or path.exists() for path in odd)


async def test_a_file_named_for_a_group_that_there_is_not_is_no_block_of_ours(
    tmp_path: Path,
) -> None:
    await fill(tmp_path)
    foreign = path_of(tmp_path, NAMESPACE, make_block_key(b"foreign", 9))
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"mine")
    os.utime(foreign, (2**33, 2**33))  # more recently used than ours
    async with open_store(tmp_path, NAMESPACE) as backend:
        used = await backend.recently_used(1)
        assert used == hashed_keys(1)
        assert await backend.lookup(used) == [True]


async def test_a_link_planted_at_a_written_name_is_not_written_through(tmp_path: Path) -> None:
    root = tmp_path / "store"
    folder = await fill(root)
    precious = tmp_path / "precious"
    precious.write_text("not yours")
    description = folder.parent / "namespace.json"
    before = description.read_text()
    description.unlink()
    description.hardlink_to(precious)
    await fill(root)
    assert precious.read_text() == "not yours"
    assert description.read_text() == before


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        *((mode, "any user can plant") for mode in (0o777, 0o1777, 0o702)),
        *((mode, "") for mode in (0o700, 0o755, 0o750)),
    ],
)
async def test_a_root_that_others_can_write_to_and_no_other_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, said: str
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    with caplog.at_level(logging.WARNING, "kvxfer"):
        async with open_store(root, NAMESPACE):
            pass
    told = [each.getMessage() for each in caplog.records if each.name.startswith("kvxfer")]
    assert len(told) == bool(said)
    assert all(str(root) in each and said in each for each in told)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (listed(NAMESPACE), "groups[0].tensors"),
        (msgspec.structs.replace(NAMESPACE, parallel={"\n\x1b[2J": 1}), "parallel.\\n\\x1b[2J"),
    ],
    ids=["long", "odd"],
)
async def test_what_other_blocks_of_the_model_differ_in_is_one_short_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Namespace, field: str
) -> None:
    async with open_store(tmp_path, other):
        pass
    with caplog.at_level(logging.INFO, "kvxfer"):
        async with open_store(tmp_path, NAMESPACE):
            pass
    (told,) = [text for text in caplog.messages if "blocks of the same model in" in text]
    assert f"differ in {field}: " in told
    assert told.isprintable()
    assert len(told) < 1200


async def test_files_and_folders_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    keys = [make_block_key(content, 0) for content in (b"../../../etc/passwd", b"/etc/a\0b\n")]
    for umask in (0, 0o022, 0o077):
        root = tmp_path / f"{umask:o}"
        old = os.umask(umask)
        try:
            async with open_store(root, NAMESPACE) as backend:
                await store(backend, keys, MEMORY.describe(0, [0, 1]))
                flip_bit(path_of(root, NAMESPACE, keys[0]), 0)
                await load_verified(backend, keys, MEMORY.describe(0, [2, 3]))
                modes = {
                    path: path.stat().st_mode & 0o7777
                    for folder, _, names in os.walk(root)
                    for path in (Path(folder), *(Path(folder) / name for name in names))
                }
        finally:
            os.umask(old)
        for path, mode in modes.items():
            assert mode == (0o700 if path.is_dir() else 0o600), path
        assert any("quarantine" in path.parts for path in modes)
        assert path_of(root, NAMESPACE, keys[1]) in modes


@pytest.mark.parametrize("key", [bytes(300), bytes(120), b"", b"abcd", "text", None])
async def test_a_key_that_is_none_or_too_long_is_refused(tmp_path: Path, key: Any) -> None:
    blocks = MEMORY.describe(0, [0])
    async with open_store(tmp_path, NAMESPACE) as backend:
        moves = [partial(move, blocks=blocks) for move in (backend.store, backend.load)]
        calls: list[Any] = [backend.lookup, *moves, backend.delete]
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                await call([key])


def test_a_store_without_a_folder_is_refused_and_is_not_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"path.*the folder of the store"):
        FileBackend(FileConfig(path="", capacity=GIB), NAMESPACE)
    assert list(tmp_path.iterdir()) == []


async def test_a_namespace_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "a", tmp_path / "b"
    root.mkdir()
    elsewhere.mkdir()
    (root / NAMESPACE.fingerprint).symlink_to(elsewhere)
    with pytest.raises(BackendUnavailableError):
        open_store(root, NAMESPACE)
    assert list(elsewhere.iterdir()) == []
