"""Conformance suite over each storage: `pytest examples/storages/conformance.py`."""

from pathlib import Path
from typing import ClassVar

import pytest

from examples.storages.storages import Storage, file_of, find_storages
from kvxfer import Backend, BlockKey, Namespace
from kvxfer.testing import BackendTests

STORAGES = find_storages()


class StorageTests(BackendTests):
    """The suite, over a storage in a temporary folder."""

    persistent = True
    stores_parts = False
    storage: ClassVar[Storage]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    async def make_backend(self, namespace: Namespace) -> Backend:
        """See `BackendSuite.make_backend`."""
        return self.storage.open(self.folder, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        """See `BackendSuite.corrupt`."""
        file = file_of(self.folder, key)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


class TestFirst(StorageTests):
    """kvxfer's own."""

    storage = STORAGES[0]


for _number, _storage in enumerate(STORAGES[1:]):
    globals()[f"TestOther{_number}"] = type(
        f"TestOther{_number}", (StorageTests,), {"storage": _storage, "__doc__": _storage.name}
    )
