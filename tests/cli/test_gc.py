"""`kvxfer gc`: the files that it removes and leaves, also while engines use the store."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.file.folders import Ledger, NamespaceFolder
from kvxfer.cli import main
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.cli.stores import FILE_BYTES, NUM_BLOCKS, PAGES, Store

DAY_S = 86400


def age(store: Store, namespace: Namespace) -> None:
    """Date the last use of block i back by i days."""
    for number, key in enumerate(store.keys):
        used = time.time() - number * DAY_S - 60
        os.utime(store.path(namespace, key), (used, used))


def left(store: Store, namespace: Namespace) -> list[int]:
    return [i for i, key in enumerate(store.keys) if store.path(namespace, key).exists()]


def test_beyond_the_capacity_the_least_recently_used_go(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    age(store, namespace)
    assert main(["gc", str(store.root), "--capacity", str(4 * FILE_BYTES + 1)]) == 0
    assert left(store, namespace) == [0, 1, 2, 3]
    assert "4 beyond the capacity" in capsys.readouterr().out
    assert store.counted_bytes == 4 * FILE_BYTES


def test_capacity_counts_all_namespaces_and_what_goes_by_age(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = store.fill(), store.fill(model="another", num_blocks=2)
    age(store, first)
    capacity = str(4 * FILE_BYTES)
    assert main(["gc", str(store.root), "--max-age", "5d", "--capacity", capacity]) == 0
    said = "removed: 3 unused for too long, 3 beyond the capacity;"
    assert capsys.readouterr().out.startswith(said)
    assert left(store, first) == [0, 1]
    assert left(store, second) == [0, 1]


def test_what_is_in_quarantine_goes_and_is_no_longer_counted(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    os.truncate(store.path(namespace, store.keys[0]), 9000)
    main(["fsck", str(store.root), "--repair"])
    capsys.readouterr()
    assert main(["gc", str(store.root)]) == 0
    assert capsys.readouterr().out.startswith("removed: 1 in quarantine; 12.0 KiB freed")
    assert not store.quarantined()
    assert store.counted_bytes == (NUM_BLOCKS - 1) * FILE_BYTES


def test_temporary_files_of_dead_writers_go_and_those_of_living_ones_stay(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    folder = store.path(namespace, store.keys[0]).parent
    with contextlib.closing(Ledger(store.root)) as ledger:
        dead, living = (folder / f"{owner}-0.safetensors.tmp" for owner in ("01" * 8, ledger.owner))
        for path in (dead, living):
            path.write_bytes(b"half a block")
        assert main(["gc", str(store.root)]) == 0
    assert capsys.readouterr().out.startswith("removed: 1 temporary;")
    assert living.exists()
    assert not dead.exists()


def test_a_namespace_without_blocks_goes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    kept, emptied = store.fill(), store.fill(model="another", num_blocks=2)
    for key in store.keys[:2]:
        store.path(emptied, key).unlink()
    assert main(["gc", str(store.root)]) == 0
    assert "1 namespaces without blocks" in capsys.readouterr().out
    assert not (store.root / emptied.fingerprint).exists()
    assert (store.root / kept.fingerprint / "namespace.json").exists()


async def test_an_engine_goes_on_when_everything_was_removed(store: Store) -> None:
    memory = BlockMemory(PAGES, num_blocks=NUM_BLOCKS)
    namespace = memory.namespace()
    config = FileConfig(path=str(store.root), capacity=ByteSize(1 << 30), min_free=ByteSize(1))
    blocks = memory.describe(0, list(range(NUM_BLOCKS)))
    async with FileBackend(config, namespace) as backend:
        for _ in range(2):
            assert all(outcome.done for outcome in await backend.store(store.keys, blocks))
            arguments = ["gc", str(store.root), "--max-age", "0s"]
            assert await asyncio.to_thread(main, arguments) == 0
            assert not (store.root / namespace.fingerprint).exists()
            assert not any(await backend.lookup(store.keys))
        assert (await backend.load(store.keys[:1], blocks.select(0, 1)))[0].status.value == (
            "missing"
        )
        assert all(outcome.done for outcome in await backend.store(store.keys, blocks))
        assert all(outcome.done for outcome in await backend.load(store.keys, blocks))
    assert (store.root / namespace.fingerprint / "namespace.json").exists()
    assert store.counted_bytes == NUM_BLOCKS * FILE_BYTES
    assert await asyncio.to_thread(main, ["fsck", str(store.root)]) == 0


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_folder_that_holds_no_store_is_misuse_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "file.tmp").write_text("mine")
    bounds = ["--max-age", "0s", "--capacity", "1B"]
    assert main(["gc", str(tmp_path), *bounds, *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"kvxfer gc: path is '{tmp_path}'; expected the root of a store")
    assert [path.name for path in tmp_path.iterdir()] == ["file.tmp"]
    assert not (tmp_path / "usage.ledger").exists()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_between_two_files_leaves_the_count_right(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    store.fill()
    remove = NamespaceFolder.remove_found

    def remove_and_signal(*arguments: Any) -> bool:
        monkeypatch.setattr(NamespaceFolder, "remove_found", remove)
        was_there = remove(*arguments)
        os.kill(os.getpid(), number)
        return was_there

    monkeypatch.setattr(NamespaceFolder, "remove_found", remove_and_signal)
    # A shell ignores them for what it starts in the background, and the tests may be that.
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    inherited = signal.signal(number, default)
    try:
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(["gc", str(store.root), "--max-age", "0s"]))
        assert signal.getsignal(number) is default
    finally:
        signal.signal(number, inherited)
    assert ended.value.code == status
    assert len(store.blocks()) < NUM_BLOCKS
    assert store.counted_bytes == len(store.blocks()) * FILE_BYTES


def everything(store: Store) -> dict[Path, bytes | None]:
    found = store.root.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize(
    "bounds",
    [
        [],
        ["--max-age", "3d"],
        ["--capacity", str(4 * FILE_BYTES + 1)],
        ["--max-age", "5d", "--capacity", str(3 * FILE_BYTES)],
        ["--max-age", "0s"],
        ["--capacity", "1B"],
    ],
)
def test_a_dry_run_removes_nothing_and_says_what_would_go(
    store: Store, capsys: pytest.CaptureFixture[str], bounds: list[str]
) -> None:
    first, second = store.fill(), store.fill(model="another", num_blocks=2)
    emptied = store.fill(model="emptied", num_blocks=1)
    age(store, first)
    store.path(emptied, store.keys[0]).unlink()
    (store.root / second.fingerprint / "notes.txt").write_text("mine")
    corrupt = store.path(first, store.keys[0])
    os.truncate(corrupt, 9000)
    main(["fsck", str(store.root), "--repair"])
    (corrupt.parent / f"{'01' * 8}-0.safetensors.tmp").write_bytes(b"half a block")
    (store.root / f"{'01' * 8}.claim").write_bytes(b"of a process that died")
    capsys.readouterr()
    before = everything(store)
    assert main(["gc", str(store.root), *bounds, "--dry-run"]) == 0
    assert everything(store) == before
    would = capsys.readouterr().out
    assert main(["gc", str(store.root), *bounds]) == 0
    assert capsys.readouterr().out == would.replace("would be removed:", "removed:").replace(
        "would be freed", "freed"
    ).replace("would be left", "left")
    assert "would be removed: 1 temporary, 1 in quarantine," in would
