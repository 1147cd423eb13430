"""Checksums of stored bytes: plain ones against accidents, keyed ones against forgery."""

from collections.abc import Iterable
from typing import Protocol

import xxhash

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.integrity import Integrity

SECRET_BYTES = 32


class Hasher(Protocol):
    """Hasher with the interface of hashlib."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes that were added."""


class Digester:
    """Digester: makes the checksums of one integrity.

    Args:
        integrity: Kind of the checksums.
        secret: 32 bytes, for `KEYED` only.

    Raises:
        InvalidArgumentError: `KEYED` without a secret of 32 bytes, a secret without `KEYED`, or
            the package `blake3` is missing.
    """

    def __init__(self, integrity: Integrity, secret: bytes | None = None) -> None:
        keyed = integrity is Integrity.KEYED
        if keyed != (secret is not None):
            wanted = "a secret with integrity=keyed, and only then"
            raise InvalidArgumentError("secret_file", integrity.value, wanted)
        if secret is not None and len(secret) != SECRET_BYTES:
            wanted = f"a file of {SECRET_BYTES} bytes, such as head -c 32 /dev/urandom makes"
            raise InvalidArgumentError("secret_file", f"{len(secret)} bytes", wanted)
        self.integrity = integrity
        self._secret = secret
        if keyed:
            _import_blake3()

    def checksum(self, data: Iterable[memoryview]) -> str:
        """Hash the concatenation of `data` to hexadecimal digits; to none when integrity is off."""
        if self.integrity is Integrity.OFF:
            return ""
        if self._secret is None and isinstance(data, list) and len(data) == 1:
            return xxhash.xxh3_64_hexdigest(data[0])
        hasher = self._hasher()
        for piece in data:
            hasher.update(piece)
        return hasher.hexdigest()

    def seal(self, text: bytes) -> str:
        """Hash a header to hexadecimal digits; with XXH3 also when integrity is off."""
        if self._secret is None:
            return xxhash.xxh3_64_hexdigest(text)
        hasher = self._hasher()
        hasher.update(memoryview(text))
        return hasher.hexdigest()

    def _hasher(self) -> Hasher:
        if self._secret is None:
            return xxhash.xxh3_64()
        hasher: Hasher = _import_blake3()(key=self._secret)
        return hasher


def _import_blake3() -> type:
    try:
        from blake3 import blake3
    except ImportError as exc:
        raise InvalidArgumentError(
            "integrity", "keyed", "the package blake3: pip install 'kvxfer[keyed]'"
        ) from exc
    return blake3
