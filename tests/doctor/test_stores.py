"""Checks of a store in files: real file systems, each with one fault."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import FileConfig, Integrity
from kvxfer.doctor import Result, Severity
from kvxfer.doctor.places import (
    check_direct_io,
    check_folder,
    check_inodes,
    check_medium,
    check_secret,
    check_space,
)
from kvxfer.units import ByteSize
from tests.backends.file_store import mounted, tmpfs
from tests.cli.stores import Store
from tests.doctor.test_machine import is_complete, make_root

GIB = 1 << 30
SOUND = (check_folder, check_secret, check_space, check_inodes)


def config(
    path: Path, capacity: int = 1 << 20, min_free: int = 1 << 20, **fields: str
) -> FileConfig:
    return FileConfig(
        path=str(path),
        capacity=ByteSize(capacity),
        min_free=ByteSize(min_free),
        **fields,  # type: ignore[arg-type]
    )


def named(check: Callable[[FileConfig], Result], wanted: FileConfig, severity: Severity) -> Result:
    """Make a check; its finding must have the severity, and explain itself."""
    finding = check(wanted)
    assert finding.severity is severity, finding
    assert is_complete(finding)
    return finding


@pytest.mark.parametrize("check", SOUND)
@pytest.mark.parametrize("name", ["", "store", "a/b/store"])
def test_a_sound_folder_is_sound_whether_it_is_there_or_not(
    tmp_path: Path, check: Callable[[FileConfig], Result], name: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    named(check, config(tmp_path / name), Severity.OK)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sound_store_is_sound_and_tells_in_what_its_namespaces_differ(store: Store) -> None:
    store.fill()
    for check in SOUND:
        found = named(check, config(store.root), Severity.OK).found
        if check is check_folder:
            assert found == "can be written to, namespaces: 1"
    store.fill(num_tensors=2)
    found = named(check_folder, config(store.root), Severity.OK).found
    assert "namespaces: 2; 2 of example/model, which differ in groups[0].tensors" in found
    found = named(check_space, config(store.root), Severity.OK).found
    assert "192.0 KiB of the capacity in use" in found


def test_a_folder_that_can_only_be_read_is_named() -> None:
    with mounted("-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        for path in (folder, folder / "store"):
            finding = named(check_folder, config(path), Severity.ERROR)
            assert f"{folder} cannot be written to: Read-only file system" in finding.found


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "store"):
        finding = check_folder(config(path))
        assert finding.severity is Severity.ERROR
        assert f"{file} is no folder" in finding.found


def test_a_capacity_that_cannot_be_reached_is_named_with_what_can_be() -> None:
    with tmpfs(16 << 20) as folder:
        named(check_space, config(folder, capacity=15 << 20), Severity.OK)
        finding = named(check_space, config(folder, capacity=GIB), Severity.WARNING)
        assert finding.mend == "capacity=15MiB"
        named(check_space, config(folder, capacity=GIB, min_free=GIB), Severity.ERROR)
        (folder / "filler").write_bytes(bytes(16 << 20))
        finding = named(check_space, config(folder), Severity.ERROR)
        assert "0 B free" in finding.found


def test_too_few_inodes_are_named(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-N", "128", image], check=True)
    with mounted("-o", "loop", str(image)) as folder:
        named(check_inodes, config(folder), Severity.OK)
        store = Store(folder / "store")
        store.fill()
        named(check_inodes, config(store.root, capacity=1 << 18), Severity.OK)
        named(check_inodes, config(store.root, capacity=32 << 20), Severity.WARNING)
        for number in range(80):
            (folder / str(number)).touch()
        named(check_inodes, config(folder / "other"), Severity.WARNING)


@pytest.mark.parametrize(
    ("kind", "severity"),
    [
        ("ext4", Severity.OK),
        ("xfs", Severity.OK),
        ("nfs4", Severity.OK),
        ("tmpfs", Severity.WARNING),
        ("overlay", Severity.WARNING),
    ],
)
def test_a_medium_that_keeps_nothing_is_named(
    tmp_path: Path, kind: str, severity: Severity
) -> None:
    hidden = f"3 1 0:1 / {tmp_path} rw - ntfs ntfs rw\n"
    mounts = (
        f"{hidden}2 1 0:1 / {tmp_path} rw - {kind} {kind} rw\n1 0 8:1 / / rw - ext4 /dev/a rw\n"
    )
    root = make_root(tmp_path / "root", {"proc/self/mountinfo": mounts})
    finding = check_medium(config(tmp_path / "a" / "store"), root=root)
    assert finding.severity is severity
    assert kind in finding.found
    assert is_complete(finding)
    assert check_medium(config(tmp_path.parent), root=root).found == "ext4 at /"


def test_a_file_system_without_direct_io_is_named_unless_it_is_meant() -> None:
    with mounted("-t", "ramfs", "ramfs") as folder:
        named(check_direct_io, config(folder), Severity.WARNING)
        named(check_direct_io, config(folder, direct="off"), Severity.OK)
        named(check_space, config(folder), Severity.OK)  # it does not say how much it has


def test_a_secret_that_is_missing_is_named(tmp_path: Path, secret_file: Path) -> None:
    keyed = {"integrity": Integrity.KEYED}
    for secret in ("", str(tmp_path / "gone")):
        wanted = config(tmp_path, secret_file=secret, **keyed)  # type: ignore[arg-type]
        named(check_secret, wanted, Severity.ERROR)
    pytest.importorskip("blake3")
    sound = config(tmp_path, secret_file=str(secret_file), **keyed)  # type: ignore[arg-type]
    named(check_secret, sound, Severity.OK)
