"""Metadata of packages on the public index, which the pins are checked against.

It is read from the wheels by requests for ranges of bytes: installers would download gigabytes.
"""

import functools
import json
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import aiohttp
import fsspec
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

T = TypeVar("T")
INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 30
PAUSES_S = (1.0, 4.0, 16.0)
PIECE_BYTES = 1 << 16
GLIBC = (2, 36)  # of Debian 12
"""The glibc of the oldest system that the pins are for."""


def find_wheel(name: str, version: str, python: Version) -> str | None:
    """Find the URL of the wheel that `python` installs on Linux and x86-64; None without one."""
    tags = {tag: rank for rank, tag in enumerate(_tags(python))}
    found: dict[int, str] = {}
    for file in _files(name):
        if f"-{version}-" not in file["filename"] or not file["filename"].endswith(".whl"):
            continue
        *_, wheel_tags = parse_wheel_filename(file["filename"])
        if SpecifierSet(file.get("requires-python") or "").contains(python):
            for rank in (tags[tag] for tag in wheel_tags if tag in tags):
                found[rank] = file["url"]
    return found[min(found)] if found else None


def newest_release(name: str) -> Version:
    """Find the newest release of a package that is neither a pre-release nor yanked."""
    wheels = (each for each in _files(name) if each["filename"].endswith(".whl"))
    versions = {
        parse_wheel_filename(each["filename"])[1] for each in wheels if not each.get("yanked")
    }
    return max(each for each in versions if not each.is_prerelease)


@functools.cache
def read_metadata(url: str) -> Metadata:
    """Read the metadata of a wheel: its last bytes, and the stretch where METADATA is."""

    def read() -> Metadata:
        with fsspec.open(url, block_size=PIECE_BYTES) as remote, zipfile.ZipFile(remote) as archive:
            (name,) = (each for each in archive.namelist() if _is_metadata(each))
            return Metadata.from_email(archive.read(name), validate=False)

    return _ask(read)


def _is_metadata(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder.endswith(".dist-info") and file == "METADATA"


def _tags(python: Version) -> Iterator[Tag]:
    version = (python.major, python.minor)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms += ["linux_x86_64"]
    yield from cpython_tags(version, platforms=platforms)
    yield from compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)


@functools.cache
def _files(name: str) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{INDEX}/{name}/", headers={"Accept": JSON})

    def read() -> Any:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["files"]

    files: list[dict[str, Any]] = _ask(read)
    return files


def _ask(read: Callable[[], T]) -> T:
    """Ask the index; after a moment's failure of the network or DNS, ask again."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except (OSError, aiohttp.ClientError):
            time.sleep(pause_s)
    return read()
