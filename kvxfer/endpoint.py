"""Endpoints: host and port of a listening process, parsed from text and written as text."""

import contextlib
import ipaddress
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import shown
from kvxfer.text import find_control

MAX_PORT = (1 << 16) - 1
MAX_LABEL_CHARACTERS = 63
"""Maximum length of a label, the part of a host name between dots. Source: RFC 1035, 2.3.4."""


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Host and port of a process, as text `host:port` or `[IPv6 address]:port`.

    Attributes:
        host: Name or IP address, without brackets.
        port: TCP port; for listening, 0 means any free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, argument: str, text: str) -> Self:
        """Parse an endpoint; `argument` is the parameter that the error names.

        Raises:
            InvalidArgumentError: The text is not a host and a port.
        """
        form = "a host and a port, such as 'node-1:7000', '10.0.0.1:7000' or '[::1]:7000'"
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT
        if not (colon and is_host(host, bracketed=bracketed) and is_port):
            raise InvalidArgumentError(argument, shown(text), form)
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether the host is certainly this machine: `localhost` or a loopback address."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host == "localhost"
        return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def split_url(url: str) -> SplitResult:
    """Split a URL without altering it; its host may be a list of hosts, separated by commas.

    `urlsplit` drops line ends, tabs and leading control characters, and expects one host: current
    releases of Python refuse a list with an IPv6 address after the first host.

    Raises:
        ValueError: The URL is invalid, has control characters, or begins or ends with a space.
    """
    if url != url.strip() or find_control(url):
        raise ValueError("the URL has control characters or surrounding spaces")
    found = re.match("[^:/?#]*://([^/?#]*)", url)
    if found is None:
        return urlsplit(url)
    for host in found[1].split(","):
        urlsplit(f"//{host}")
    return urlsplit(url[: found.start(1)] + url[found.end(1) :])._replace(netloc=found[1])


def is_host(text: str, *, bracketed: bool) -> bool:
    """Whether text is the name or address of a host: if it was in brackets, an IPv6 address."""
    if not bracketed:
        return _is_name(text)
    with contextlib.suppress(ValueError):
        scope = ipaddress.IPv6Address(text).scope_id  # any text
        return scope is None or _is_name(scope)
    return False


def is_any_host(host: str) -> bool:
    """Whether a host stands for all addresses of a machine: to listen at, not to connect to."""
    with contextlib.suppress(OSError, ValueError):  # as sockets read IPv4 addresses, such as `0`
        return socket.inet_aton(host) == bytes(4)
    with contextlib.suppress(ValueError):
        return int(ipaddress.IPv6Address(host)) in (0, 0xFFFF << 32)  # 0.0.0.0 in IPv6
    return False


def _is_name(text: str) -> bool:
    return all(
        each.isascii() and each.replace("-", "").isalnum() and len(each) <= MAX_LABEL_CHARACTERS
        for each in text.split(".")
    )


def remove_abandoned(path: Path) -> None:
    """Remove the socket that a dead process left at a path, if any, so that the path can be bound.

    Raises:
        FileExistsError: The path is no socket, or a process listens at it.
        OSError: The path cannot be examined or removed.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    probing = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probing as probe, contextlib.suppress(BlockingIOError):  # its queue is full
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise FileExistsError(f"another process serves {path}")
