"""Checks of a machine: each planted fault is named, and nothing else is."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest

from kvxfer.doctor import Finding, Result, Severity
from kvxfer.doctor.machine import (
    check_cpus,
    check_cuda,
    check_hash_seed,
    check_locked_memory,
    check_memory,
    check_packages,
    check_plugin,
    check_shared_memory,
    check_vllm,
)
from tests.backends.file_store import mounted

GIB = 1 << 30
NUM_CPUS = len(os.sched_getaffinity(0))
UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
LEGACY = "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def make_root(root: Path, files: dict[str, str]) -> Path:
    """Make the files of a machine."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def is_complete(finding: Finding | Result) -> bool:
    """Whether a finding that is bad says what it costs and what mends it, and another one not."""
    explained = bool(finding.why and finding.mend)
    return bool(finding.found) and explained == (finding.severity is not Severity.OK)


UNSET: dict[str, str] = {}
TEXT = {"PYTHONHASHSEED": "random"}
EMPTY = {"PYTHONHASHSEED": ""}
SET = "export PYTHONHASHSEED=0  # in all engines"
UNSET_IT = "unset PYTHONHASHSEED  # in all engines"


@pytest.mark.parametrize(
    ("environ", "version", "hash_name", "expected", "mend"),
    [
        (UNSET, "0.26.0", "sha256", "is not set", SET),
        (UNSET, "0.28.0", "sha256_cbor", "is not set", SET),
        (UNSET, "0.28.0", "xxhash", "is not set", SET),
        (UNSET, "0.29.0", "xxhash", "with xxhash, every process of vLLM 0.29.0", SET),
        (UNSET, "0.33.0", "xxhash_cbor", "has a random seed", SET),
        (EMPTY, "0.28.0", "sha256", "is ''", SET),
        (TEXT, "0.28.0", "sha256", "is 'random'", SET),
        (TEXT, "0.32.0", "xxhash", "is 'random'", SET),
        (TEXT, "0.32.0", "sha256", "is 'random'", UNSET_IT),
        (EMPTY, "0.32.0", "sha256", "is ''", UNSET_IT),
    ],
)
def test_a_seed_that_is_not_the_same_everywhere_is_named(
    environ: dict[str, str], version: str, hash_name: str, expected: str, mend: str
) -> None:
    finding = check_hash_seed(environ, find_version=lambda: version, hash_name=hash_name)
    assert finding.severity is Severity.ERROR
    assert is_complete(finding)
    assert expected in finding.found
    assert finding.mend == mend


@pytest.mark.parametrize(
    ("environ", "version", "hash_name", "expected"),
    [
        (UNSET, "0.29.0", "sha256", "has to be in no engine: with sha256, vLLM 0.29.0"),
        (UNSET, "0.33.1", "sha256_cbor", "one seed for all"),
        (UNSET, "(not installed)", "sha256", "vLLM is not installed here"),
        ({"PYTHONHASHSEED": "42"}, "0.28.0", "sha256", "=42, which has to be the same in all"),
        ({"PYTHONHASHSEED": "42"}, "0.32.0", "xxhash", "=42, which has to be the same in all"),
        ({"PYTHONHASHSEED": "0"}, "0.32.0", "sha256", "is not set, vLLM 0.32.0 has other keys"),
    ],
)
def test_a_seed_that_can_be_the_same_everywhere_is_sound(
    environ: dict[str, str], version: str, hash_name: str, expected: str
) -> None:
    finding = check_hash_seed(environ, find_version=lambda: version, hash_name=hash_name)
    assert finding.severity is Severity.OK
    assert is_complete(finding)
    assert expected in finding.found


@pytest.mark.parametrize("hash_name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("environ", [UNSET, EMPTY, TEXT, {"PYTHONHASHSEED": "7"}])
def test_the_installed_vllm_has_the_seeds_that_the_check_says(
    hash_name: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="needs vLLM")
    from vllm.utils.hashing import get_hash_fn_by_name

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None, raising=False)
    seeds = set()
    for _ in range(2):
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(hash_name))
        seeds.add(kv_cache_utils.NONE_HASH)
    finding = check_hash_seed(environ, hash_name=hash_name)
    is_random = len(seeds) == 2
    assert is_random == ("random seed" in finding.found)


