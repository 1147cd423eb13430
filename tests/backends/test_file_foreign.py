"""Foreign files, left or planted in a store: never followed, written to, waited for or removed."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvxfer.cli import main
from tests.backends.file_store import (
    hashed_keys,
    one_page_memory,
    open_store,
    path_of,
    store,
)

DEAD = "01" * 8
MEMORY = one_page_memory()
NAMESPACE = MEMORY.namespace()


async def fill(root: Path) -> Path:
    """Store a block; return the folder of its file."""
    async with open_store(root, NAMESPACE) as backend:
        await backend.wait_indexed()
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


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, link_to_nothing])
async def test_what_is_no_file_stays_whatever_its_name(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = await fill(tmp_path)
    odd = [
        folder / "x.tmp",
        folder / f"{DEAD}-0.safetensors.tmp",
        folder / f"{'02' * 8}-0.safetensors.tmp",
        folder.parent / f"{DEAD}-0.safetensors.tmp",
        folder.parent / "namespace.json.tmp",  # what earlier versions wrote to
        tmp_path / ".direct.tmp",
        tmp_path / f"{'02' * 8}.claim",
    ]
    for path in odd:
        make(path)
    await fill(tmp_path)
    await require_commands(tmp_path)
    assert all(path.is_symlink() or path.exists() for path in odd)


async def test_links_planted_at_names_that_were_written_to_are_not_overwritten(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    folder = await fill(root)
    precious = tmp_path / "precious"
    precious.write_text("not yours")
    for path in (folder.parent / "namespace.json.tmp", root / ".direct.tmp"):
        path.hardlink_to(precious)
    description = folder.parent / "namespace.json"
    before = description.read_text()
    description.unlink()
    description.hardlink_to(precious)
    await fill(root)
    assert precious.read_text() == "not yours"
    assert description.read_text() == before


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o777, None, "anybody can write to it"),
        (0o1777, None, "anybody can write to it"),
        (0o702, None, "anybody can write to it"),
        (0o700, 4711, "user 4711 owns it"),
        *((mode, None, "") for mode in (0o700, 0o755, 0o750)),
    ],
)
async def test_a_root_that_others_can_write_to_and_no_other_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, owner: int | None, said: str
) -> None:
    if owner is not None and os.geteuid():
        pytest.skip("only root can give folders away")
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    if owner is not None:
        os.chown(root, owner, -1)
    with caplog.at_level(logging.WARNING, "kvxfer"):
        async with open_store(root, NAMESPACE):
            pass
    told = [record for record in caplog.records if record.name.startswith("kvxfer")]
    assert len(told) == bool(said)
    for record in told:
        assert str(root) in record.getMessage()
        assert said in record.getMessage()
        assert "chmod 700" in record.getMessage() or "chown" in record.getMessage()


async def test_blocks_of_another_namespace_are_misses_whose_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {
        "instruction_set": msgspec.structs.replace(NAMESPACE, instruction_set="packed for amx"),
        "model": msgspec.structs.replace(NAMESPACE, model="another one"),
    }
    for other in others.values():
        async with open_store(tmp_path, other) as backend:
            await backend.wait_indexed()
    await fill(tmp_path)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kvxfer"):
        async with open_store(tmp_path, NAMESPACE) as backend:
            await backend.wait_indexed()
    (message,) = [text for text in caplog.messages if "are not found here" in text]
    assert others["instruction_set"].fingerprint in message
    assert "differ in instruction_set: ours is '', theirs is 'packed for amx'" in message
