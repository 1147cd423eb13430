"""Checks of a machine: memory, limits and CPUs of this process, and the packages it has.

`needed_bytes` is the memory that backends need, 0 if it is not known. Other arguments
name the things to examine: the environment, folders of the kernel, packages.
"""

import importlib.metadata
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.host.available_memory import AvailableMemory, find_limits, read_or_empty
from kvxfer.backends.host.memory import SHARED_MEMORY
from kvxfer.backends.nixl import has_active_port
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.copy_engine.cpu import MAX_THREADS
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.doctor.finding import Finding, capacity_of, error, ok, warning
from kvxfer.engine_side.vllm_keys import (
    DEFAULT_HASH,
    DEFAULT_SEED_SINCE,
    HASHES_WITH_DEFAULT_SEED,
    SEED_VARIABLE,
)
from kvxfer.errors import BackendUnavailableError, DeviceUnavailableError
from kvxfer.integrations.vllm.common.plugin import CHOICE, CONNECTORS, NAME, why_not_loaded
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.units import format_size

ROOT = Path("/")
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"

GIB = 1 << 30

LEAST_GIB = 16
"""Smallest size of /dev/shm that is proposed."""

CONTAINER_DEFAULT_BYTES = 64 << 20
"""Default size of /dev/shm in a container.

Source: https://docs.docker.com/reference/cli/docker/container/run/, `--shm-size`.
"""


def check_memory(needed_bytes: int = 0, *, root: Path = ROOT) -> Finding:
    """Check that the memory that backends need is available within all control groups."""
    available = AvailableMemory.read(root)
    shown = f"{format_size(available.num_bytes)} available by {available.limit}"
    needed = max(needed_bytes, DEFAULT_STAGING_BYTES)
    if needed <= available.num_bytes:
        return ok(shown)
    why = "Host memory is reserved when it is opened: an engine that asks for more does not start."
    mend = f"a larger limit in {available.limit}"
    mend = f"{capacity_of(available.num_bytes)}, or {mend}" if available.num_bytes else mend
    return error(f"{shown}, {format_size(needed)} needed", why=why, mend=mend)


def check_shared_memory(needed_bytes: int = 0, *, folder: Path = SHARED_MEMORY) -> Finding:
    """Check that /dev/shm has room for the host memory of an engine."""
    why = (
        "Under vLLM, host:// and the tiers below it keep blocks in shared memory: an engine whose "
        "capacity exceeds the free space does not start."
    )
    try:
        found = os.statvfs(folder)
    except OSError as exc:
        return error(f"{folder}: {exc.strerror}", why=why, mend=_enlarge(needed_bytes))
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if not size:
        return ok("has no limit of its own")
    shown = f"{format_size(free)} of {format_size(size)} free"
    mend = _enlarge(size - free + needed_bytes)
    if needed_bytes > free:
        return warning(f"{shown}, {format_size(needed_bytes)} needed", why=why, mend=mend)
    if size <= CONTAINER_DEFAULT_BYTES:
        return warning(f"{shown}: the default of a container", why=why, mend=mend)
    return ok(shown)


def check_huge_pages(root: Path = ROOT) -> Finding:
    """Check that transparent huge pages are not turned off."""
    chosen = re.search(r"\[(\w+)\]", read_or_empty(root / HUGE_PAGES))
    if chosen is None or chosen[1] != "never":
        return ok(chosen[1] if chosen else "this kernel has none")
    return warning(
        f"/{HUGE_PAGES} is never",
        why="The page table of host memory is 512 times as long: copying, hashing and sending are "
        "slower.",
        mend=f"echo madvise > /{HUGE_PAGES}",
    )


def _enlarge(num_bytes: int) -> str:
    """Say how to make room for some bytes in /dev/shm."""
    size = f"{max(num_bytes // GIB + 1, LEAST_GIB)}g"
    return f"docker run --shm-size={size} ...  # or: mount -o remount,size={size} /dev/shm"


PORTS = Path("/sys/class/infiniband")

MIN_OPEN_FILES = 1024
"""The 512 files that io_uring has in flight, and as many for peers, workers and the engine."""

CAP_IPC_LOCK = 14
"""Capability to lock memory without a limit. Source: Linux, include/uapi/linux/capability.h."""

_MISSED = (
    "vLLM makes the keys of blocks from it. Unless all engines have the same one, none finds a "
    "block of another, nor its own after a restart: no hits, and no error."
)

_SET = f"export {SEED_VARIABLE}=0  # in all engines"


