"""Packages in a folder of their own, which PYTHONPATH puts in front of those of the tests."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.interpreter import run_python


def install_aside(
    folder: Path, *arguments: str, change: Callable[[Path], None] | None = None
) -> None:
    """Install packages alone, unless the folder is there; changed, it appears in one step."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch, folder.name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(target), *arguments], check=True)
        if change is not None:
            change(target)
        target.replace(folder)


def run_aside(environment: Mapping[str, str], *arguments: str) -> str:
    ended = run_python(*arguments, environment=environment)
    assert not ended.returncode, ended.stdout + ended.stderr
    return ended.stdout


def count_passed(environment: Mapping[str, str], *arguments: str) -> int:
    """Run tests in an environment, all of which have to pass; return how many there were."""
    printed = run_aside(environment, "-m", "pytest", "-q", *arguments)
    passed = re.search(r"(\d+) passed", printed)
    return int(passed.group(1)) if passed else 0
