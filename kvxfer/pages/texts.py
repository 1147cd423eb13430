"""Texts beside the pages of a namespace: its description, and records of its pages' integrity."""

import re
from collections.abc import Iterable
from typing import Protocol

import msgspec
import xxhash

from kvxfer import runtime
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.named_files import read_named_file
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, BlockHeader, header_in
from kvxfer.pages.names import NAMESPACE_FILE
from kvxfer.pages.page_cipher import KEY_ID_BYTES
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace

MAX_TEXT_BYTES = 16 << 20
"""Maximum bytes read of a text. Descriptions with thousands of tensors take a few MiB."""

NUM_SAMPLES = 64
"""Maximum number of pages whose headers are examined if a record gives no answer."""

RECORDS = {kind: f"integrity.{kind.value}" for kind in Integrity}
"""Names of the records. Each says that the namespace may hold pages of that integrity."""

DESCRIPTIONS = frozenset({NAMESPACE_FILE, *RECORDS.values()})
"""Names of all texts, which are removed with the namespace that they describe."""

_KEY_ID = re.compile(f"^[0-9a-f]{{{2 * KEY_ID_BYTES}}}$", re.MULTILINE)


class TextFolder(Protocol):
    """Place of a namespace's texts: its folder, or its prefix in a bucket."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the namespace."""

    def read_text(self, name: str) -> str:
        """Read a text, or raise an OSError."""


def describe_namespace(namespace: Namespace) -> str:
    """Encode every field of a namespace as the text of its `namespace.json`."""
    text = msgspec.json.format(msgspec.json.encode(namespace.fields()), indent=2).decode()
    return text + "\n"


def load_namespace(path: str) -> Namespace:
    """Read a namespace from a `namespace.json`, which may have been copied elsewhere."""
    try:
        return msgspec.json.decode(read_named_file(path).data, type=Namespace)
    except (OSError, ValueError, msgspec.MsgspecError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or exc
        wanted = f"a {NAMESPACE_FILE} of a file store: {reason}"
        raise InvalidArgumentError("namespace", path, wanted) from exc


def read_namespace(folder: TextFolder) -> Namespace:
    """Read the description of a folder's namespace.

    Raises:
        BlockFileError: It is missing, damaged or another namespace's.
        BackendUnavailableError: The server is gone.
    """
    try:
        namespace = msgspec.json.decode(folder.read_text(NAMESPACE_FILE), type=Namespace)
    except BackendUnavailableError:
        raise
    except OSError as exc:
        raise BlockFileError(f"{NAMESPACE_FILE}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise BlockFileError(f"{NAMESPACE_FILE} is damaged: {exc}") from exc
    if namespace.fingerprint != folder.fingerprint:
        found = f"describes namespace {namespace.fingerprint}"
        raise BlockFileError(f"{NAMESPACE_FILE} is damaged, or {found}")
    return namespace


def make_record(digester: Digester, fingerprint: str, before: str | None = None) -> str:
    """Make the record of a digester's integrity.

    A record of keyed pages proves the secret without revealing it. A record of sealed pages lists
    the ids of their keys, those in the record `before` included.
    """
    if digester.cipher is not None:
        return with_key(before, digester.cipher.key_id(fingerprint))
    if digester.integrity is not Integrity.KEYED:
        return f"{digester.integrity.value}\n"
    proof = digester.seal(f"secret of {fingerprint}".encode())
    return f"{proof} {xxhash.xxh3_64_hexdigest(proof.encode())}\n"


def with_key(record: str | None, key_id: str) -> str:
    """Add a key id to a record of sealed pages; None makes a new record."""
    return "\n".join([Integrity.SEALED.value, *sorted({*_key_ids_in(record), key_id}), ""])


def has_other_keys(record: str | None, digester: Digester, fingerprint: str) -> bool:
    """Whether a record lists keys that a digester lacks; False if the digester does not seal."""
    cipher = digester.cipher
    return cipher is not None and not all(
        cipher.knows(fingerprint, key_id) for key_id in _key_ids_in(record)
    )


def proof_in(record: str | None) -> str:
    """Extract the proof from a record of keyed pages; empty if either is missing or damaged."""
    proof, _, checksum = (record or "").removesuffix("\n").partition(" ")
    return proof if proof and xxhash.xxh3_64_hexdigest(proof.encode()) == checksum else ""


def read_record(folder: TextFolder, kind: Integrity) -> str | None:
    """Read the record of an integrity; None if there is none."""
    try:
        return folder.read_text(RECORDS[kind])
    except OSError as exc:
        if runtime.is_absent(exc):
            return None
        raise


def require_secret(
    folder: TextFolder, digester: Digester, heads: Iterable[bytes], where: str
) -> None:
    """Check that the keyed pages of a folder are sealed with the secret of a digester.

    The record proves it. If the record is missing or differs, one of the headers `heads` with a
    valid seal does; only then are they read. The error names the folder as `where`.

    Raises:
        InvalidArgumentError: The pages are sealed with another secret.
    """
    said = proof_in(read_record(folder, Integrity.KEYED))
    if said == proof_in(make_record(digester, folder.fingerprint)):
        return
    verdicts = [_holds(head, digester) for head in heads if _is_keyed(head)]
    if not any(verdicts) and (said or verdicts):
        wanted = f"the secret that sealed the blocks in {where}; to drop them, remove that folder"
        raise InvalidArgumentError("secret_file", "another secret", wanted)


def has_keyed(folder: TextFolder, heads: Iterable[bytes]) -> bool:
    """Whether a folder has keyed pages, according to its record or to some headers."""
    return read_record(folder, Integrity.KEYED) is not None or any(map(_is_keyed, heads))


def kinds_in(folder: TextFolder) -> list[Integrity]:
    """List the integrities of which there are records, readable or not, in a folder."""
    return [kind for kind in RECORDS if _may_have_record(folder, kind)]


def _key_ids_in(record: str | None) -> list[str]:
    return _KEY_ID.findall(record or "")


def _is_keyed(head: bytes) -> bool:
    header = header_in(head)
    return header is not None and header.integrity is Integrity.KEYED


def _holds(head: bytes, digester: Digester) -> bool:
    try:
        BlockHeader.verify(head, digester)
    except BlockFileError:
        return False
    return True


def _may_have_record(folder: TextFolder, kind: Integrity) -> bool:
    try:
        return read_record(folder, kind) is not None
    except OSError:
        return True
