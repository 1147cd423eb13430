"""The file backend keeps every promise of `Backend`, on ext4 and on tmpfs."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.file.folder import file_name
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests
from kvxfer.units import ByteSize

GIB = ByteSize(1 << 30)
SMALL = ByteSize(1)


def config(path: Path, **fields: object) -> FileConfig:
    defaults = {"capacity": GIB, "min_free": SMALL}
    return FileConfig(path=str(path), **(defaults | fields))  # type: ignore[arg-type]


def path_of(root: Path, namespace: Namespace, key: BlockKey) -> Path:
    name = file_name(key)
    return root / namespace.fingerprint / name[:2] / name


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["ext4", "tmpfs"])
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on a disk, and one in memory."""
    parent = "/dev/shm" if request.param == "tmpfs" else None  # noqa: S108 - a tmpfs on purpose
    folder = tempfile.mkdtemp(prefix="kvxfer-test-", dir=parent)
    yield Path(folder) / "store"
    shutil.rmtree(folder)


class TestFileBackend(BackendTests):
    persistent = True
    max_blocks = 5

    @pytest.fixture(autouse=True)
    def _place(self, root: Path) -> None:
        self.root = root

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        return FileBackend(config(self.root), namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        groups = range(len(namespace.groups))
        chunk = max(namespace.chunk_size_bytes(group) for group in groups)
        capacity = self.max_blocks * (4096 + -(-chunk // 4096) * 4096)
        return FileBackend(config(self.root, capacity=ByteSize(capacity)), namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        flip_byte(path_of(self.root, self.namespace, key), 4096)
