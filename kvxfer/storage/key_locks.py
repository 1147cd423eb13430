"""Locks of keys: exclusive use of a key by one operation at a time."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvxfer.storage.keys import BlockKey


class KeyLocks:
    """Exclusive locks of keys, held e.g. while blocks are moved between tiers.

    Owned by one event loop. A batch is locked as a whole or not at all, so that no two batches
    ever wait for each other.
    """

    def __init__(self) -> None:
        self._ends: dict[BlockKey, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    async def wait(self, keys: Iterable[BlockKey]) -> None:
        """Wait until none of these keys is locked."""
        keys = list(keys)
        while ends := [self._ends[key] for key in keys if key in self._ends]:
            await ends[0].wait()

    async def wait_for_all(self) -> None:
        """Wait until no key is locked."""
        while self._ends:
            await self.wait(list(self._ends))

    @contextmanager
    def hold(self, keys: Sequence[BlockKey]) -> Iterator[None]:
        """Lock keys that are not locked, until the context ends."""
        assert not any(key in self._ends for key in keys)
        end = asyncio.Event()
        self._ends |= dict.fromkeys(keys, end)
        try:
            yield
        finally:
            for key in keys:
                del self._ends[key]
            end.set()

    @asynccontextmanager
    async def acquire(self, keys: Sequence[BlockKey]) -> AsyncIterator[None]:
        """Wait until the keys are not locked, and lock them until the context ends."""
        await self.wait(keys)
        with self.hold(keys):
            yield
