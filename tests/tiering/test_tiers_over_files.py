"""Tiers of host memory and files keep every promise of `Backend`."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer import runtime
from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.storage.backend import DONE, Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests, BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.transfer.engine import TransferEngine
from kvxfer.units import ByteSize
from tests.backends.file_store import flip_bit, open_store, path_of, places, temporary_folder
from tests.examples import examples
from tests.tiering.opened_tiers import open_tiers

MAX_LOOKUPS = 10_000
LIMIT_S = 15.0


class TestHostOverFiles(BackendTests):
    """Suite in which chunks of the large batches do not all fit into the first tier.

    Tiers do not know how files are moved, so one file engine is enough; `test_file.py` has all.
    """

    persistent = True

    @pytest.fixture(autouse=True, params=places("posix-ext4"))
    def _place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.engine, file_system = request.param.split("-")
        with temporary_folder(file_system) as folder:
            self.root = folder / "store"
            yield

    async def make_backend(self, namespace: Namespace) -> Backend:
        self.namespace = namespace
        config = HostConfig(capacity=ByteSize(4 << 20), integrity=MemoryIntegrity.FULL)
        self.host = HostBackend(config, namespace)
        self.file = open_store(self.root, namespace, engine=self.engine)
        return open_tiers([self.host, self.file], namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        for _ in range(MAX_LOOKUPS):  # it cascades in the background
            if await self.file.lookup([key]) == [True]:
                break
        flip_bit(path_of(self.root, self.namespace, key), 8 * 4096)
        self.host._pool.slots[self.host._index.slot_of(key)][0, 0] ^= 1


class HostOverFilesStateMachine(BackendStateMachine):
    persistent = True

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvxfer-test-"))
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.root)

    async def make_backend(self, namespace: Namespace) -> Backend:
        host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)
        return open_tiers([host, open_store(self.root, namespace)], namespace)


TestHostOverFilesStateMachine = HostOverFilesStateMachine.TestCase
TestHostOverFilesStateMachine.settings = examples(6, steps=20)


class HungMetadata:
    """`stat` that hangs below one folder, like a file server that is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.is_gone = False
        stat = os.stat

        def hang(*args: Any, **kwargs: Any) -> os.stat_result:
            if self.is_gone and kwargs.get("dir_fd") is not None:
                assert self.answers.wait(LIMIT_S)
            return stat(*args, **kwargs)

        monkeypatch.setattr(runtime.disk(), "stat", hang)


async def test_files_whose_metadata_hangs_hold_up_neither_host_memory_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, keys = BlockMemory([[4096]], num_blocks=16), make_keys(6)
    namespace, server = memory.namespace(), HungMetadata(monkeypatch)
    file = open_store(tmp_path / "store", namespace, close_timeout_s=0.05)
    host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)
    tiers = TieredBackend([host, file], namespace, timeouts=TierTimeouts(lookup_s=0.5))
    async with TransferEngine(memory.caches, tiers, timeout_s=LIMIT_S) as engine:
        assert await engine.store(keys[:2], [[0, 1]]) == [DONE] * 2
        assert await engine.flush(timeout_s=LIMIT_S)
        server.is_gone = True
        assert await engine.store(keys[2:4], [[2, 3]]) == [DONE] * 2, "host memory has room"
        assert await engine.lookup(keys) == [True] * 4 + [False] * 2
        assert await engine.load(keys[:4], [[8, 9, 10, 11]]) == [DONE] * 4
        cancelled = asyncio.ensure_future(file.lookup(keys[:1]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not await engine.flush(timeout_s=0.01)
    assert "tier 1 (FileBackend): lookup of 2 blocks took longer" in caplog.text
    assert "2 blocks were not written back" in caplog.text
    assert "calls still run after 0.05 s and are abandoned" in caplog.text
    server.answers.set()
