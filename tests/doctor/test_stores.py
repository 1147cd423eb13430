"""Checks of a store in files: real file systems, each with one fault."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvxfer.backends.file import FileConfig, Integrity
from kvxfer.backends.nixl import SECRET_VARIABLE
from kvxfer.connect import parse_backend
from kvxfer.doctor import (
    Finding,
    Severity,
    places,
    plan_checks,
    require_openable,
    run_checks,
)
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
from tests.doctor.findings import ERROR, OK, TIMEOUT_S, WARNING, expect, make_root

GIB = 1 << 30
SOUND = (check_folder, check_secret, check_space, check_inodes)


def expect_of(
    check: Callable[[FileConfig], Finding],
    path: Path,
    severity: Severity,
    *words: str,
    **fields: Any,
) -> None:
    sizes = {"capacity": ByteSize(1 << 20), "min_free": ByteSize(1 << 20)}
    expect(check(FileConfig(path=str(path), **sizes | fields)), severity, *words)


@pytest.mark.parametrize("name", ["", "a/b/store"])
def test_a_sound_folder_is_sound_whether_it_is_there_or_not(tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for check in SOUND:
        expect_of(check, tmp_path / name, OK)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sound_store_is_sound_and_tells_its_namespaces(store: Store) -> None:
    store.fill()
    for check in SOUND:
        expect_of(check, store.root, OK)
    expect_of(check_folder, store.root, OK, "^can be written to, namespaces: 1\n")
    store.fill(num_tensors=2)
    expect_of(check_folder, store.root, OK, "^can be written to, namespaces: 2\n")
    expect_of(check_space, store.root, OK, "192.0 KiB of the capacity in use")


def test_what_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        for path in (folder, folder / "store"):
            told = f"{folder} cannot be written to: Read-only file system"
            expect_of(check_folder, path, ERROR, told)
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "store"):
        expect_of(check_folder, path, ERROR, f"{file} is no folder")


def test_a_folder_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Mock(wraps=check_folder)
    monkeypatch.setattr(places, "check_folder", tried)
    config = parse_backend(f"file://{tmp_path}?capacity=1MiB&min_free=1MiB")[1]
    checks = [each for each in plan_checks([config], TIMEOUT_S) if str(tmp_path) in each.subject]
    assert len(run_checks(checks, timeout_s=TIMEOUT_S)) == 7
    assert tried.call_count == 1


def test_a_folder_that_cannot_be_used_is_one_error_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with mounted("-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        for path in (file, file / "store", folder, folder / "store", Path("/proc/store")):
            config = parse_backend(f"file://{path}?capacity=1MiB")[1]
            checks = [
                each for each in plan_checks([config], TIMEOUT_S) if str(path) in each.subject
            ]
            assert len(checks) == 7
            first, *others = run_checks(checks, timeout_s=TIMEOUT_S)
            assert (first.check, first.severity) == ("store-folder", ERROR)
            assert {each.severity for each in others} == {OK}


def test_a_disk_without_inodes_is_not_called_a_folder_of_another_user() -> None:
    with mounted("-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs") as folder:
        config = parse_backend(f"file://{folder}?capacity=1MiB")[1]
        assert isinstance(config, FileConfig)
        assert check_folder(config).mend == f"df -h {folder}; df -i {folder}"
        assert require_openable("tier", f"file://{folder}?capacity=1MiB") == config


def test_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "kv")
    for name in ("link", "link/store"):
        told = f"{tmp_path}/link leads to {tmp_path}/disk/kv, which does not exist"
        expect_of(check_folder, tmp_path / name, ERROR, told)
    (tmp_path / "disk" / "kv").mkdir(parents=True)
    expect_of(check_folder, tmp_path / "link", OK)


def test_a_capacity_that_cannot_be_reached_is_named_with_what_can_be() -> None:
    with tmpfs(16 << 20) as folder:
        expect_of(check_space, folder, OK, capacity=15 << 20)
        expect_of(check_space, folder, WARNING, "(?m)^capacity=15MiB$", capacity=GIB)
        expect_of(check_space, folder, ERROR, capacity=GIB, min_free=GIB)
        expect_of(check_medium, folder, WARNING, "(?m)^host://.capacity=65536$", capacity=1 << 16)
        (folder / "filler").write_bytes(bytes(16 << 20))
        expect_of(check_space, folder, ERROR, "0 B free")


def test_too_few_inodes_are_named(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-N", "128", image], check=True)
    with mounted("-o", "loop", str(image)) as folder:
        expect_of(check_inodes, folder, OK)
        store = Store(folder / "store")
        store.fill()
        expect_of(check_inodes, store.root, OK, capacity=1 << 18)
        expect_of(check_inodes, store.root, WARNING, capacity=32 << 20)
        for number in range(80):
            (folder / str(number)).touch()
        expect_of(check_inodes, folder / "other", WARNING)


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("ext4", OK), ("xfs", OK), ("nfs4", OK), ("tmpfs", WARNING), ("overlay", WARNING)],
)
def test_a_medium_that_keeps_nothing_is_named(
    tmp_path: Path, kind: str, severity: Severity
) -> None:
    hidden = f"3 1 0:1 / {tmp_path} rw - ntfs ntfs rw\n"
    mounts = (
        f"{hidden}2 1 0:1 / {tmp_path} rw - {kind} {kind} rw\n1 0 8:1 / / rw - ext4 /dev/a rw\n"
    )
    root = make_root(tmp_path / "root", {"proc/self/mountinfo": mounts})

    def check(config: FileConfig) -> Finding:
        return check_medium(config, root=root)

    expect_of(check, tmp_path / "a" / "store", severity, kind)
    expect_of(check, tmp_path.parent, OK, "^ext4 at /\n")


def test_a_file_system_without_direct_io_is_named_unless_it_is_meant() -> None:
    with mounted("-t", "ramfs", "ramfs") as folder:
        expect_of(check_direct_io, folder, WARNING)
        expect_of(check_direct_io, folder, OK, direct="off")
        expect_of(check_space, folder, OK)  # it does not say how much it has


def test_a_secret_that_is_missing_is_named(tmp_path: Path, secret_file: Path) -> None:
    keyed = {"integrity": Integrity.KEYED}
    for secret in ("", str(tmp_path / "gone")):
        expect_of(check_secret, tmp_path, ERROR, "chmod 600", **keyed, secret_file=secret)
    pytest.importorskip("blake3")
    expect_of(check_secret, tmp_path, OK, **keyed, secret_file=str(secret_file))


@pytest.mark.parametrize(
    ("url", "severity"),
    [
        ("s3://bucket/prefix?integrity=sealed", ERROR),
        ("s3://bucket/prefix", OK),
        ("nixl://?listen=0.0.0.0:7000&capacity=1GiB", ERROR),
        ("nixl://?listen=127.0.0.1:7000&capacity=1GiB&secret_file=/nonexistent", ERROR),
        ("nixl://?listen=127.0.0.1:7000&capacity=1GiB", OK),
        ("nixl://?discover=etcd://127.0.0.1:2379/kv&secret_file=/nonexistent", ERROR),
    ],
)
def test_a_secret_is_missing_in_buckets_and_where_this_process_listens(
    url: str, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    planned = plan_checks([parse_backend(url)[1]], TIMEOUT_S)
    checks = [each for each in planned if each.name == "store-secret"]
    (finding,) = run_checks(checks, timeout_s=TIMEOUT_S)
    expect(finding, severity)
