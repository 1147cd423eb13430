"""What tests need that the set-up does not install: a skip names it and says how to get it."""

import importlib
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

REASON = re.compile(r"needs (?P<what>[^:]+): (?P<command>.+)")


def program(name: str, what: str, package: str) -> pytest.MarkDecorator:
    """Make the mark of tests that run a program of Debian's."""
    return _mark(what, f"apt-get install {package}", present=shutil.which(name) is not None)


def python(release: str) -> pytest.MarkDecorator:
    """Make the mark of tests that run with another Python, such as `3.12`."""
    command = f"python{release} on the path, or pyenv install {release}"
    return _mark(f"Python {release}", command, present=find_python(release) is not None)


def find_python(release: str) -> str | None:
    """Find a Python that works: on the path, where pyenv has commands that do not, or of pyenv."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{release}.*/bin/python")
    for each in filter(None, (shutil.which(f"python{release}"), *map(str, of_pyenv))):
        if not subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode:
            return each
    return None


def _mark(what: str, command: str, *, present: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not present, reason=f"needs {what}: {command}")


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:  # of a shared library, too
        return False
    return True


etcd = program("etcd", "etcd", "etcd-server")
prometheus = program("prometheus", "Prometheus", "prometheus")
chromium = program("chromium", "Chromium", "chromium")
mooncake = _mark(
    "the libraries of Mooncake",
    "apt-get install libibverbs1 libcurl4",
    present=_can_import("mooncake.store"),
)


def azurite(*, present: bool) -> pytest.MarkDecorator:
    """Make the mark of tests that run Microsoft's emulator of Azure."""
    return _mark("Azurite", "make azurite", present=present)


# helm's own code for `lint` and `template`, as a library of Python.
HELM = Path(__file__).parents[1] / "build" / "helm" / "0.2.2"
helm = _mark("Helm", "make helm", present=HELM.exists())


def missing(config: pytest.Config) -> Counter[tuple[str, str]]:
    """Count the tests of a run that were skipped, by what they need and the command for it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    reasons = (each.longrepr[2] for each in reports if isinstance(each.longrepr, tuple))
    found = (REASON.match(reason.removeprefix("Skipped: ")) for reason in reasons)
    return Counter((match["what"], match["command"]) for match in found if match)