def limits(files: str, locked: str) -> dict[str, str]:
    return {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit\n"
        f"Max locked memory         {locked}              {locked}              bytes\n"
        f"Max open files            {files}                 524288               files\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    }


def test_locked_memory_counts_where_a_network_card_reads_it(tmp_path: Path) -> None:
    ports = tmp_path / "infiniband"
    tiny = make_root(tmp_path / "tiny", limits("1024", "65536"))
    assert check_locked_memory(GIB, root=tiny, ports=ports).severity is Severity.OK
    make_root(ports, {"mlx5_0/ports/1/state": "4: ACTIVE\n"})
    finding = check_locked_memory(GIB, root=tiny, ports=ports)
    assert finding.severity is Severity.WARNING
    assert "64.0 KiB" in finding.found
    assert is_complete(finding)
    assert check_locked_memory(65536, root=tiny, ports=ports).severity is Severity.OK
    endless = make_root(tmp_path / "endless", limits("1024", "unlimited"))
    assert check_locked_memory(GIB, root=endless, ports=ports).severity is Severity.OK
    make_root(tiny, {"proc/self/status": "CapEff:\t0000000000004000\n"})
    assert check_locked_memory(GIB, root=tiny, ports=ports).severity is Severity.OK


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (UNIFIED, {"sys/fs/cgroup/a/cpu.max": "{quota} 100000\n"}),
        (
            UNIFIED,
            {
                "sys/fs/cgroup/a/cpu.max": "max 100000\n",
                "sys/fs/cgroup/cpu.max": "{quota} 100000\n",
            },
        ),
        (
            LEGACY,
            {
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "{quota}\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
        ),
    ],
    ids=["version 2", "a group above", "version 1"],
)
def test_a_quota_below_the_threads_is_named(
    tmp_path: Path, version: str, files: dict[str, str]
) -> None:
    def find(num_cpus: float, **environ: str) -> Result:
        quota = str(int(num_cpus * 100000))
        root = make_root(tmp_path, {
            "proc/self/cgroup": "0::/a\n5:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": version + "\n",
            **{name: text.format(quota=quota) for name, text in files.items()},
        })  # fmt: skip
        return check_cpus(root, environ)

    short = find(NUM_CPUS - 0.5)
    assert short.severity is Severity.WARNING
    assert f"quota of {NUM_CPUS - 0.5:g}" in short.found
    assert is_complete(short)
    assert find(NUM_CPUS).severity is Severity.OK
    assert find(NUM_CPUS, OMP_NUM_THREADS=str(NUM_CPUS + 1)).severity is Severity.WARNING


def test_memory_beyond_a_limit_is_named_with_the_file_of_the_limit(tmp_path: Path) -> None:
    root = make_root(tmp_path, {
        "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": UNIFIED + "\n",
        "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
    })  # fmt: skip
    for needed, severity in ((0, Severity.OK), (GIB, Severity.OK), (GIB + 1, Severity.ERROR)):
        finding = check_memory(needed, root=root)
        assert finding.severity is severity
        assert "1.0 GiB available by /sys/fs/cgroup/a/memory.max" in finding.found
        assert is_complete(finding)
    assert finding.mend.startswith("capacity=1024MiB")
    make_root(root, {"sys/fs/cgroup/a/memory.current": f"{2 * GIB - 4096}\n"})
    assert check_memory(root=root).severity is Severity.ERROR  # staging memory does not fit


