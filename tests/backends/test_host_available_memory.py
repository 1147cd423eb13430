"""Available memory: the least that the machine and the control groups leave."""

from pathlib import Path

import pytest

from kvxfer.backends.host.available_memory import AvailableMemory

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = "9223372036854771712"
UNIFIED = "30 24 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
LEGACY = "31 24 0:27 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def make_root(root: Path, files: dict[str, str], *, group: str, mount: str) -> Path:
    """Make the files of a machine with 8 GiB of available memory."""
    files = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": f"3:cpu:/elsewhere\n{group}\n",
        "proc/self/mountinfo": f"24 1 0:23 / /sys rw - sysfs sysfs rw\n{mount}\n",
        **files,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_has_some() -> None:
    available = AvailableMemory.read()
    assert 0 < available.num_bytes < 1 << 50
    assert Path(available.limit).exists()


def test_without_a_control_group_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = make_root(tmp_path, {}, group="0::/", mount="")
    assert AvailableMemory.read(root) == (8 * GIB, "/proc/meminfo")


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
@pytest.mark.parametrize("limited", ["a", "a/b"])
def test_a_limit_of_any_group_above_counts(tmp_path: Path, limit: str, limited: str) -> None:
    groups = {
        f"sys/fs/cgroup/{group}/{name}": "max\n"
        for group in ("a", "a/b")
        for name in ("memory.max", "memory.high")
    }
    groups |= {
        f"sys/fs/cgroup/{limited}/{limit}": f"{GIB}\n",
        f"sys/fs/cgroup/{limited}/memory.current": f"{300 * MIB}\n",
        f"sys/fs/cgroup/{limited}/memory.stat": (
            f"anon 1\nactive_file {60 * MIB}\ninactive_file {40 * MIB}\n"
        ),
    }
    root = make_root(tmp_path, groups, group="0::/a/b", mount=UNIFIED.format(top="/"))
    assert AvailableMemory.read(root) == (824 * MIB, f"/sys/fs/cgroup/{limited}/{limit}")


def test_a_container_finds_the_limit_of_its_group_at_the_top(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": "0"}
    for name, group, top in (
        ("ns", "0::/", "/"),
        ("bind", "0::/docker/1", "/docker/1"),
        ("strange", "0::/docker/1", "/docker/2"),
    ):
        mount = UNIFIED.format(top=top)
        root = make_root(tmp_path / name, limits, group=group, mount=mount)
        assert AvailableMemory.read(root) == (GIB, "/sys/fs/cgroup/memory.max"), name


def test_groups_of_version_1_count_with_what_they_use_in_all(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    groups = {
        f"{folder}/memory.limit_in_bytes": UNLIMITED,
        f"{folder}/pod/memory.limit_in_bytes": f"{GIB}",
        f"{folder}/pod/memory.usage_in_bytes": f"{300 * MIB}",
        f"{folder}/pod/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
        f"{folder}/pod/process/memory.limit_in_bytes": UNLIMITED,
    }
    mount = LEGACY.format(top="/")
    root = make_root(tmp_path, groups, group="8:memory:/pod/process", mount=mount)
    assert AvailableMemory.read(root) == (824 * MIB, f"/{folder}/pod/memory.limit_in_bytes")


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/a/memory.high": "10", "sys/fs/cgroup/a/memory.current": "11"}
    root = make_root(tmp_path, groups, group="0::/a", mount=UNIFIED.format(top="/"))
    assert AvailableMemory.read(root).num_bytes == 0


def test_a_group_whose_usage_is_not_told_is_limited_all_the_same(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/a/memory.max": f"{GIB}"}
    root = make_root(tmp_path, groups, group="0::/a", mount=UNIFIED.format(top="/"))
    assert AvailableMemory.read(root).num_bytes == GIB


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    mount = UNIFIED.format(top="/").replace("/sys/fs/cgroup", r"/my\040groups")
    root = make_root(tmp_path, {"my groups/memory.max": f"{GIB}"}, group="0::/", mount=mount)
    assert AvailableMemory.read(root) == (GIB, "/my groups/memory.max")
