"""Storages of others as backends of kvxfer, with their own keys and without its checksums."""

from pathlib import Path

from kvxfer import BlockKey, BytesBackend, Namespace
from kvxfer.storage.integrity import Integrity


class WrappedStorage(BytesBackend):
    """Backend over a storage of others in files, which is to be tested: it gets bytes alone.

    Args:
        namespace: Namespace of the blocks. A storage gets of it what its own keys have.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        super().__init__(namespace, integrity=Integrity.OFF)
        self.folder = folder

    def name_of(self, key: BlockKey) -> str:
        """See `BytesBackend.name_of`. The key alone: it is the storage that is tested."""
        return key.hex()
