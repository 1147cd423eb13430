"""Configuration of discovery by etcd: where it is, and how this process proves itself there."""

import logging
import os
import re
import ssl
from dataclasses import dataclass
from typing import Self

from kvxfer.endpoint import Endpoint, split_url
from kvxfer.errors import InvalidArgumentError
from kvxfer.named_files import read_named_file
from kvxfer.storage.integrity import read_secret

SCHEME = "etcd"
USER_VARIABLE = "ETCDCTL_USER"
PASSWORD_VARIABLE = "ETCDCTL_PASSWORD"  # noqa: S105 - the name of it
TLS_VARIABLES = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
"""Variables of etcd's own command; what the configuration names counts instead of them."""

_FORM = "a URL such as etcd://10.0.0.5:2379/kvxfer, without credentials"
_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this process shows to etcd, read anew for each connection: files are replaced.

    Attributes:
        user: Name and password, None without.
        ca: Certificate of the authority of etcd's servers, PEM; None without TLS.
        pair: Private key and certificate of this process, PEM; None without.
    """

    user: tuple[str, str] | None
    ca: bytes | None
    pair: tuple[bytes, bytes] | None

    def __repr__(self) -> str:
        """Tell nothing of them."""
        return "Credentials(...)"


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Configuration of discovery by etcd.

    Attributes:
        endpoints: Members of the cluster that are asked, in turn when one fails.
        prefix: Beginning of the keys, with a slash at its end.
        user_file: File with `name:password`; without, the environment may have them.
        ca, cert, key: Files in PEM; without, the environment may name them.
    """

    endpoints: tuple[Endpoint, ...]
    prefix: str
    user_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str, *, user_file: str, ca: str, cert: str, key: str) -> Self:
        """Read `etcd://host:port,host:port/prefix`, and what the environment has of credentials.

        Raises:
            InvalidArgumentError: It is no such URL, or there is one of key and certificate only;
                a password in the URL is not told.
        """
        try:
            parts = split_url(url)
        except ValueError:
            raise InvalidArgumentError("discover", _hidden(url), _FORM) from None
        strange = parts.query or parts.fragment or "@" in url or parts.scheme != SCHEME
        if strange or not _PREFIX.fullmatch(parts.path.rstrip("/")):
            raise InvalidArgumentError("discover", _hidden(url), _FORM)
        endpoints = tuple(Endpoint.parse("discover", each) for each in parts.netloc.split(","))
        files = {"ca": ca, "cert": cert, "key": key}
        files = {
            name: file or os.environ.get(TLS_VARIABLES[name], "") for name, file in files.items()
        }
        if bool(files["cert"]) != bool(files["key"]) or (files["cert"] and not files["ca"]):
            given = tuple(files.values())
            wanted = "a CA alone, all three, or none"
            raise InvalidArgumentError("etcd_ca, etcd_cert, etcd_key", given, wanted)
        return cls(endpoints, f"{parts.path.rstrip('/')}/", user_file, **files)

    def __str__(self) -> str:
        """Write it as a URL."""
        return f"{SCHEME}://{','.join(map(str, self.endpoints))}{self.prefix.rstrip('/')}"

    def read_credentials(self) -> Credentials:
        """Read the credentials; blocks.

        Raises:
            InvalidArgumentError: A file cannot be read, or is not one of its kind.
        """
        ca = _read("etcd_ca", self.ca) if self.ca else None
        pair = None
        if self.cert:
            pair = _read("etcd_key", self.key), _read("etcd_cert", self.cert)
        return Credentials(self._read_user(), ca, pair)

    def check(self) -> None:
        """Check the credentials, and warn of a password that others can read on its way.

        Raises: as `read_credentials`.
        """
        credentials = self.read_credentials()
        read_secret(self.user_file)  # warns of one that everybody can read
        if credentials.ca is None:
            if credentials.user and not all(each.is_loopback for each in self.endpoints):
                logger.warning("%s: the password goes there without TLS; see etcd_ca", self)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as exc:  # ssl.SSLError is one
            wanted = f"a certificate of an authority in PEM: {exc}"
            raise InvalidArgumentError("etcd_ca", self.ca, wanted) from exc
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key, password="")  # asks nobody
        except OSError as exc:
            files = f"{self.cert}, {self.key}"
            wanted = f"a certificate and its private key, not encrypted, in PEM: {exc}"
            raise InvalidArgumentError("etcd_cert, etcd_key", files, wanted) from exc

    def _read_user(self) -> tuple[str, str] | None:
        if self.user_file:
            source = ("etcd_user_file", self.user_file)
            text = _read(*source).decode("utf-8", "replace").rstrip("\r\n")
        else:
            source = ("environment variable", USER_VARIABLE)
            text = os.environ.get(USER_VARIABLE, "")
            if not text:
                return None
            if ":" not in text and PASSWORD_VARIABLE in os.environ:
                text = f"{text}:{os.environ[PASSWORD_VARIABLE]}"
        name, colon, password = text.partition(":")
        if not (name and colon and password) or "\n" in text:
            raise InvalidArgumentError(*source, "name:password in it, in one line")
        return name, password


def _read(argument: str, path: str) -> bytes:
    try:
        return read_named_file(path).data
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or exc
        raise InvalidArgumentError(argument, path, f"a readable file: {reason}") from exc


def _hidden(url: str) -> str:
    """Leave out of a URL what may be a password: all before the last @, a query, a fragment."""
    head, at, rest = url.rpartition("@")
    shown = re.split("[?#]", rest)[0]
    return f"{head.partition('://')[0]}://...@{shown}" if at else shown
