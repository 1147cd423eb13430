"""Checksums of stored bytes: plain ones against accidents, keyed ones against forgery."""

from collections.abc import Iterable

import xxhash

from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.page_cipher import SECRET_BYTES, PageCipher
from kvxfer.storage.integrity import Integrity


class Digester:
    """Maker of the checksums of one integrity.

    `KEYED` takes a secret of 32 bytes. `SEALED` takes one or several, the newest first, and a
    tenant; its `cipher` encrypts the data of blocks, and makes their checksums.

    Raises:
        InvalidArgumentError: `KEYED` or `SEALED` has no secret, or one of a wrong length; a secret
            or a tenant is given to an integrity that takes none; or `blake3` is not installed.
        MissingExtraError: The package `cryptography` is missing.
    """

    def __init__(self, integrity: Integrity, secret: bytes | None = None, tenant: str = "") -> None:
        is_sealed = integrity is Integrity.SEALED
        if integrity.needs_secret != (secret is not None):
            wanted = "a secret if integrity is keyed or sealed, and none otherwise"
            found = f"{'missing' if secret is None else 'given'} with integrity={integrity.value}"
            raise InvalidArgumentError("secret_file", found, wanted)
        if tenant and not is_sealed:
            raise InvalidArgumentError("tenant", tenant, "no tenant unless integrity is sealed")
        if secret is not None:
            require_secrets(secret, several=is_sealed)
        self.integrity = integrity
        self.cipher: PageCipher | None = None
        self._secret = None if is_sealed else secret
        if secret is not None and is_sealed:
            starts = range(0, len(secret), SECRET_BYTES)
            self.cipher = PageCipher([secret[at : at + SECRET_BYTES] for at in starts], tenant)
        elif secret is not None:
            _import_blake3()

    def checksum(self, data: Iterable[memoryview]) -> str:
        """Hash the concatenation of `data` to hexadecimal digits; empty if integrity is off."""
        return "" if self.integrity is Integrity.OFF else self._hash(data)

    def seal(self, text: bytes) -> str:
        """Hash a header to hexadecimal digits: with BLAKE3 if integrity is keyed, else XXH3."""
        return self._hash([memoryview(text)])

    def _hash(self, data: Iterable[memoryview]) -> str:
        if self._secret is None and isinstance(data, list) and len(data) == 1:
            return xxhash.xxh3_64_hexdigest(data[0])
        hasher = xxhash.xxh3_64() if self._secret is None else _import_blake3()(key=self._secret)
        for piece in data:
            hasher.update(piece)
        return str(hasher.hexdigest())


def require_secrets(secret: bytes, *, several: bool) -> None:
    """Check the length of a secret, or of several in a row."""
    found, wanted = len(secret), f"{SECRET_BYTES} bytes, such as from head -c 32 /dev/urandom"
    if found == SECRET_BYTES or (several and found and found % SECRET_BYTES == 0):
        return
    wanted += ", or of several such secrets" if several else ""
    raise InvalidArgumentError("secret_file", f"{found} bytes", f"a file of {wanted}")


def _import_blake3() -> type:
    try:
        from blake3 import blake3
    except ImportError as exc:
        raise InvalidArgumentError(
            "integrity", "keyed", "the package blake3: pip install 'kvxfer[keyed]'"
        ) from exc
    return blake3
