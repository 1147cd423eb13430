"""Third-party storages as backends, with their own keys and without kvxfer's checksums."""

from pathlib import Path

from kvxfer import BlockKey, BytesBackend, Namespace
from kvxfer.storage.integrity import Integrity


class WrappedStorage(BytesBackend):
    """Backend over a third-party storage in files, which gets nothing but names and bytes.

    Args:
        namespace: Namespace of the blocks. A storage gets only the fields that its keys have.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        super().__init__(namespace, integrity=Integrity.OFF)
        self.folder = folder

    def name_of(self, key: BlockKey) -> str:
        """See `BytesBackend.name_of`. Only the key, since the storage itself is under test."""
        return key.hex()
