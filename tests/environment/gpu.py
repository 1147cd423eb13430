"""Check of what `make gpu` needs: a GPU, a torch for CUDA, and the packages of the tests.

`python -m tests.environment.gpu [package ...]`, with further packages that have to be there, as
`vllm`. Needs only Python; says what is missing, and the command that installs it.
"""

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

PACKAGES = (
    *("aiofiles", "cuda-bindings", "hypothesis", "msgspec", "nixl", "numpy", "pytest"),
    *("pytest-asyncio", "pytest-timeout", "torch", "tqdm", "xxhash"),
)
SHOWN = ("torch", "triton", "cuda-bindings", "nixl", "vllm")
OTHER = "or name a Python that has it: make gpu GPU_PYTHON=/path/to/python"


def main(packages: Sequence[str]) -> int:
    """Print the GPU and the releases of packages; 1 when something is missing, with what to do."""
    missing = [package for package in (*PACKAGES, *packages) if not _release(package)]
    if missing:
        install = " ".join((sys.executable, "-m", "pip", "install", *missing))
        print(f"{sys.executable} lacks packages: {install}; {OTHER}", file=sys.stderr)
        return 1
    import torch

    if reason := why_not(torch):
        print(reason, file=sys.stderr)
        return 1
    shown = (f"{package} {_release(package) or 'not installed'}" for package in SHOWN)
    print(torch.cuda.get_device_name(0), *shown, sep=", ")
    return 0


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


def _release(package: str) -> str:
    """Find the installed release of a package; empty without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
