"""Checks of packages: their releases, NIXL's plug-ins, and the driver of a GPU."""

import importlib.metadata
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvxfer import runtime
from kvxfer.backends.host.control_groups import read_or_empty
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.errors import BackendUnavailableError, DeviceUnavailableError
from kvxfer.integrations.vllm.common.plugin import CHOICE, CONNECTORS, NAME, why_not_loaded
from kvxfer.integrations.vllm.common.release import installed_version

DEVICES = Path("/dev")
DRIVER_VERSIONS = Path("/proc/driver/nvidia/version")
CPU_INFO = Path("/proc/cpuinfo")

FindVersion = Callable[[str], str]

_FLAGS = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON", "sse2": "SSE2"}

_WHY = {
    "nixl": "Blocks at peers go through sockets instead of the kernel or a network card.",
    "xxhash": "Releases before 4.0 hold the interpreter lock while they hash every byte of a "
    "block, and those before 4.1 do not use AVX2 and AVX-512.",
}
_OPTIONAL = frozenset({"nixl"})


def check_packages(find_version: FindVersion = importlib.metadata.version) -> Iterator[Finding]:
    """Check the releases of the packages that kvxfer needs, by its own metadata.

    Args:
        find_version: Finds the version of an installed package.
    """
    requirements = _requirements("")
    if not requirements:
        found, why = "runs from a folder, and is not installed", "What it needs was not examined."
        yield Examined(Check.PACKAGE, "kvxfer").warning(found, why=why, mend="pip install -e .")
    for requirement in requirements:
        name, wanted = _split(requirement)
        at = Examined(Check.PACKAGE, name)
        why = _WHY.get(name, "kvxfer is not tested with it.")
        mend = f"pip install '{name}{wanted}'"
        try:
            version = find_version(name)
        except importlib.metadata.PackageNotFoundError:
            make = at.warning if name in _OPTIONAL else at.error
            yield make("is not installed", why=why, mend=mend)
            continue
        if is_within(version, wanted):
            yield at.ok(f"{version}{_vector_units(name)}")
        else:
            yield at.error(f"{version}, expected {wanted}", why=why, mend=mend)


def check_vllm(find_version: Callable[[], str] = installed_version) -> Finding:
    """Check that the installed release of vLLM, if any, is one that is supported."""
    at = Examined(Check.VLLM, "package")
    version = find_version()
    _, wanted = _split([*_requirements("vllm"), "vllm"][0])
    if not version[:1].isdigit():
        return at.ok("not installed here")
    if is_within(version, wanted):
        return at.ok(version)
    return at.error(
        f"{version}, expected {wanted}",
        why="The interface of connectors changes with each release: the engine does not start, or "
        "not with kvxfer.",
        mend=f"pip install 'vllm{wanted}'",
    )


def check_plugin(
    environ: Mapping[str, str] = os.environ, find_version: Callable[[], str] = installed_version
) -> Finding:
    """Check that vLLM, if any, loads the plug-in by which configurations name the connectors."""
    at = Examined(Check.VLLM_PLUGIN, "package")
    if not find_version()[:1].isdigit():
        return at.ok("vLLM is not installed here")
    why = why_not_loaded(environ)
    if not why:
        return at.ok(f"vLLM knows {' and '.join(CONNECTORS)}")
    chosen = environ.get(CHOICE)
    names = ",".join(filter(None, [chosen, NAME]))
    return at.error(
        why,
        why=f"An engine whose configuration names {' or '.join(CONNECTORS)} without "
        "kv_connector_module_path does not start: 'Unsupported connector type'.",
        mend="pip install --force-reinstall --no-deps kvxfer"
        if chosen is None
        else f"export {CHOICE}={shlex.quote(names)}",
    )


def check_nixl(make_agent: Callable[[], NixlAgent] = NixlAgent) -> Finding:
    """Check that NIXL opens, with its plug-in that moves bytes between processes."""
    at = Examined(Check.NIXL, "package")
    try:
        agent = make_agent()
    except BackendUnavailableError as exc:
        return at.warning(str(exc), why=_WHY["nixl"], mend="pip install --force-reinstall nixl")
    try:
        return at.ok(f"opens, with plug-ins {', '.join(agent.plugins)}")
    finally:
        runtime.run(agent.aclose())


def check_cuda(
    devices: Path = DEVICES,
    open_driver: Callable[[int], CudaDriver] = CudaDriver,
    versions: Path = DRIVER_VERSIONS,
) -> Finding:
    """Check that the driver of a GPU, where there is one, can be used, and copies in batches.

    Args:
        devices: Folder with the devices of GPUs.
        open_driver: Opens the driver of a GPU.
        versions: File with the release of the driver.
    """
    at = Examined(Check.CUDA, "driver")
    if not any(devices.glob("nvidia[0-9]*")):
        return at.ok("no GPU here")
    try:
        driver = open_driver(0)
    except DeviceUnavailableError as exc:
        return at.error(
            str(exc),
            why="Caches of a GPU cannot be copied: the engine does not start with kvxfer.",
            mend="pip install 'kvxfer[cuda]'  # and a driver of CUDA 12.8 or later",
        )
    release = _release_of_driver(versions)
    if driver.has_batch:
        return at.ok(f"{release} opens, and copies batches")
    return at.warning(
        f"{release} has no cuMemcpyBatchAsync",
        why="Each fragment of a block is copied by a call of its own, several times slower.",
        mend="install a driver of CUDA 12.8 or later",
    )


def _release_of_driver(versions: Path) -> str:
    """Read the release that the kernel has loaded, in `NVRM version: ... Kernel Module  570.86`."""
    found = re.search(r"\b\d{3,}\.[\d.]+\d", read_or_empty(versions))
    return f"release {found[0]}" if found else "a driver of an unknown release"


def _requirements(extra: str) -> Sequence[str]:
    """List the packages that kvxfer requires, or one of its extras; none where it says nothing."""
    try:
        found = importlib.metadata.requires("kvxfer") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    marker = f'extra == "{extra}"' if extra else ""
    quoted = [each.replace("'", '"') for each in found]
    return [each for each in quoted if (marker in each if extra else "extra ==" not in each)]


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


def _vector_units(name: str) -> str:
    """Say which of a processor's vector units xxhash chooses when it is imported."""
    if name != "xxhash":
        return ""
    found = set(re.findall(r"\w+", CPU_INFO.read_text()))
    unit = next((unit for flag, unit in _FLAGS.items() if flag in found), "none")
    return f", vector unit {unit}"
