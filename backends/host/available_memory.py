"""Available memory: what the machine and the control groups of this process leave."""

from pathlib import Path
from typing import NamedTuple, Self

from kvxfer.backends.host.control_groups import find_limits, read_or_empty
from kvxfer.errors import CapacityError

UNIFIED = ("memory.max", "memory.high")
LEGACY = ("memory.limit_in_bytes",)

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
        for path in find_limits(root, "memory", unified=UNIFIED, legacy=LEGACY):
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
    bound = read_or_empty(limit).strip()
    if not bound.isdigit():  # missing, or `max`
        return None
    used = int(read_or_empty(limit.with_name(usage)) or 0)
    counts = dict(
        line.split() for line in read_or_empty(limit.with_name("memory.stat")).splitlines()
    )
    used -= sum(int(counts.get(name, 0)) for name in files)
    return max(0, int(bound) - max(0, used))
