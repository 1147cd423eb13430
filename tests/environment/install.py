"""Installation of the packages of `constraints.txt`; the Makefile runs it, with any Python.

`python -m tests.environment.install VENV [demo]`: everything, or only the needs of `make demo`.
Says what the machine lacks before it downloads anything. Needs only Python.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import quietly

FIRST, LAST = (3, 11), (3, 13)
"""Versions of Python for which all pinned packages have wheels."""

CONSTRAINTS = Path("constraints.txt")
CUDA_LIBRARIES = Path("tests/environment/torch-cuda.txt")
DEMO_ENDS = "# What the tests need beside that."
LOGS = Path("build/log")
CPU_INDEX = os.environ.get("KVXFER_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
INDEX_TIMEOUT_S = 5
CUDA_DOWNLOAD = "2.7 GB to download, 6 GB on disk"
NUM_INSTALLERS = 2


class CannotInstallError(Exception):
    """Reason why the machine cannot have the environment, and what to do about it."""


def main(arguments: Sequence[str]) -> int:
    """Make the environment, or bring it up to date; 1 when the machine or an installer cannot."""
    venv, what = Path(arguments[0]), [*arguments[1:], "all"][0]
    try:
        require_python()
        provide_libnuma()
        make_venv(venv)
        install(venv, find_torch(venv), read_pins(what))
    except CannotInstallError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


def require_python() -> None:
    """Check that this Python can make the environment."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not FIRST <= sys.version_info[:2] <= LAST:
        raise CannotInstallError(
            f"{sys.executable} is Python {version}; kvxfer's pinned packages have wheels for "
            "Python 3.11 to 3.13. Name another one: make PYTHON=/path/to/python3.12 ..."
        )
    if importlib.util.find_spec("ensurepip") is None:
        package = "python{}.{}-venv".format(*sys.version_info)
        raise CannotInstallError(
            f"{sys.executable} makes no virtual environments: {as_root('install', package)}"
        )


def provide_libnuma() -> None:
    """Install the library that the extensions of vLLM's build for CPUs load."""
    if has_library("libnuma.so.1"):
        return
    may_install = os.geteuid() == 0 and shutil.which("apt-get")
    if may_install and _install_libnuma() and has_library("libnuma.so.1"):
        return
    raise CannotInstallError(
        f"libnuma is missing, which vLLM needs on CPUs: {as_root('install', 'libnuma1')}"
    )


def _install_libnuma() -> bool:
    install = ["apt-get", "-q", "-y", "--no-install-recommends", "install", "libnuma1"]
    commands = f"{' '.join(install)} || {{ apt-get -q update && {' '.join(install)}; }}"
    status = quietly.run(
        LOGS / "libnuma.log", "Installing libnuma1, for vLLM", ["sh", "-c", commands]
    )
    return status == 0


def has_library(name: str) -> bool:
    """Return whether the dynamic linker finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def as_root(*arguments: str) -> str:
    """Format a command of Debian's package manager for users who are not root."""
    return " ".join(("sudo apt-get", *arguments))


def make_venv(venv: Path) -> None:
    """Make the virtual environment, again if it is incomplete or of another Python."""
    version = "{}.{}".format(*sys.version_info)
    try:
        command = [str(venv / "bin" / "python"), "-m", "pip", "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        answer = ""
    if f"(python {version})" not in answer:
        _run("venv", f"Making {venv}", [sys.executable, "-m", "venv", "--clear", str(venv)])


def find_torch(venv: Path) -> list[list[str]]:
    """Find a build of torch: for CPUs, unless there is a GPU or no index has such a build.

    Returns:
        Arguments of pip, a list for each build or set of libraries to install.
    """
    version = dict(parse_pins(CONSTRAINTS.read_text()))["torch"]
    for_cpus = f"torch=={version}+cpu"
    if has_gpu():
        print(f"A GPU is here: torch's build for CUDA, with its libraries ({CUDA_DOWNLOAD})")
    elif _pip_has(venv, for_cpus):
        return [[for_cpus]]
    elif _index_has(f"torch-{version}%2Bcpu-cp{sys.version_info[0]}{sys.version_info[1]}-"):
        return [["--index-url", CPU_INDEX, for_cpus]]
    else:
        print(
            f"Neither pip's indexes nor {CPU_INDEX} have {for_cpus} for this Python: torch's "
            f"build for CUDA, with its libraries ({CUDA_DOWNLOAD})"
        )
    return [[f"torch=={version}"], ["-r", str(CUDA_LIBRARIES)]]


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU and a driver for it."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _pip_has(venv: Path, requirement: str) -> bool:
    """Ask the indexes and folders of packages that pip is configured with."""
    command = [*pip(venv), "--dry-run", requirement]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    # The second is said where pip is configured with constraints.
    missing = "No matching distribution found", "ResolutionImpossible"
    if asked.returncode and not any(text in asked.stderr for text in missing):
        raise CannotInstallError(f"pip cannot tell whether there is {requirement}: {asked.stderr}")
    return asked.returncode == 0


def _index_has(file: str) -> bool:
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=INDEX_TIMEOUT_S) as page:
            return file in page.read().decode()
    except (OSError, ValueError):
        return False


def read_pins(what: str) -> list[str]:
    """Read the pinned requirements, without torch: those of the demo, or all."""
    text = CONSTRAINTS.read_text()
    if what == "demo":
        text, _, _ = text.partition(DEMO_ENDS)
    return [f"{name}=={version}" for name, version in parse_pins(text) if name != "torch"]


def parse_pins(text: str) -> Iterator[tuple[str, str]]:
    """Find names and versions in a list of pinned requirements."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            yield name, version


def install(venv: Path, torch: list[list[str]], pins: Sequence[str]) -> None:
    """Install torch, the pinned packages, several at a time, and then kvxfer."""
    _run(
        "packages",
        f"Installing {len(pins) + 1} packages",
        *([*pip(venv), *arguments] for arguments in shares_of(pins, torch)),
    )
    # Editable: its build needs hatchling from the list, in the environment of the tests.
    _run("kvxfer", "Installing kvxfer", [*pip(venv), "--no-build-isolation", "-e", "."])


def shares_of(pins: Sequence[str], torch: list[list[str]]) -> list[list[str]]:
    """Divide the packages among installers, each package to one of them."""
    libraries = dict(parse_pins(CUDA_LIBRARIES.read_text())) if len(torch) > 1 else {}
    rest = [pin for pin in pins if pin.partition("==")[0] not in libraries]
    return [*torch, *(rest[start::NUM_INSTALLERS] for start in range(NUM_INSTALLERS))]


def pip(venv: Path) -> list[str]:
    """Begin a command that installs exactly the packages it is given.

    They are not compiled, since only a small part of them is ever imported.
    """
    options = "--progress-bar off --disable-pip-version-check --no-compile --no-deps"
    return [str(venv / "bin" / "python"), "-m", "pip", "install", *options.split()]


def _run(log: str, title: str, *commands: list[str]) -> None:
    if quietly.run(LOGS / f"{log}.log", title, *commands):
        raise CannotInstallError(f"{title}: failed; run the same command again to go on from here")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
