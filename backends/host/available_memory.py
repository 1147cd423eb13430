"""Available memory within the limits of the machine and of this process's control groups."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from kvxfer.errors import CapacityError

UNIFIED = ("memory.max", "memory.high")
LEGACY = ("memory.limit_in_bytes",)

_USAGES = {
    "memory.max": ("memory.current", "active_file", "inactive_file"),
    "memory.high": ("memory.current", "active_file", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}
"""For each limit, the file with the group's usage, and the fields of `memory.stat` that count the
part of it that the kernel can drop.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, Memory Interface Files, and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class AvailableMemory(NamedTuple):
    """Memory that this process can still take before it is killed or slowed down.

    The page cache, which the kernel can drop, counts as available. `limit` is the file of the
    tightest limit.
    """

    num_bytes: int
    limit: str

    @classmethod
    def read(cls, root: Path = Path("/")) -> Self:
        """Read the limits of the machine and of every control group that this process is in."""
        found = [cls(_machine_bytes(root / "proc/meminfo"), "/proc/meminfo")]
        for path in find_limits(root, "memory", unified=UNIFIED, legacy=LEGACY):
            left = _group_bytes(path)
            if left is not None:
                found.append(cls(left, f"/{path.relative_to(root)}"))
        return min(found)


def require_memory(num_bytes: int, what: str = "memory") -> None:
    """Check that `num_bytes` are available; the `CapacityError` names the file of the limit."""
    available = AvailableMemory.read()
    if num_bytes > available.num_bytes:
        resource = f"{what} within the limit of {available.limit}"
        raise CapacityError(resource, num_bytes, available.num_bytes)


def _machine_bytes(path: Path) -> int:
    """Read how much memory the machine has left. Source: proc_meminfo(5), MemAvailable."""
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} does not say how much memory is available")


def _group_bytes(limit: Path) -> int | None:
    """Compute how many bytes a limit leaves to a control group; None if there is no limit."""
    usage, *files = _USAGES[limit.name]
    bound = read_or_empty(limit).strip()
    if not bound.isdigit():  # missing, or `max`
        return None
    used = int(read_or_empty(limit.with_name(usage)) or 0)
    counts = dict(
        line.split() for line in read_or_empty(limit.with_name("memory.stat")).splitlines()
    )
    used -= sum(int(counts.get(name, 0)) for name in files)
    return max(0, int(bound) - max(0, used))


class Mount(NamedTuple):
    """Mount of a file system: its folder `top` appears at the folder `point`.

    `kind` is the type, such as `ext4` or `cgroup2`; `options` are those of the super block.
    """

    top: str
    point: str
    kind: str
    options: tuple[str, ...]


def read_mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """Read the mounts that this process sees, in order: a later one hides earlier ones.

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
    """List the limit files of this process's control groups and of those above them.

    The files are named `unified` in version 2 of control groups, and `legacy` in version 1. `root`
    is the folder with `proc` and `sys`.
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
    """Read a text file; return an empty text if it is missing or cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _groups(root: Path) -> dict[str, Path]:
    """Read the control group of each controller; that of version 2 has an empty name."""
    groups: dict[str, Path] = {}
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), Path(path))
    return groups


def _unescape(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))
