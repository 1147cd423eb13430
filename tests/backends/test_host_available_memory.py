"""Available memory: in containers and in groups of version 1, too; the doctor tries the others."""

from pathlib import Path

import pytest

from kvxfer.backends.host.available_memory import AvailableMemory

GIB = 1 << 30
UNIFIED = "30 24 0:26 {top} {at} rw - cgroup2 cgroup2 rw,nsdelegate"
LEGACY = "31 24 0:27 {top} {at}/memory rw - cgroup cgroup rw,memory"
LIMITED = {"memory.max": f"{GIB}"}
POD = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/pod/memory.limit_in_bytes": f"{2 * GIB}",
    "memory/pod/memory.usage_in_bytes": f"{GIB + 7}",
    "memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
}


@pytest.mark.parametrize(
    ("group", "mount", "top", "at", "files", "limit"),
    [
        ("0::/", UNIFIED, "/", "groups", LIMITED, "memory.max"),
        ("0::/docker/1", UNIFIED, "/docker/1", "groups", LIMITED, "memory.max"),
        ("0::/docker/1", UNIFIED, "/docker/2", "groups", LIMITED, "memory.max"),
        ("0::/", UNIFIED, "/", "my groups", LIMITED, "memory.max"),
        ("8:memory:/pod/process", LEGACY, "/", "groups", POD, "memory/pod/memory.limit_in_bytes"),
    ],
    ids=["of a container", "bound", "strange", "with a space", "version 1"],
)
def test_the_limit_of_a_group_is_found(
    tmp_path: Path, group: str, mount: str, top: str, at: str, files: dict[str, str], limit: str
) -> None:
    mounted = mount.format(top=top, at=f"/{at}".replace(" ", r"\040"))
    files = {f"{at}/{name}": text for name, text in files.items()} | {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": f"3:cpu:/elsewhere\n{group}\n",
        "proc/self/mountinfo": f"24 1 0:23 / /sys rw - sysfs sysfs rw\n{mounted}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert AvailableMemory.read(tmp_path) == (GIB, f"/{at}/{limit}")
