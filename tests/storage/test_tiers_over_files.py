"""The tiers that people use keep every promise of `Backend`."""

from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.tiers import TieredBackend
from kvxfer.testing import BackendTests
from kvxfer.units import ByteSize


class TestHostOverFiles(BackendTests):
    """Chunks of the large batches do not all fit into the first tier."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_backend(self, namespace: Namespace) -> Backend:
        host = HostConfig(capacity=ByteSize(4 << 20))
        file = FileConfig(path=str(self.root), capacity=ByteSize(1 << 30), min_free=ByteSize(1))
        return TieredBackend(
            [HostBackend(host, namespace), FileBackend(file, namespace)], namespace
        )
