"""Thin wrappers: storages of others become backends of kvxfer, which its test kit can run."""

import asyncio
import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvxfer import Backend, BlockKey, Descriptors, Namespace, Outcome, Status
from kvxfer.storage.backend import DONE, MISSING
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.keys import group_of

WHOLE_ONLY = Outcome(Status.FAILED, reason="this storage keeps whole chunks only")


class WrappedStorage(Backend):
    """Backend over a storage of others that blocks its caller; each call is made on a thread.

    Args:
        folder: Folder of the storage.
        namespace: Namespace of the blocks. A storage gets of it what its own keys have.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        self.folder = folder
        self.namespace = namespace
        self._guard = CallGuard(type(self).__name__, namespace)

    @abstractmethod
    def put(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """Store chunks, uint8; return for each whether it is stored."""

    @abstractmethod
    def get(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """Load into these chunks; return for each whether the storage calls it loaded."""

    @abstractmethod
    def has(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return for each key whether the storage says that it is there."""

    @abstractmethod
    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove chunks."""

    def close(self) -> None:
        """Close the storage."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        self._guard.check_batch(keys)
        return await asyncio.to_thread(self.has, keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        self._guard.check_batch(keys, blocks)
        whole = [self._is_whole(key, blocks, index) for index, key in enumerate(keys)]
        chosen = [key for key, is_whole in zip(keys, whole, strict=True) if is_whole]
        chunks = [_read(blocks, index) for index, is_whole in enumerate(whole) if is_whole]
        stored = dict(zip(chosen, await asyncio.to_thread(self.put, chosen, chunks), strict=True))
        there = dict(zip(keys, await asyncio.to_thread(self.has, keys), strict=True))
        failed = Outcome(Status.FAILED, reason="refused")
        return [
            DONE if stored.get(key, there[key]) else (failed if key in stored else WHOLE_ONLY)
            for key in keys
        ]

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        self._guard.check_batch(keys, blocks)
        chunks = [torch.empty(self._chunk_bytes(key), dtype=torch.uint8) for key in keys]
        loaded = await asyncio.to_thread(self.get, keys, chunks)
        for index, is_loaded in enumerate(loaded):
            if is_loaded:
                _write(blocks, index, chunks[index])
        return [DONE if is_loaded else MISSING for is_loaded in loaded]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        there = await self.lookup(keys)
        await asyncio.to_thread(self.remove, keys)
        return there

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        if self._guard.close():
            await asyncio.to_thread(self.close)

    def _chunk_bytes(self, key: BlockKey) -> int:
        return self.namespace.chunk_size_bytes(group_of(key))

    def _is_whole(self, key: BlockKey, blocks: Descriptors, index: int) -> bool:
        return int(blocks.block_sizes[index]) == self._chunk_bytes(key)


def _fragments(blocks: Descriptors, index: int) -> list[tuple[int, int]]:
    block = blocks.select(index, index + 1)
    return list(zip(block.addresses.tolist(), block.lengths.tolist(), strict=True))


def _read(blocks: Descriptors, index: int) -> torch.Tensor:
    payload = b"".join(ctypes.string_at(*each) for each in _fragments(blocks, index))
    return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


def _write(blocks: Descriptors, index: int, chunk: torch.Tensor) -> None:
    position = chunk.data_ptr() + int(blocks.payload_starts[index])
    for address, length in _fragments(blocks, index):
        ctypes.memmove(address, position, length)
        position += length
