"""Releases of SGLang to test the plug with: `python -m tests.sglang.releases` installs the newest.

Each lies in a folder of its own with the few packages that it needs beside those of the tests, and
without its other dependencies, most of which are for GPUs. PYTHONPATH puts it on the path.
"""

import os
from pathlib import Path

from tests.installed_aside import install_aside
from tests.interpreter import REPOSITORY

DIRECTORY = REPOSITORY / "build" / "sglang"
PACKAGES = Path(__file__).with_name("packages.txt")

NEWEST = "0.5.23"
OTHERS = ("0.5.20", "0.5.21", "0.5.22")


def install(release: str = NEWEST) -> Path:
    folder = DIRECTORY / release
    install_aside(folder, f"sglang=={release}", "-r", str(PACKAGES))
    return folder


def environment(release: str = NEWEST) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(DIRECTORY / release)}


if __name__ == "__main__":
    install()
