"""Cipher of sealed pages: AES-256-GCM, with a separate key for every page."""

import re
from collections.abc import Iterable, Sequence

from kvxfer import runtime
from kvxfer.extras import require_extra

SECRET_BYTES = 32
KEY_BYTES = 32
KEY_ID_BYTES = 16
TAG_BYTES = 16

SALT_BYTES = 24
"""Size of a page's salt, large enough for a practically unlimited number of random draws.

Source: https://c2sp.org/XAES-256-GCM
"""

EXTRA = "sealed"
_NONCE = bytes(12)  # constant, since no key encrypts a second page
_CHECKSUM = re.compile(
    f"([0-9a-f]{{{2 * KEY_ID_BYTES}}})([0-9a-f]{{{2 * SALT_BYTES}}})([0-9a-f]{{{2 * TAG_BYTES}}})"
)


class PageCipher:
    """Cipher of the sealed pages of one tenant; thread-safe.

    HKDF-SHA256 derives from each secret a key for each namespace of the tenant, and from that key,
    a random salt and the block key, a key for each page. So no key encrypts twice, and any number
    of processes may store any number of pages. The checksum of a page has the salt, the tag, and
    the id of the namespace's key, which reveals nothing of the key.

    The first secret seals pages. Pages sealed with the other secrets are still read.

    Source: RFC 5869, HKDF; NIST SP 800-38D, GCM.
    """

    def __init__(self, secrets: Sequence[bytes], tenant: str) -> None:
        require_extra(EXTRA, "cryptography", what="integrity=sealed")
        self._secrets = secrets
        self._tenant = tenant
        self._keys: dict[str, dict[str, bytes]] = {}  # by namespace and key id

    def key_id(self, namespace: str) -> str:
        """Return the id, hexadecimal digits, of the key that seals pages of a namespace."""
        return next(iter(self._keys_of(namespace)))

    def knows(self, namespace: str, key_id: str) -> bool:
        """Whether pages of a namespace that were sealed with this key can be read."""
        return key_id in self._keys_of(namespace)

    def encrypt(self, namespace: str, key: bytes, bound: bytes, data: memoryview) -> str:
        """Encrypt a page in place; return the checksum, which covers the bytes `bound`, too."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key_id, namespace_key = next(iter(self._keys_of(namespace).items()))
        salt = runtime.token_bytes(SALT_BYTES)
        page_key = _expand(namespace_key, salt + key)
        context = Cipher(algorithms.AES256(page_key), modes.GCM(_NONCE)).encryptor()
        named = key_id + salt.hex()
        context.authenticate_additional_data(bound + named.encode())
        context.update_into(data, data)
        context.finalize()
        return named + context.tag.hex()

    def decrypt(
        self,
        namespace: str,
        key: bytes,
        bound: bytes,
        checksum: str,
        data: Iterable[memoryview],
        into: memoryview | None = None,
    ) -> bool:
        """Decrypt a page in place, or `into` other memory; return whether it is authentic.

        If it is not, or its key is unknown, the decrypted bytes must not be used.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        parts = _CHECKSUM.fullmatch(checksum)
        namespace_key = self._keys_of(namespace).get(parts[1]) if parts else None
        if parts is None or namespace_key is None:
            return False
        page_key = _expand(namespace_key, bytes.fromhex(parts[2]) + key)
        mode = modes.GCM(_NONCE, bytes.fromhex(parts[3]))
        context = Cipher(algorithms.AES256(page_key), mode).decryptor()
        context.authenticate_additional_data(bound + f"{parts[1]}{parts[2]}".encode())
        for piece in data:
            context.update_into(piece, piece if into is None else into)
            into = None if into is None else into[len(piece) :]
        try:
            context.finalize()
        except InvalidTag:
            return False
        return True

    def _keys_of(self, namespace: str) -> dict[str, bytes]:
        keys = self._keys.get(namespace)
        if keys is None:
            pairs = [_derive(secret, namespace, self._tenant) for secret in self._secrets]
            keys = self._keys[namespace] = dict(pairs)
        return keys


def key_id_in(checksum: str) -> str:
    """Read the key id from the checksum of a sealed page; empty for any other text."""
    parts = _CHECKSUM.fullmatch(checksum)
    return parts[1] if parts else ""


def _derive(secret: bytes, namespace: str, tenant: str) -> tuple[str, bytes]:
    """Derive the key of a tenant's namespace from a secret; return its id and the key."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = f"kvxfer sealed 1\0{namespace}\0{tenant}".encode()
    derived = HKDF(SHA256(), KEY_BYTES + KEY_ID_BYTES, None, info).derive(secret)
    return derived[KEY_BYTES:].hex(), derived[:KEY_BYTES]


def _expand(namespace_key: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(namespace_key)
