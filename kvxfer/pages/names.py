"""Names of the files and folders of a store, and the mode of its folders."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.header import MAX_KEY_BYTES, padded
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
CLAIM_SUFFIX = ".claim"
QUARANTINE = "quarantine"
NAMESPACE_FILE = "namespace.json"
LEDGER_NAME = "usage.ledger"

FOLDER_MODE = 0o700

FINGERPRINT_DIGITS = 32
OWNER_BYTES = 8
HEX_DIGITS = frozenset("0123456789abcdef")
_TEMPORARY_NAME = re.compile(
    rf"([0-9a-f]{{{2 * OWNER_BYTES}}})-[0-9a-f]+{re.escape(SUFFIX + TEMPORARY)}"
)


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """Block file that a walk through a store has found."""

    fingerprint: str
    folder: str  # name, within the folder of the namespace
    key: BlockKey
    num_bytes: int
    used: float  # last write or recorded use, in seconds since the epoch

    @property
    def quarantined(self) -> bool:
        """Whether the file is in quarantine because it is corrupt."""
        return self.folder == QUARANTINE

    @property
    def misplaced(self) -> bool:
        """Whether the file is in a folder where no lookup finds it."""
        return not self.quarantined and not self.key.hex().startswith(self.folder)

    @property
    def num_bytes_on_disk(self) -> int:
        """Bytes that the file occupies on the disk."""
        return padded(self.num_bytes)

    @property
    def path(self) -> str:
        """Path of the file below the root."""
        return f"{self.fingerprint}/{self.folder}/{file_name(self.key)}"


@dataclass(frozen=True, slots=True)
class OtherEntry:
    """File or folder of a namespace that is not a block.

    Attributes:
        abandoned: Whether it is a temporary file whose writer is dead.
        goes_along: Whether it is removed with a namespace that has no blocks. A foreign file, or a
            file that is still being written, keeps the namespace.
    """

    fingerprint: str
    abandoned: bool
    goes_along: bool


def file_name(key: BlockKey) -> str:
    """Name the file of a key: hexadecimal digits, so that no key can leave its folder."""
    if len(key) > MAX_KEY_BYTES:
        raise InvalidArgumentError("key", key, f"at most {MAX_KEY_BYTES} bytes")
    return key.hex() + SUFFIX


def file_names(keys: Sequence[BlockKey]) -> list[str]:
    """Name the files of keys, as `file_name` does."""
    if keys:
        file_name(max(keys, key=len))
    return [key.hex() + SUFFIX for key in keys]


def temporary_name(owner: str, number: int) -> str:
    """Name an unfinished file after the process that writes it and a number in that process."""
    return f"{owner}-{number:x}{SUFFIX}{TEMPORARY}"


def owner_of(name: str) -> str:
    """Get the owner from a `temporary_name`; empty for any other name."""
    found = _TEMPORARY_NAME.fullmatch(name)
    return found[1] if found else ""


def key_in_name(name: str) -> BlockKey:
    """Extract the key from a file's name; empty if it is not the name of a block file."""
    digits = name.removesuffix(SUFFIX)
    if digits == name or len(digits) % 2 or not set(digits) <= HEX_DIGITS:
        return BlockKey(b"")
    key = BlockKey(bytes.fromhex(digits))
    return key if GROUP_INDEX_BYTES < len(key) <= MAX_KEY_BYTES else BlockKey(b"")


def is_fingerprint(name: str) -> bool:
    """Whether a folder's name is that of a namespace."""
    return len(name) == FINGERPRINT_DIGITS and set(name) <= HEX_DIGITS


def is_block_folder(name: str) -> bool:
    """Whether a name is that of a folder for block files."""
    return name == QUARANTINE or (len(name) == 2 and set(name) <= HEX_DIGITS)


def is_owner(name: str) -> bool:
    """Whether a name can be that of an owner."""
    return len(name) == 2 * OWNER_BYTES and set(name) <= HEX_DIGITS


def claim_path(root: Path, owner: str) -> Path:
    """Return the path of a process's claim."""
    return root / f"{owner}{CLAIM_SUFFIX}"
