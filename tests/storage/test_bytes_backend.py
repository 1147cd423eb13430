"""BytesBackend: four methods over bytes are a backend, verified, that never waits for a hang."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer import Backend, BlockKey, BytesBackend, Namespace, Status, make_block_key
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.integrity import Integrity
from kvxfer.testing import BackendTests, BlockMemory
from kvxfer.testing.conformance.suite import cancel, store_generated, yield_to_loop
from kvxfer.testing.payloads import read_payloads

KEYS = [make_block_key(b"%d" % index) for index in range(3)]
LIMIT_S = 10.0


class FolderBackend(BytesBackend):
    """Values in files of a folder, named as the base class names them."""

    def __init__(
        self, folder: Path, namespace: Namespace, integrity: Integrity = Integrity.FAST
    ) -> None:
        super().__init__(namespace, integrity=integrity)
        self.folder = folder
        self.num_closed = 0

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        for name, value in zip(names, values, strict=True):
            written = self.folder / f".{name}.{threading.get_ident()}"
            written.write_bytes(value)
            written.rename(self.folder / name)
        return [True] * len(names)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._read_file(self.folder / name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [(self.folder / name).exists() for name in names]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        self.num_closed += 1

    def _read_file(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


class TestFolderBackend(BackendTests):
    persistent = True
    stores_parts = False

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    async def make_backend(self, namespace: Namespace) -> Backend:
        return FolderBackend(self.folder, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, FolderBackend)
        file = self.folder / backend.name_of(key)
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[96, 33]], num_blocks=8)


async def test_a_value_of_another_block_or_length_is_corrupt_once(
    memory: BlockMemory, tmp_path: Path
) -> None:
    async with FolderBackend(tmp_path, memory.namespace()) as backend:
        await store_generated(backend, KEYS, memory.describe(0, range(3)))
        first, second, third = (tmp_path / backend.name_of(key) for key in KEYS)
        first.write_bytes(second.read_bytes())
        third.write_bytes(third.read_bytes()[:-1])
        for expected in (Status.CORRUPT, Status.MISSING):
            outcomes = await backend.load(KEYS, memory.describe(0, range(4, 7)))
            assert [each.status for each in outcomes] == [expected, Status.DONE, expected]


async def test_without_integrity_a_value_is_the_bytes_alone(
    memory: BlockMemory, tmp_path: Path
) -> None:
    async with FolderBackend(tmp_path, memory.namespace(), Integrity.OFF) as backend:
        blocks = memory.describe(0, [0])
        await store_generated(backend, KEYS[:1], blocks)
        assert (tmp_path / backend.name_of(KEYS[0])).read_bytes() == read_payloads(blocks)[0]
    with pytest.raises(InvalidArgumentError, match="integrity"):
        FolderBackend(tmp_path, memory.namespace(), Integrity.SEALED)


async def test_a_storage_that_hangs_is_left_and_its_late_removal_takes_no_newer_value(
    memory: BlockMemory, tmp_path: Path
) -> None:
    may_go_on = threading.Event()

    class Hanging(FolderBackend):
        def remove(self, names: Sequence[str]) -> None:
            may_go_on.wait(LIMIT_S)
            super().remove(names)

    backend, blocks = Hanging(tmp_path, memory.namespace()), memory.describe(0, range(1))
    await store_generated(backend, KEYS[:1], blocks)
    deleting = asyncio.ensure_future(backend.delete(KEYS[:1]))
    await yield_to_loop(5)
    await cancel(deleting)
    assert await backend.lookup(KEYS[:1]) == [True]  # nobody waited for it
    (tmp_path / backend.name_of(KEYS[0])).unlink()
    storing = asyncio.ensure_future(backend.store(KEYS[:1], blocks))
    for _ in range(8):  # turns of the same threads, in which the store could overtake
        await backend.lookup(KEYS[1:])
    may_go_on.set()
    assert [each.done for each in await storing] == [True]
    await backend.aclose()  # when all calls have ended
    assert (tmp_path / backend.name_of(KEYS[0])).exists()
    await backend.aclose()
    assert backend.num_closed == 1


async def test_errors_of_the_storage_are_those_of_a_backend(
    memory: BlockMemory, tmp_path: Path
) -> None:
    backend = FolderBackend(tmp_path / "gone", memory.namespace())
    with pytest.raises(BackendUnavailableError, match="FolderBackend: FileNotFoundError"):
        await backend.store(KEYS[:1], memory.describe(0, [0]))
    await backend.aclose()


async def test_a_value_that_the_storage_refuses_costs_its_block_alone(
    memory: BlockMemory, tmp_path: Path
) -> None:
    class Full(FolderBackend):
        def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
            super().put(names[:1], values[:1])
            return [True, *[False] * (len(names) - 1)]

    async with Full(tmp_path, memory.namespace()) as backend:
        outcomes = await backend.store(KEYS, memory.describe(0, range(3)))
        assert [each.status for each in outcomes] == [Status.DONE, *[Status.FAILED] * 2]
        assert await backend.lookup(KEYS) == [True, False, False]