def test_shared_memory_of_a_container_or_less_than_asked_for_is_named(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs") as folder:
        finding = check_shared_memory(folder=folder)
        assert finding.severity is Severity.WARNING
        assert "the default of a container" in finding.found
        assert "--shm-size" in finding.mend
    with mounted("-t", "tmpfs", "-o", "size=128m", "tmpfs") as folder:
        assert check_shared_memory(folder=folder).severity is Severity.OK
        assert check_shared_memory(128 << 20, folder=folder).severity is Severity.OK
        finding = check_shared_memory(GIB, folder=folder)
        assert finding.severity is Severity.WARNING
        assert "1.0 GiB needed" in finding.found
        assert "--shm-size=16g" in finding.mend
        assert "--shm-size=65g" in check_shared_memory(64 * GIB, folder=folder).mend
    assert check_shared_memory(folder=tmp_path / "gone").severity is Severity.ERROR


class Installed:
    """Installed packages, some of which are missing or of another version."""

    def __init__(self, **versions: str | None) -> None:
        self.versions = versions

    def __call__(self, name: str) -> str:
        if name not in self.versions:
            return importlib.metadata.version(name)
        version = self.versions[name]
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version


@pytest.mark.parametrize(
    ("name", "version", "severity"),
    [
        ("xxhash", None, Severity.ERROR),
        ("xxhash", "3.8.0", Severity.ERROR),
        ("xxhash", "4.0.9", Severity.ERROR),
        ("xxhash", "4.1.0", Severity.OK),
        ("xxhash", "10.0", Severity.OK),
        ("nixl", None, Severity.WARNING),
        ("nixl", "1.4.2", Severity.ERROR),
        ("nixl", "2.0.0", Severity.ERROR),
        ("nixl", "1.10.0rc1", Severity.OK),
    ],
)
def test_a_package_that_is_missing_or_of_another_release_is_named_alone(
    name: str, version: str | None, severity: Severity
) -> None:
    findings = list(check_packages(Installed(**{name: version})))
    (finding,) = [each for each in findings if each.subject == name]
    assert finding.severity is severity
    assert is_complete(finding)
    if severity is not Severity.OK:
        assert finding.mend.startswith(f"pip install '{name}>=")
    assert all(each.severity is Severity.OK for each in findings if each.subject != name)


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("(not installed)", Severity.OK),
        ("0.25.1", Severity.ERROR),
        ("0.26.0", Severity.OK),
        ("0.33.2+cpu", Severity.OK),
        ("0.34.0", Severity.ERROR),
        ("1.0.0", Severity.ERROR),
    ],
)
def test_another_release_of_vllm_is_named(version: str, severity: Severity) -> None:
    finding = check_vllm(lambda: version)
    assert finding.severity is severity
    assert is_complete(finding)


class Driver:
    """Driver that opens."""

    def __init__(self, *, has_batch: bool) -> None:
        self.has_batch = has_batch

    def __call__(self, index: int) -> Any:
        return self


def test_a_gpu_whose_driver_cannot_be_used_is_named(tmp_path: Path) -> None:
    assert check_cuda(tmp_path).severity is Severity.OK
    (tmp_path / "nvidia0").touch()
    versions = tmp_path / "version"
    versions.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    for has_batch, severity in ((True, Severity.OK), (False, Severity.WARNING)):
        finding = check_cuda(tmp_path, Driver(has_batch=has_batch), versions)
        assert "release 550.54.15" in finding.found
        assert finding.severity is severity
        assert is_complete(finding)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU")
def test_without_a_driver_the_error_of_cuda_is_shown(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    finding = check_cuda(tmp_path)
    assert finding.severity is Severity.ERROR
    assert "cuda:0" in finding.found


@pytest.mark.parametrize(
    ("chosen", "mend"), [("other", "other,kvxfer"), ("", "kvxfer"), ("a b", "'a b,kvxfer'")]
)
def test_a_choice_of_plug_ins_without_ours_is_named(chosen: str, mend: str) -> None:
    environ = {"VLLM_PLUGINS": chosen}
    finding = check_plugin(environ, find_version=lambda: "0.32.0")
    assert finding.severity is Severity.ERROR
    assert is_complete(finding)
    assert finding.found == f"VLLM_PLUGINS is {chosen!r}, without 'kvxfer'"
    assert finding.mend == f"export VLLM_PLUGINS={mend}"
    assert check_plugin(environ, find_version=lambda: "(not installed)").severity is Severity.OK


def test_an_installed_kvxfer_without_the_plug_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> Result:
        return check_plugin({}, find_version=lambda: "0.32.0")

    assert check().found == "vLLM knows KVXferOffload and KVXferConnector"
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints()
    )
    assert check().severity is Severity.ERROR
    assert is_complete(check())
    assert check().found == "the installed kvxfer has no entry point in vllm.general_plugins"
