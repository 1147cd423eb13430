"""Interpreters that tests run in processes of their own, from the root of the repository."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run_python(
    *arguments: str, environment: Mapping[str, str] | None = None, folder: Path = REPOSITORY
) -> "subprocess.CompletedProcess[str]":
    """Run an interpreter to its end, whatever its exit status."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
