"""Extras: which of them brings a package that is not installed, and which release is installed."""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator

from kvxfer.errors import KVXferError


class MissingExtraError(KVXferError, ModuleNotFoundError):
    """Package of an extra that is not installed.

    Attributes:
        extra: The extra that brings it.
        name: The package.
    """

    def __init__(self, extra: str, package: str, what: str) -> None:
        self.extra = extra
        wanted = f"{what} needs the package {package}: pip install 'kvxfer[{extra}]'"
        super().__init__(wanted.strip(), name=package)


@contextlib.contextmanager
def needing(extra: str, *packages: str, what: str = "") -> Iterator[None]:
    """Say which extra brings a package that is imported within, and that is not there.

    Args:
        extra: Extra of kvxfer.
        packages: Its packages.
        what: Option or module that needs them; empty for a whole command.

    Raises:
        MissingExtraError: One of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in packages:  # but what one of them brings along may be missing with it
            missing = next((each for each in packages if not _is_installed(each)), "")
        if not missing:
            raise
        raise MissingExtraError(extra, missing, what) from exc


def require_extra(extra: str, *packages: str, what: str = "") -> None:
    """Check that the packages of an extra are installed, before work whose end needs them.

    Args:
        extra: Extra of kvxfer.
        packages: Its packages.
        what: Option or module that needs them; empty for a whole command.

    Raises:
        MissingExtraError: One of the packages is not installed.
    """
    for package in packages:
        if not _is_installed(package):
            raise MissingExtraError(extra, package, what)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is being imported, or its import was forbidden
        return False


def installed_version(*names: str) -> str:
    """Version of an installed package.

    Args:
        names: Names under which it is published; the first that is installed counts.

    Returns:
        `(not installed)` where none is.
    """
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "(not installed)"
