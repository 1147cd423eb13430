"""Metadata of packages on the public index, which the pins are checked against.

It is read from the wheels by requests for ranges of bytes: installers would download gigabytes.
"""

import functools
import io
import json
import os
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 30
PAUSES_S = (1.0, 4.0, 16.0)
SERVER_ERROR = 500
PIECE_BYTES = 1 << 16
GLIBC = (2, 36)  # of Debian 12
"""The glibc of the oldest system that the pins are for."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """File of a release that a Python can install."""

    url: str
    size_bytes: int


def find_wheel(name: str, version: str, python: Version) -> Wheel | None:
    """Find the wheel that `python` installs on Linux and x86-64; None when there is none."""
    tags = {tag: rank for rank, tag in enumerate(_tags(python))}
    found: dict[int, Wheel] = {}
    for file in _files(name):
        if f"-{version}-" not in file["filename"] or not file["filename"].endswith(".whl"):
            continue
        *_, wheel_tags = parse_wheel_filename(file["filename"])
        if SpecifierSet(file.get("requires-python") or "").contains(python):
            for rank in (tags[tag] for tag in wheel_tags if tag in tags):
                found[rank] = Wheel(file["url"], file["size"])
    return found[min(found)] if found else None


def newest_release(name: str) -> Version:
    """Find the newest release of a package that is no pre-release and was not taken back."""
    wheels = (each for each in _files(name) if each["filename"].endswith(".whl"))
    versions = {
        parse_wheel_filename(each["filename"])[1] for each in wheels if not each.get("yanked")
    }
    return max(each for each in versions if not each.is_prerelease)


@functools.cache
def read_metadata(wheel: Wheel) -> Metadata:
    """Read the metadata of a wheel: its last bytes, and the stretch where METADATA is."""
    remote = io.BufferedReader(cast("io.RawIOBase", _RemoteFile(wheel)), PIECE_BYTES)
    with zipfile.ZipFile(remote) as archive:
        (name,) = (each for each in archive.namelist() if _is_metadata(each))
        return Metadata.from_email(archive.read(name), validate=False)


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
    files: list[dict[str, Any]] = json.loads(_fetch(f"{INDEX}/{name}/", {"Accept": JSON}))["files"]
    return files


def _fetch(url: str, headers: dict[str, str]) -> bytes:
    """Ask the index, and again after a pause where the network or its names fail for a moment."""
    request = urllib.request.Request(url, headers=headers)
    for pause_s in (*PAUSES_S, None):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return bytes(answer.read())
        except OSError as exc:
            is_refused = isinstance(exc, urllib.error.HTTPError) and exc.code < SERVER_ERROR
            if pause_s is None or is_refused:
                raise
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


class _RemoteFile(io.RawIOBase):
    """File behind a URL, of which only what is read is downloaded."""

    def __init__(self, wheel: Wheel) -> None:
        self._wheel = wheel
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._wheel.size_bytes}
        self._position = start[whence] + offset
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._wheel.size_bytes)
        if end <= self._position:
            return 0
        wanted = {"Range": f"bytes={self._position}-{end - 1}"}
        content = _fetch(self._wheel.url, wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
