"""Checks of a machine: they name each planted fault, and nothing that is sound."""

import importlib.metadata
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvxfer import runtime
from kvxfer.doctor import Check, Finding, Severity, error, ok, run_checks, warning
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
from kvxfer.units import Duration
from tests.backends.file_store import mounted
from tests.doctor.findings import ERROR, OK, WARNING, expect, make_root

GIB = 1 << 30
NUM_CPUS = len(os.sched_getaffinity(0))
UNSET: dict[str, str] = {}
TEXT = {"PYTHONHASHSEED": "random"}
EMPTY = {"PYTHONHASHSEED": ""}
SET = {"PYTHONHASHSEED": "42"}
UNSET_IT = "^unset PYTHONHASHSEED  # in all engines"
SET_IT = "(?m)^export PYTHONHASHSEED=0  # in all engines$"


@pytest.mark.parametrize(
    ("environ", "version", "hash_name", "severity", "words"),
    [
        (UNSET, "0.26.0", "sha256", ERROR, ["is not set", SET_IT]),
        (TEXT, "0.32.0", "xxhash", ERROR, ["is 'random'", SET_IT]),
        (TEXT, "0.32.0", "sha256", ERROR, ["is 'random'", f"(?m){UNSET_IT}"]),
        (UNSET, "0.29.0", "sha256", OK, ["nor may any engine set it: with sha256, vLLM 0.29.0"]),
        ({"PYTHONHASHSEED": "²"}, "0.32.0", "xxhash", ERROR, ["is '²'", SET_IT]),
        (SET, "0.32.0", "sha256", OK, ["is not set has other keys, with vLLM 0.32.0"]),
    ],
)
def test_a_seed_is_sound_where_it_can_be_the_same_everywhere(
    environ: dict[str, str], version: str, hash_name: str, severity: Severity, words: list[str]
) -> None:
    finding = check_hash_seed(environ, find_version=lambda: version, hash_name=hash_name)
    expect(finding, severity, *words)


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


def limited(locked: str) -> dict[str, str]:
    """Files of a process with a limit of locked memory, on a machine with a card."""
    return {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit\n"
        f"Max locked memory         {locked}              {locked}              bytes\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
        "card/mlx5_0/ports/1/state": "4: ACTIVE\n",
    }


def grouped(**files: str) -> dict[str, str]:
    """Files of a process in the control group `a`."""
    folder = "sys/fs/cgroup"
    return {
        "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/status": "Cpus_allowed_list:\t4-5,7-999\n",
        "proc/self/cgroup": "0::/a\n5:cpu,cpuacct:/a\n",
        "proc/self/mountinfo": f"30 24 0:26 / /{folder} rw - cgroup2 cgroup2 rw,nsdelegate\n",
        **{f"{folder}/{name.replace('__', '/')}": text for name, text in files.items()},
    }


def quota(num_cpus: float) -> str:
    return f"{int(num_cpus * 100000)}"


def locks(num_bytes: int, ports: str = "card") -> Callable[[Path], Finding]:
    return lambda root: check_locked_memory(num_bytes, root=root, ports=root / ports)


def needs(num_bytes: int) -> Callable[[Path], Finding]:
    return lambda root: check_memory(num_bytes, root=root)


def runs(num_threads: object) -> Callable[[Path], Finding]:
    return lambda root: check_cpus(root, {"OMP_NUM_THREADS": str(num_threads)})


SHORT = quota(NUM_CPUS - 0.5)
IN_2 = {"a__cpu.max": f"{SHORT} 100000\n"}
ENOUGH = {"a__cpu.max": f"{quota(NUM_CPUS)} 100000\n"}
FULL = {"a__memory.max": f"{2 * GIB}\n", "a__memory.current": f"{GIB}\n"}
NO_ROOM = FULL | {"a__memory.current": f"{2 * GIB - 4096}\n"}
FIRST_CPUS = f"taskset -c {','.join(map(str, [4, 5, *range(7, 999)][: max(1, NUM_CPUS - 1)]))} vllm"
BY_GROUP = "1.0 GiB available by /sys/fs/cgroup/a/memory.max"


@pytest.mark.parametrize(
    ("check", "files", "severity", "words"),
    [
        (locks(GIB, "none"), limited("65536"), OK, []),
        (locks(GIB), limited("65536"), WARNING, ["64.0 KiB"]),
        (locks(GIB), limited("unlimited") | {"proc/self/status": ""}, OK, ["unlimited"]),
        (check_cpus, grouped(**IN_2), WARNING, [f"quota of {NUM_CPUS - 0.5:g}", FIRST_CPUS]),
        (runs("²"), grouped(**ENOUGH), OK, []),
        (runs(NUM_CPUS), grouped(**ENOUGH), OK, []),
        (runs(NUM_CPUS + 1), grouped(**ENOUGH), WARNING, []),
        (needs(GIB), grouped(**FULL), OK, [BY_GROUP]),
        (needs(GIB + 1), grouped(**FULL), ERROR, [BY_GROUP, "(?m)^capacity=1024MiB"]),
        (needs(0), grouped(**NO_ROOM), ERROR, []),  # staging memory does not fit
    ],
)
def test_a_limit_that_is_too_low_is_named(
    tmp_path: Path,
    check: Callable[[Path], Finding],
    files: dict[str, str],
    severity: Severity,
    words: list[str],
) -> None:
    expect(check(make_root(tmp_path, files)), severity, *words)


