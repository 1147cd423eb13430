"""Checks of a store in files: its folder, its space, its disk, and how bytes get there."""

import os
import tempfile
from collections import defaultdict
from pathlib import Path

from kvxfer.backends.file import (
    BlockTree,
    Digester,
    FileConfig,
    read_count,
    read_namespaces,
)
from kvxfer.backends.file.io import open_engine, probe_direct
from kvxfer.backends.file.space import MIN_FREE_FILES
from kvxfer.backends.host.control_groups import read_mounts
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import MissingExtraError
from kvxfer.storage.integrity import read_secret
from kvxfer.storage.keys import Namespace
from kvxfer.units import format_size

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OF_CONTAINERS = frozenset({"overlay", "aufs"})


def check_folder(url: str, config: FileConfig) -> Finding:
    """Check that the folder of a store is there or can be made, and can be written to."""
    at = Examined(Check.STORE_FOLDER, url)
    path, folder = Path(config.path), standing_folder(config)
    why = "The store cannot be opened, or every store fails: nothing is kept, and nothing is found."
    if not folder.is_dir():
        return at.error(f"{folder} is no folder", why=why, mend=f"mkdir -p {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        found = f"{folder} cannot be written to: {exc.strerror}"
        return at.error(found, why=why, mend=f"install -d -m 700 -o $(id -un) {path}")
    return at.ok(_summary(path) if folder == path else f"will be made in {folder}")


def check_secret(url: str, config: FileConfig) -> Finding:
    """Check that the checksums which were asked for can be made."""
    at = Examined(Check.STORE_SECRET, url)
    try:
        Digester(config.integrity, read_secret(config.secret_file), config.tenant)
    except (InvalidArgumentError, MissingExtraError) as exc:
        return at.error(
            str(exc),
            why="The store is not opened without its secret and the package for it.",
            mend="pip install 'kvxfer[keyed,sealed]'; head -c 32 /dev/urandom > SECRET_FILE",
        )
    return at.ok(f"integrity={config.integrity.value}")


def check_space(url: str, config: FileConfig) -> Finding:
    """Check that the capacity that was asked for can be reached."""
    at = Examined(Check.STORE_SPACE, url)
    found = os.statvfs(standing_folder(config))
    if not found.f_blocks:
        return at.ok("the file system does not say how much it has")
    free = found.f_bavail * found.f_frsize
    used = read_count(Path(config.path)) or 0
    usable = min(config.capacity, used + max(0, free - config.min_free))
    shown = f"{format_size(free)} free, {format_size(used)} of the capacity in use"
    if usable >= config.capacity:
        return at.ok(f"{shown}, {format_size(config.capacity)} asked for")
    limits = f"{shown}; with min_free={format_size(config.min_free)} no more than "
    limits += f"{format_size(usable)} of {format_size(config.capacity)} can be used"
    why = "Blocks are evicted long before the capacity is reached, or none is stored at all."
    if not usable:
        return at.error(limits, why=why, mend=f"df {standing_folder(config)}  # and make room")
    return at.warning(limits, why=why, mend=f"capacity={usable >> 20}MiB")


def check_inodes(url: str, config: FileConfig) -> Finding:
    """Check that the file system has room for as many files as the capacity has blocks."""
    at = Examined(Check.STORE_INODES, url)
    found = os.statvfs(standing_folder(config))
    if not found.f_files:
        return at.ok("the file system makes as many as are needed")
    chunk_bytes = _mean_chunk_bytes(_namespaces(Path(config.path)))
    used = read_count(Path(config.path)) or 0
    missing = max(0, config.capacity - used) // chunk_bytes if chunk_bytes else 0
    if found.f_favail >= max(MIN_FREE_FILES, missing):
        return at.ok(f"{found.f_favail} files can be made")
    return at.warning(
        f"{found.f_favail} files can be made, {max(MIN_FREE_FILES, missing)} are needed",
        why="Each block is a file. Without inodes blocks are evicted, or none is stored, although "
        "there is space.",
        mend="mkfs.ext4 -i 65536 ...  # or XFS, which makes them as needed",
    )


def check_medium(url: str, config: FileConfig, *, root: Path = Path("/")) -> Finding:
    """Check that the file system keeps files: beyond a restart, and beyond the container."""
    at = Examined(Check.STORE_MEDIUM, url)
    folder = standing_folder(config).resolve()
    kind = point = ""
    for mount in read_mounts(root):
        if folder.is_relative_to(mount.point) and len(mount.point) >= len(point):
            kind, point = mount.kind, mount.point
    if kind in _IN_MEMORY:
        return at.warning(
            f"{kind} at {point}",
            why="Files in memory are lost at a restart of the machine, and take what host:// "
            "could use without the way through a file system.",
            mend=f"host://?capacity={config.capacity >> 20}MiB",
        )
    if kind in _OF_CONTAINERS:
        return at.warning(
            f"{kind} at {point}, the layer of a container",
            why="Its files are gone with the container, and every access goes through one more "
            "file system.",
            mend=f"docker run -v {config.path}:{config.path} ...",
        )
    return at.ok(f"{kind or 'unknown'} at {point or '/'}")


def check_direct_io(url: str, config: FileConfig) -> Finding:
    """Check that the file system has O_DIRECT."""
    at = Examined(Check.DIRECT_IO, url)
    if config.direct == "off":
        return at.ok("not asked for")
    alignment = probe_direct(standing_folder(config))
    if alignment:
        return at.ok(f"works, aligned to {alignment} bytes")
    return at.warning(
        "the file system refuses O_DIRECT",
        why="Every block is copied through the page cache, which takes memory from the engine.",
        mend="a folder on ext4 or XFS; direct=off where this is meant",
    )


def check_io_uring(url: str, config: FileConfig) -> Finding:
    """Check that the kernel permits io_uring."""
    at = Examined(Check.IO_URING, url)
    if config.engine == "posix":
        return at.ok("not asked for")
    try:
        open_engine("uring").close()
    except InvalidArgumentError as exc:
        make = at.error if config.engine == "uring" else at.warning
        return make(
            exc.expected,
            why="Small blocks are read and written with a system call each, several times slower.",
            mend="sysctl kernel.io_uring_disabled=0  # in a container also: --security-opt "
            "seccomp=PROFILE; engine=posix where this is meant",
        )
    return at.ok("works")


def standing_folder(config: FileConfig) -> Path:
    """Find the folder of the store, or the nearest one above that is there."""
    path = Path(config.path)
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _namespaces(path: Path) -> list[Namespace]:
    return [*read_namespaces(BlockTree(path))] if path.is_dir() else []


def _mean_chunk_bytes(namespaces: list[Namespace]) -> int:
    sizes = [
        each.chunk_size_bytes(group) for each in namespaces for group in range(len(each.groups))
    ]
    return sum(sizes) // len(sizes) if sizes else 0


def _summary(path: Path) -> str:
    """Say how many namespaces a store has, and in what those of one model differ."""
    by_model = defaultdict(list)
    for namespace in _namespaces(path):
        by_model[namespace.model].append(namespace)
    texts = []
    for first, *others in by_model.values():
        fields = {difference.field for each in others for difference in first.differences(each)}
        if others:
            differ = ", ".join(sorted(fields)[:3])
            texts.append(f"{1 + len(others)} of {first.model}, which differ in {differ}")
    num_namespaces = sum(map(len, by_model.values()))
    return "; ".join([f"can be written to, namespaces: {num_namespaces}", *texts])