def check_hash_seed(
    environ: Mapping[str, str] = os.environ,
    *,
    find_version: Callable[[], str] = installed_version,
    hash_name: str = DEFAULT_HASH,
) -> Finding:
    """Check that vLLM makes the same keys in every engine, given its release and its hash."""
    seed, version = environ.get(SEED_VARIABLE), find_version()
    has_default = is_within(version, f">={DEFAULT_SEED_SINCE}")
    has_default &= hash_name in HASHES_WITH_DEFAULT_SEED
    others = f"; an engine in which it is not set has other keys, with vLLM {version}"
    if seed is not None and seed.isdecimal():
        found = f"{SEED_VARIABLE}={seed}, which has to be the same in all engines"
        return ok(found + others * has_default)
    if seed is not None:
        mend = f"unset {SEED_VARIABLE}  # in all engines" if has_default else _SET
        why = "vLLM uses the text itself as the seed of its keys, unlike Python: engines with "
        why += "another text, or none, find no block of this one. No hits, and no error."
        return error(f"{SEED_VARIABLE} is {seed!r}", why=why, mend=mend)
    if not version[:1].isdigit():
        return ok(f"{SEED_VARIABLE} is not set, and vLLM is not installed here")
    if has_default:
        found = f"{SEED_VARIABLE} is not set, nor may any engine set it: with {hash_name}, vLLM "
        return ok(f"{found}{version} has one seed for all")
    found = f"{SEED_VARIABLE} is not set: with {hash_name}, every process of vLLM {version} "
    return error(f"{found}has a random seed", why=_MISSED, mend=_SET)


def check_open_files(root: Path = ROOT) -> Finding:
    """Check the limit on open files."""
    limit = _read_limit(root, "Max open files")
    shown = "unlimited" if limit == math.inf else f"{limit:.0f}"
    if limit >= MIN_OPEN_FILES:
        return ok(f"{shown} open files")
    return warning(
        f"at most {shown} open files",
        why=f"Each block of a batch is a file, each peer a connection. With fewer than "
        f"{MIN_OPEN_FILES}, stores fail when many run at once: 'Too many open files'.",
        mend="ulimit -n 65535",
    )


def check_locked_memory(
    needed_bytes: int = 0, *, root: Path = ROOT, ports: Path = PORTS
) -> Finding:
    """Check the limit on locked memory, which matters if a network card reads memory."""
    limit = _read_limit(root, "Max locked memory")
    shown = "unlimited" if limit == math.inf else format_size(int(limit))
    if not has_active_port(ports):
        return ok(f"{shown}; no network card here reads memory")
    is_enough = limit == math.inf or 0 < needed_bytes <= limit
    if is_enough or int(_read_own(root, "status", "CapEff:"), 16) >> CAP_IPC_LOCK & 1:
        return ok(f"{shown}, for a network card that reads memory")
    return warning(
        f"at most {shown} of locked memory, and a network card that reads memory",
        why="Memory that a network card reads is locked. Beyond the limit NIXL cannot register "
        "it, and blocks go through sockets, several times slower.",
        mend="ulimit -l unlimited",
    )


