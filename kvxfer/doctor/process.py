"""Checks of this process: its environment, its limits, and the CPUs that it may use."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvxfer.backends.host.control_groups import find_limits, read_or_empty
from kvxfer.backends.nixl import has_active_port
from kvxfer.copy_engine.cpu import MAX_THREADS
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.doctor.packages import is_within
from kvxfer.engine_side.vllm_keys import (
    DEFAULT_HASH,
    DEFAULT_SEED_SINCE,
    HASHES_WITH_DEFAULT_SEED,
    SEED_VARIABLE,
)
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.units import format_size

ROOT = Path("/")
PORTS = Path("/sys/class/infiniband")

MIN_OPEN_FILES = 1024
"""Files that io_uring has in flight, 512, and as many for peers, workers and the engine."""

CAP_IPC_LOCK = 14
"""Source: Linux, include/uapi/linux/capability.h; with it the limit on locked memory is ignored."""

_MISSED = (
    "vLLM makes the keys of blocks from it. Where it is not the same in all engines, none of them "
    "finds a block of another one, or its own after a restart: no hits, and no error."
)

_SET = f"export {SEED_VARIABLE}=0  # in all engines"


def check_hash_seed(
    environ: Mapping[str, str] = os.environ,
    *,
    find_version: Callable[[], str] = installed_version,
    hash_name: str = DEFAULT_HASH,
) -> Finding:
    """Check that vLLM makes the same keys in every engine, by its release and its hash.

    Args:
        environ: Environment of the engine.
        find_version: Finds the release of vLLM that is installed.
        hash_name: The engine's `--prefix-caching-hash-algo`.
    """
    at = Examined(Check.HASH_SEED, "environment")
    seed, version = environ.get(SEED_VARIABLE), find_version()
    has_default = is_within(version, f">={DEFAULT_SEED_SINCE}")
    has_default &= hash_name in HASHES_WITH_DEFAULT_SEED
    others = f"; where {SEED_VARIABLE} is not set, vLLM {version} has other keys"
    if seed is not None and seed.isdigit():
        found = f"{SEED_VARIABLE}={seed}, which has to be the same in all engines"
        return at.ok(found + others * has_default)
    if seed is not None:
        mend = f"unset {SEED_VARIABLE}  # in all engines" if has_default else _SET
        why = "vLLM takes the text as the seed of its keys, and not as Python means it: engines "
        why += "with another text, or none, find no block of this one. No hits, and no error."
        return at.error(f"{SEED_VARIABLE} is {seed!r}", why=why, mend=mend)
    if not version[:1].isdigit():
        return at.ok(f"{SEED_VARIABLE} is not set, and vLLM is not installed here")
    if has_default:
        found = f"{SEED_VARIABLE} is not set, and has to be in no engine: with {hash_name}, vLLM "
        return at.ok(f"{found}{version} has one seed for all")
    found = f"{SEED_VARIABLE} is not set: with {hash_name}, every process of vLLM {version} "
    return at.error(f"{found}has a random seed", why=_MISSED, mend=_SET)


def check_open_files(root: Path = ROOT) -> Finding:
    """Check the limit on open files."""
    at = Examined(Check.OPEN_FILES, "limits")
    limit = _read_limit(root, "Max open files")
    if limit >= MIN_OPEN_FILES:
        return at.ok(f"{_count(limit)} open files")
    return at.warning(
        f"at most {_count(limit)} open files",
        why=f"Blocks of a batch are files, and peers are connections. With less than "
        f"{MIN_OPEN_FILES}, stores fail when many are under way: 'Too many open files'.",
        mend="ulimit -n 65535",
    )


def check_locked_memory(
    needed_bytes: int = 0, *, root: Path = ROOT, ports: Path = PORTS
) -> Finding:
    """Check the limit on locked memory, which counts where a network card reads it.

    Args:
        needed_bytes: Bytes of host memory that are asked for; 0 where it is not known.
        root: Folder that has `proc`.
        ports: Folder with the ports that can do RDMA.
    """
    at = Examined(Check.LOCKED_MEMORY, "limits")
    limit = _read_limit(root, "Max locked memory")
    shown = "unlimited" if limit == math.inf else format_size(int(limit))
    if not has_active_port(ports):
        return at.ok(f"{shown}; no network card here reads memory")
    if limit == math.inf or 0 < needed_bytes <= limit or _may_lock(root):
        return at.ok(f"{shown}, for a network card that reads memory")
    return at.warning(
        f"at most {shown} of locked memory, and a network card that reads memory",
        why="Memory that a network card reads is locked. Beyond the limit NIXL cannot register "
        "it, and blocks go through sockets, several times slower.",
        mend="ulimit -l unlimited",
    )


def check_cpus(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Finding:
    """Check that the quota of the control groups has the time of as many CPUs as threads use."""
    at = Examined(Check.CPUS, "control groups")
    num_cpus = len(os.sched_getaffinity(0))
    quotas = [quota for quota in map(_read_quota, _quota_files(root)) if quota is not None]
    if not quotas:
        return at.ok(f"{num_cpus} CPUs, no quota")
    quota = min(quotas)
    text = environ.get("OMP_NUM_THREADS", "")
    num_threads = max(min(MAX_THREADS, num_cpus), int(text) if text.isdigit() else num_cpus)
    if quota >= num_threads:
        return at.ok(f"{num_cpus} CPUs, a quota of {quota:g}")
    last = max(1, math.floor(quota)) - 1
    return at.warning(
        f"{num_cpus} CPUs, and a quota of {quota:g} of them",
        why="Engine and copies start a thread for each CPU that they see. The kernel stops all of "
        "them for the rest of each 100 ms in which the quota is used up.",
        mend=f"taskset -c 0-{last} vllm serve ...",
    )


def _read_limit(root: Path, name: str) -> float:
    """Read the soft limit of this process. Source: proc_pid_limits(5).

    Raises:
        OSError: The kernel does not say it.
    """
    for line in (root / "proc/self/limits").read_text().splitlines():
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            return math.inf if soft == "unlimited" else int(soft)
    raise OSError(f"/proc/self/limits has no {name!r}")


def _count(limit: float) -> str:
    return "unlimited" if limit == math.inf else f"{limit:.0f}"


def _may_lock(root: Path) -> bool:
    for line in read_or_empty(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def _quota_files(root: Path) -> list[Path]:
    return [*find_limits(root, "cpu", unified=["cpu.max"], legacy=["cpu.cfs_quota_us"])]


def _read_quota(path: Path) -> float | None:
    """Read a quota in CPUs; None without one.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, `cpu.max`, and
    https://docs.kernel.org/scheduler/sched-bwc.html.
    """
    quota, *period = read_or_empty(path).split() or ["max"]
    if path.name == "cpu.cfs_quota_us":
        period = read_or_empty(path.with_name("cpu.cfs_period_us")).split()
    if not (quota.isdigit() and period):  # `max`, or -1
        return None
    return int(quota) / int(period[0])