def test_shared_memory_of_a_container_or_less_than_asked_for_is_named(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs") as folder:
        words = "the default of a container", "--shm-size"
        expect(check_shared_memory(folder=folder), WARNING, *words)
    with mounted("-t", "tmpfs", "-o", "size=128m", "tmpfs") as folder:
        expect(check_shared_memory(folder=folder), OK)
        expect(check_shared_memory(128 << 20, folder=folder), OK)
        words = "1.0 GiB needed", "--shm-size=16g"
        expect(check_shared_memory(GIB, folder=folder), WARNING, *words)
        expect(check_shared_memory(64 * GIB, folder=folder), WARNING, "--shm-size=65g")
    with mounted("-t", "tmpfs", "-o", "size=0", "tmpfs") as folder:  # podman's --shm-size=0
        expect(check_shared_memory(64 * GIB, folder=folder), OK, "no limit")
    expect(check_shared_memory(folder=tmp_path / "gone"), ERROR)


@pytest.mark.parametrize(
    ("name", "version", "severity"),
    [("xxhash", "4.0.9", ERROR), ("nixl", None, WARNING), ("nixl", "1.4.2", ERROR)],
)
def test_a_package_that_is_missing_or_of_another_release_is_named_alone(
    name: str, version: str | None, severity: Severity
) -> None:
    def find_version(package: str) -> str:
        if package != name:
            return importlib.metadata.version(package)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    for finding in check_packages(find_version):
        is_it = finding.subject == name
        mend = [f"(?m)^pip install '{name}>="] if is_it and severity is not OK else []
        expect(finding, severity if is_it else OK, *mend)


@pytest.mark.parametrize(("version", "severity"), [("0.33.2+cpu", OK), ("0.34.0", ERROR)])
def test_another_release_of_vllm_is_named(version: str, severity: Severity) -> None:
    expect(check_vllm(lambda: version), severity)


def test_a_gpu_whose_driver_cannot_be_used_is_named(tmp_path: Path) -> None:
    expect(check_cuda(tmp_path), OK)
    (tmp_path / "nvidia0").touch()
    versions = tmp_path / "version"
    versions.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    for has_batch, severity in ((True, OK), (False, WARNING)):
        driver = mock.Mock(return_value=mock.Mock(has_batch=has_batch))
        finding = check_cuda(tmp_path, driver, versions)
        expect(finding, severity, "release 550.54.15")
    if not Path("/dev/nvidia0").exists():
        expect(check_cuda(tmp_path), ERROR, "cuda:0")


@pytest.mark.parametrize(("chosen", "mend"), [("other", "other,kvxfer"), ("a b", "'a b,kvxfer'")])
def test_a_choice_of_plug_ins_without_ours_is_named(chosen: str, mend: str) -> None:
    environ = {"VLLM_PLUGINS": chosen}
    finding = check_plugin(environ, find_version=lambda: "0.32.0")
    found = f"^VLLM_PLUGINS is {chosen!r}, without 'kvxfer'\n"
    expect(finding, ERROR, found, f"(?m)^export VLLM_PLUGINS={mend}$")
    expect(check_plugin(environ, find_version=lambda: "(not installed)"), OK)


def test_what_hangs_or_fails_is_a_finding_and_the_worst_is_first() -> None:
    may_end = threading.Event()

    def hang() -> Finding:
        may_end.wait(60)
        return ok("late")

    def fail() -> Finding:
        raise RuntimeError("broken\x1b[2J")

    told = {"why": "w", "mend": "m"}
    several = [ok("a"), warning("b", **told), error("c", **told), error("d", **told)]
    runs: list[Any] = [lambda: iter(several), hang, fail]
    findings = run_checks([Check("nixl", "it", each) for each in runs], timeout_s=1.0)
    may_end.set()
    assert {(each.check, each.subject) for each in findings} == {("nixl", "it")}
    *errors, second, last = findings
    assert [each.found for each in errors[:2]] == ["c", "d"]
    expect(errors[2], ERROR, "does not answer within 1 s")
    expect(errors[3], ERROR, r"^cannot be examined: RuntimeError: broken\\x1b\[2J")
    assert [second.found, last.found] == ["b", "a"]


@pytest.mark.parametrize("timeout_s", [0.1, 1440.0, 86400.0])
def test_a_timeout_that_is_proposed_is_one_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    monkeypatch.setattr(runtime, "result", mock.Mock(side_effect=TimeoutError))
    (late,) = run_checks([Check("peer", "it", list, 6)], timeout_s=timeout_s)
    proposed = late.mend.partition("--timeout ")[2].partition(" ")[0]
    assert timeout_s <= Duration.parse(proposed, maximum_s=86400.0)