def check_cpus(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Finding:
    """Check that the CPU quota of the control groups suffices for the threads that are started."""
    num_cpus = runtime.num_cores()
    files = find_limits(root, "cpu", unified=["cpu.max"], legacy=["cpu.cfs_quota_us"])
    quotas = [quota for quota in map(_read_quota, files) if quota is not None]
    if not quotas:
        return ok(f"{num_cpus} CPUs, no quota")
    quota = min(quotas)
    text = environ.get("OMP_NUM_THREADS", "")
    num_threads = max(min(MAX_THREADS, num_cpus), int(text) if text.isdecimal() else num_cpus)
    if quota >= num_threads:
        return ok(f"{num_cpus} CPUs, a quota of {quota:g}")
    spans = re.findall(r"(\d+)-?(\d*)", _read_own(root, "status", "Cpus_allowed_list:"))
    allowed = [each for first, last in spans for each in range(int(first), int(last or first) + 1)]
    chosen = ",".join(map(str, allowed[: max(1, math.floor(quota))]))
    return warning(
        f"{num_cpus} CPUs, and a quota of {quota:g} of them",
        why="Engine and copies start a thread for each CPU that they see. Once the quota is used "
        "up, the kernel stops all of them for the rest of each 100 ms.",
        mend=f"taskset -c {chosen} vllm serve ...",
    )


def _read_own(root: Path, file: str, name: str) -> str:
    """Read a value of this process. Source: proc_pid_limits(5) and proc_pid_status(5)."""
    for line in (root / "proc/self" / file).read_text().splitlines():
        if line.startswith(name):
            return line.removeprefix(name).split()[0]
    raise OSError(f"/proc/self/{file} has no {name!r}")


def _read_limit(root: Path, name: str) -> float:
    soft = _read_own(root, "limits", name)
    return math.inf if soft == "unlimited" else int(soft)


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


DEVICES = Path("/dev")
DRIVER_VERSIONS = Path("/proc/driver/nvidia/version")

FindVersion = Callable[[str], str]

_WHY = {
    "nixl": "Blocks at peers go through sockets instead of the kernel or a network card.",
    "xxhash": "Releases before 4.0 hold the interpreter lock while they hash every byte of a "
    "block, and those before 4.1 do not use AVX2 and AVX-512.",
}


def check_packages(find_version: FindVersion = importlib.metadata.version) -> Iterator[Finding]:
    """Check the releases of the packages that kvxfer needs, by its own metadata."""
    requirements = _requirements("")
    if not requirements:
        found, why = "runs from a folder, and is not installed", "Its requirements are not checked."
        yield warning(found, why=why, mend="pip install -e .").of("package", "kvxfer")
    for name, wanted in map(_split, requirements):
        yield _check_package(name, wanted, find_version).of("package", name)


def _check_package(name: str, wanted: str, find_version: FindVersion) -> Finding:
    why, mend = _WHY.get(name, "kvxfer is not tested with it."), f"pip install '{name}{wanted}'"
    try:
        version = find_version(name)
    except importlib.metadata.PackageNotFoundError:
        make = warning if name == "nixl" else error  # sockets can replace it
        return make("is not installed", why=why, mend=mend)
    if is_within(version, wanted):
        return ok(version)
    return error(f"{version}, expected {wanted}", why=why, mend=mend)


def check_vllm(find_version: Callable[[], str] = installed_version) -> Finding:
    """Check that the installed release of vLLM, if any, is one that is supported."""
    version = find_version()
    _, wanted = _split([*_requirements("vllm"), "vllm"][0])
    if not version[:1].isdigit():
        return ok("not installed here")
    if is_within(version, wanted):
        return ok(version)
    return error(
        f"{version}, expected {wanted}",
        why="The interface of connectors changes with each release: the engine does not start, or "
        "does so without kvxfer.",
        mend=f"pip install 'vllm{wanted}'",
    )


def check_plugin(
    environ: Mapping[str, str] = os.environ, find_version: Callable[[], str] = installed_version
) -> Finding:
    """Check that vLLM, if installed, loads the plug-in that makes the connectors known by name."""
    if not find_version()[:1].isdigit():
        return ok("vLLM is not installed here")
    why = why_not_loaded(environ)
    if not why:
        return ok(f"vLLM knows {' and '.join(CONNECTORS)}")
    chosen = environ.get(CHOICE)
    names = ",".join(filter(None, [chosen, NAME]))
    return error(
        why,
        why=f"An engine whose configuration names {' or '.join(CONNECTORS)} without "
        "kv_connector_module_path does not start: 'Unsupported connector type'.",
        mend="pip install --force-reinstall --no-deps kvxfer"
        if chosen is None
        else f"export {CHOICE}={shlex.quote(names)}",
    )


def check_nixl(make_agent: Callable[[], NixlAgent] = NixlAgent) -> Finding:
    """Check that NIXL opens, with its plug-in that moves bytes between processes."""
    try:
        agent = make_agent()
    except BackendUnavailableError as exc:
        return warning(str(exc), why=_WHY["nixl"], mend="pip install --force-reinstall nixl")
    try:
        return ok(f"opens, with plug-ins {', '.join(agent.plugins)}")
    finally:
        runtime.run(agent.aclose())


def check_cuda(
    devices: Path = DEVICES,
    open_driver: Callable[[int], CudaDriver] = CudaDriver,
    versions: Path = DRIVER_VERSIONS,
) -> Finding:
    """Check that the driver, if there is a GPU, can be used and copies in batches."""
    if not any(devices.glob("nvidia[0-9]*")):
        return ok("no GPU here")
    try:
        driver = open_driver(0)
    except DeviceUnavailableError as exc:
        return error(
            str(exc),
            why="Caches of a GPU cannot be copied: the engine does not start with kvxfer.",
            mend="pip install 'kvxfer[cuda]'  # and a driver of CUDA 12.8 or later",
        )
    release = _release_of_driver(versions)
    if driver.has_batch:
        return ok(f"{release} opens, and copies batches")
    return warning(
        f"{release} has no cuMemcpyBatchAsync",
        why="Each fragment of a block is copied by its own call, which is several times slower.",
        mend="install a driver of CUDA 12.8 or later",
    )


def _release_of_driver(versions: Path) -> str:
    """Read the loaded release out of a line such as `NVRM version: ... Kernel Module  570.86`."""
    found = re.search(r"\b\d{3,}\.[\d.]+\d", read_or_empty(versions))
    return f"release {found[0]}" if found else "a driver of an unknown release"


def _requirements(extra: str) -> Sequence[str]:
    """List the requirements of kvxfer, or of one extra; none if kvxfer is not installed."""
    try:
        found = [each.replace("'", '"') for each in importlib.metadata.requires("kvxfer") or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    marker = f'extra == "{extra}"' if extra else ""
    return [each for each in found if (marker in each if extra else "extra ==" not in each)]


def _split(requirement: str) -> tuple[str, str]:
    """Split a requirement into name and range; the lower bound comes first."""
    parts = re.match(r"([\w.-]+)([^;]*)", requirement)
    assert parts is not None, "as the packages of a Python project are named"
    name, wanted = parts.groups()
    return name, ",".join(sorted(wanted.strip().split(","), reverse=True))


def is_within(version: str, wanted: str) -> bool:
    """Whether a release is within bounds such as `>=0.26,<0.34`."""
    found = _numbers(version)
    for bound in filter(None, wanted.split(",")):
        text = bound.lstrip("<>=")
        sign, limit = bound[: len(bound) - len(text)], _numbers(text)
        if not {">=": found >= limit, "<": found < limit}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Read the numbers that a version begins with: (4, 1) of `4.1rc2`."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()
