"""Control groups of this process, of both versions, and the mounts that their files are in."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """Mounted file system.

    Attributes:
        top: Its folder that is mounted.
        point: Folder at which it is mounted.
        kind: Type of the file system, such as `ext4` or `cgroup2`.
        options: Options of its super block.
    """

    top: str
    point: str
    kind: str
    options: tuple[str, ...]


def read_mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """Read the mounts that this process sees, in their order: a later one hides earlier ones.

    Source: proc_pid_mountinfo(5): a mount's root and mount point; after ` - ` its type, source and
    options.
    """
    for line in read_or_empty(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        if not system:
            continue
        kind, *_, options = system.split()
        top, point = (_ESCAPED.sub(_unescape, text) for text in mount.split()[3:5])
        yield Mount(top, point, kind, tuple(options.split(",")))


def find_limits(
    root: Path, controller: str, *, unified: Sequence[str], legacy: Sequence[str]
) -> Iterator[Path]:
    """List the files of limits of this process's control groups and of those above them.

    Args:
        root: Folder that has `proc` and `sys`.
        controller: Controller, such as `memory`.
        unified: Names of the files in version 2.
        legacy: Names of the files in version 1.
    """
    groups = _groups(root)
    for mount in read_mounts(root):
        if mount.kind == "cgroup2" and "" in groups:
            path, names = groups[""], unified
        elif mount.kind == "cgroup" and controller in groups and controller in mount.options:
            path, names = groups[controller], legacy
        else:
            continue
        folder = mounted = root / mount.point.lstrip("/")
        if path.is_relative_to(mount.top):  # else a container sees its own group as the top
            folder = mounted / path.relative_to(mount.top)
        while folder.is_relative_to(mounted):
            yield from (folder / name for name in names)
            folder = folder.parent


def read_or_empty(path: Path) -> str:
    """Read a text; an empty one where the file is not there, or not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _groups(root: Path) -> dict[str, Path]:
    """Read the control group of each controller; that of version 2 is under an empty name."""
    groups: dict[str, Path] = {}
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), Path(path))
    return groups


def _unescape(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))
