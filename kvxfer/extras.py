"""Extras: which of them provides a missing package, and which release is installed."""

import contextlib
import importlib.metadata
import importlib.util

from kvxfer.errors import KVXferError


class MissingExtraError(KVXferError, ModuleNotFoundError):
    """Missing package, which an extra of kvxfer provides."""

    def __init__(self, extra: str, package: str, what: str) -> None:
        self.extra = extra
        wanted = f"{what} needs the package {package}: pip install 'kvxfer[{extra}]'"
        super().__init__(wanted.strip(), name=package)


def require_extra(extra: str, *packages: str, what: str = "") -> None:
    """Check that packages of an extra are installed, before `what` imports or uses them.

    Raises:
        MissingExtraError: One of the packages is not installed.
    """
    for package in packages:
        if not _is_installed(package):
            raise MissingExtraError(extra, package, what)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a stand-in for the package, without a spec
        return True
    except ModuleNotFoundError:  # the parent package is missing
        return False


def installed_version(*names: str) -> str:
    """Return the version of the first package that is installed, or `(not installed)`."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "(not installed)"
