"""Check of the requirements of `make gpu`: a GPU, torch for CUDA, and the tests' packages.

`python -m tests.environment.gpu [package ...]` also requires further packages, such as `vllm`.
Needs only Python; says what is missing, and the command that installs it.
"""

import importlib.metadata
import sys
from collections.abc import Sequence

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

    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} of {sys.executable}, for CUDA {torch.version.cuda},"
        mend = "see `nvidia-smi`, or let `make setup` install a torch for the GPU"
        print(f"{build} finds no GPU: {mend}; {OTHER}", file=sys.stderr)
        return 1
    shown = (f"{package} {_release(package) or 'not installed'}" for package in SHOWN)
    print(torch.cuda.get_device_name(0), *shown, sep=", ")
    return 0


def _release(package: str) -> str:
    """Find the installed release of a package; empty without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
