"""Available memory: what the machine and the control groups of this process leave."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from kvxfer.errors import CapacityError

_USAGES = {
    "memory.max": ("memory.current", "active_file", "inactive_file"),
    "memory.high": ("memory.current", "active_file", "inactive_file"),
    "memory.limit_in_bytes": (
        "memory.usage_in_bytes",
        "total_active_file",
        "total_inactive_file",
    ),
}
"""For each limit the file with what the group uses, and the fields of `memory.stat` that count
what the kernel can drop of it.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, Memory Interface Files, and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

_ESCAPED = re.compile(r"\\([0-7]{3})")


class AvailableMemory(NamedTuple):
    """Memory that this process can still take before it is killed or slowed down.

    Attributes:
        num_bytes: Bytes; pages of files, which the kernel can drop, count as available.
        limit: File of the limit that leaves no more.
    """

    num_bytes: int
    limit: str

    @classmethod
    def read(cls, root: Path = Path("/")) -> Self:
        """Read the limits of the machine and of every control group that this process is in.

        Args:
            root: Folder that has `proc` and `sys`.

        Raises:
            OSError: The kernel does not say how much memory the machine has.
        """
        found = [cls(_machine_bytes(root / "proc/meminfo"), "/proc/meminfo")]
        for path in _limits(root):
            left = _group_bytes(path)
            if left is not None:
                found.append(cls(left, f"/{path.relative_to(root)}"))
        return min(found)


def require_memory(num_bytes: int, what: str = "memory") -> None:
    """Check that so much memory is available.

    Args:
        num_bytes: Bytes that are needed.
        what: Their use, for the error.

    Raises:
        CapacityError: There is less; names the file of the limit.
    """
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
    """Compute what a limit leaves to the processes of a control group; None without a limit."""
    usage, *files = _USAGES[limit.name]
    bound = _read(limit).strip()
    if not bound.isdigit():  # missing, or `max`
        return None
    used = int(_read(limit.with_name(usage)) or 0)
    counts = dict(line.split() for line in _read(limit.with_name("memory.stat")).splitlines())
    used -= sum(int(counts.get(name, 0)) for name in files)
    return max(0, int(bound) - max(0, used))


def _limits(root: Path) -> Iterator[Path]:
    """List the files of limits of this process's control groups, of both versions.

    Source: proc_pid_mountinfo(5): a mount's root and mount point; after ` - ` its type, source and
    options.
    """
    groups = _groups(root)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, *_, options = system.split() or ("", "")
        if kind == "cgroup2" and "" in groups:
            path, names = groups[""], ["memory.max", "memory.high"]
        elif kind == "cgroup" and "memory" in groups and "memory" in options.split(","):
            path, names = groups["memory"], ["memory.limit_in_bytes"]
        else:
            continue
        top, at = (_ESCAPED.sub(_unescape, text) for text in mount.split()[3:5])
        folder = mounted = root / at.lstrip("/")
        if path.is_relative_to(top):  # else a container sees its own group as the top
            folder = mounted / path.relative_to(top)
        while folder.is_relative_to(mounted):
            yield from (folder / name for name in names)
            folder = folder.parent


def _groups(root: Path) -> dict[str, Path]:
    """Read the control group of each controller; that of version 2 is under an empty name."""
    groups: dict[str, Path] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), Path(path))
    return groups


def _unescape(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))


def _read(path: Path) -> str:
    """Read a text; an empty one where the file is not there, or not for us."""
    try:
        return path.read_text()
    except OSError:
        return ""
