"""Check of what `make gpu` needs: a GPU, a torch for CUDA, and the packages of the tests.

`python -m tests.environment.gpu [module ...]`, with further modules that have to be there, such as
`vllm`. Needs only Python; says what is missing, and the command that installs it.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

PACKAGES = {
    "aiofiles": "aiofiles",
    "cuda.bindings": "cuda-bindings",
    "hypothesis": "hypothesis",
    "msgspec": "msgspec",
    "nixl": "nixl",
    "numpy": "numpy",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "torch": "torch",
    "tqdm": "tqdm",
    "xxhash": "xxhash",
}
"""Modules, with the packages that have them."""
SHOWN = ("torch", "triton", "cuda-bindings", "nixl", "vllm")
OTHER = "or name a Python that has it: make gpu GPU_PYTHON=/path/to/python"


def main(modules: Sequence[str]) -> int:
    """Print the GPU and the releases of packages; 1 when something is missing, with what to do."""
    missing = [package for module, package in PACKAGES.items() if not _is_here(module)]
    missing += [module for module in modules if not _is_here(module)]
    if missing:
        print(f"{sys.executable} lacks packages: {pip_install(missing)}; {OTHER}", file=sys.stderr)
        return 1
    import torch

    if reason := why_not(torch):
        print(reason, file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name(0), *map(_release, SHOWN), sep=", ")
    return 0


def pip_install(packages: Sequence[str]) -> str:
    """Word the command of pip for packages."""
    return " ".join((sys.executable, "-m", "pip", "install", *packages))


def why_not(torch: Any) -> str:
    """Say why tests of a GPU cannot run with this torch; empty where they can."""
    if not torch.version.cuda:
        return (
            f"torch {torch.__version__} of {sys.executable} is a build without CUDA: `make setup` "
            f"installs one with CUDA where there is a GPU; {OTHER}"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU, or no driver for CUDA {torch.version.cuda}: "
            "see `nvidia-smi`"
        )
    return ""


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _release(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
