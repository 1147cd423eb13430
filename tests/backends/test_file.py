"""The file backend keeps every promise of `Backend`: on ext4 and tmpfs, with every engine."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvxfer.backends.file import Integrity
from kvxfer.storage import Backend, BlockKey, Namespace, Status
from kvxfer.testing import BackendStateMachine, BackendTests, BlockMemory
from tests.backends.file_store import (
    capacity_of,
    flip_bit,
    hashed_keys,
    listed,
    open_store,
    path_of,
    places,
    sealed,
    secret_of,
    temporary_folder,
)
from tests.examples import examples


class FileBackendTests(BackendTests):
    persistent = True
    max_blocks = 5
    fields: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"
        self.own_fields = dict(self.fields)

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        return open_store(self.root, namespace, **self.own_fields)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        capacity = capacity_of(namespace, self.max_blocks)
        # Others fill the store, too; a busy machine's walks are slow, and would not be repeated.
        fields = {"capacity": capacity, "rescan_factor": 0.0}
        return open_store(self.root, namespace, **fields, **self.own_fields)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)


class TestFileBackend(FileBackendTests):
    @pytest.fixture(autouse=True, params=places("posix-tmpfs", "uring-ext4"))
    def _engine(self, request: pytest.FixtureRequest, _place: None) -> Iterator[None]:
        self.own_fields["engine"], file_system = request.param.split("-")
        with temporary_folder(file_system) as folder:
            self.root = folder / "store"
            yield


class TestFileBackendKeyed(FileBackendTests):
    """Suite with options other than the defaults: secret, durable, ARC, no O_DIRECT, one thread."""

    fields: ClassVar[dict[str, Any]] = {
        "direct": "off",
        "eviction": "arc",
        "engine": "posix",
        "durability": "fsync",
        "read_threads": 1,
        "write_threads": 1,
    }

    @pytest.fixture(autouse=True)
    def _secret(self, _place: None) -> None:
        secret = secret_of(self.root, "secret")
        self.own_fields |= {"integrity": Integrity.KEYED, "secret_file": str(secret)}


class TestFileBackendSealed(FileBackendTests):
    @pytest.fixture(autouse=True)
    def _secret(self, _place: None) -> None:
        self.own_fields |= sealed(self.root, "new", "old", tenant="tenant")


class TestFileBackendOfTensors(FileBackendTests):
    """Suite with files that list tensors, in headers of several pages."""

    stores_parts = False

    async def make_backend(self, namespace: Namespace) -> Backend:
        return await super().make_backend(listed(namespace))

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return await super().make_bounded_backend(listed(namespace))

    async def test_a_chunk_stored_without_its_head_never_passes_for_a_whole_one(self) -> None:
        """The chunk without its head is not stored, and the one after it is."""
        memory, keys = BlockMemory([[64]], num_blocks=24, blocks_per_chunk=4), hashed_keys(2)
        async with await self.make_backend(memory.namespace()) as backend:
            source = memory.describe(0, range(7), first_block_index=1)
            stored = await backend.store(keys, source)
            assert [outcome.status for outcome in stored] == [Status.FAILED, Status.DONE]
            assert await backend.lookup(keys) == [False, True]


class FileStateMachine(BackendStateMachine):
    persistent = True
    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvxfer-test-"))
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.root)

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_store(self.root, namespace, **self.fields)


class BoundedFileStateMachine(FileStateMachine):
    bounded = True
    fields: ClassVar[dict[str, Any]] = {"eviction": "arc", "direct": "off"}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_store(self.root, namespace, capacity=capacity_of(namespace, 3), **self.fields)


TestFileStateMachine = FileStateMachine.TestCase
TestBoundedFileStateMachine = BoundedFileStateMachine.TestCase
# Every example opens backends, with their threads, in a folder of its own.
TestFileStateMachine.settings = examples(6, steps=20)
TestBoundedFileStateMachine.settings = examples(6, steps=20)
