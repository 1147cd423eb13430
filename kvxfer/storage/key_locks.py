"""Locks of keys: exclusive use of a key by one operation at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from kvxfer.runtime import outlive_caller
from kvxfer.storage.keys import BlockKey

T = TypeVar("T")


class KeyLocks:
    """Exclusive locks of keys, held e.g. while blocks are moved between tiers.

    Owned by one event loop. A batch is locked as a whole or not at all, so that no two batches
    ever wait for each other. Callers of `acquire` take turns in the order of their calls.
    """

    def __init__(self) -> None:
        self._ends: dict[BlockKey, asyncio.Event] = {}
        self._turns: dict[BlockKey, _Turn] = {}  # last turn in the queue of each key

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    def is_wanted(self, key: BlockKey) -> bool:
        """Whether a key is locked, or a caller waits for its turn."""
        return key in self._ends or key in self._turns

    async def wait_for_others(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Wait for the holder of each locked key; for other keys, for the last turn in the queue.

        Later callers may hold the keys by then: the wait ends, however often keys are locked. By
        default, waits for all keys that are locked.
        """
        wanted = list(self._ends) if keys is None else keys
        ends = [self._ends.get(key) or self._turns.get(key) for key in wanted]
        for end in filter(None, ends):
            await end.wait()

    async def wait(self, keys: Iterable[BlockKey]) -> None:
        """Wait until none of these keys is locked."""
        keys = list(keys)
        while ends := [self._ends[key] for key in keys if key in self._ends]:
            await ends[0].wait()

    @contextmanager
    def hold(self, keys: Sequence[BlockKey]) -> Iterator[None]:
        """Lock keys that are not locked, until the context ends."""
        assert self._ends.keys().isdisjoint(keys)
        end = asyncio.Event()
        self._ends |= dict.fromkeys(keys, end)
        try:
            yield
        finally:
            for key in keys:
                del self._ends[key]
            end.set()

    async def hold_during(
        self, keys: Sequence[BlockKey], call: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Wait until the keys are not locked, and lock them while a call runs.

        Once begun, the call goes on if its caller is cancelled, and the keys stay locked.
        """
        await self.wait(keys)
        with ExitStack() as held:
            held.enter_context(self.hold(keys))
            calling = asyncio.ensure_future(call())
            kept = held.pop_all()
            calling.add_done_callback(lambda _: kept.close())
        return await outlive_caller(calling)

    @asynccontextmanager
    async def acquire(self, keys: Sequence[BlockKey]) -> AsyncIterator[None]:
        """Wait until the keys are not locked, and lock them until the context ends."""
        turn = _Turn({key: self._turns[key] for key in keys if key in self._turns})
        self._turns |= dict.fromkeys(keys, turn)
        try:
            for key in list(turn.before):
                while before := turn.find_before(key):
                    await before.wait()
            await self.wait(keys)
            turn.before.clear()
            with self.hold(keys):
                yield
        finally:
            turn.set()
            for key in keys:
                if self._turns.get(key) is not turn:
                    continue
                if turn.before and (before := turn.find_before(key)):
                    self._turns[key] = before
                else:
                    del self._turns[key]


class _Turn(asyncio.Event):
    """Turn of a batch in the queues of its keys; set when it has ended or was given up.

    Attributes:
        before: Turns that it waits for, by key; empty once the turn has come.
    """

    def __init__(self, before: dict[BlockKey, "_Turn"]) -> None:
        super().__init__()
        self.before = before

    def find_before(self, key: BlockKey) -> "_Turn | None":
        """Find the last turn before this one that has not ended; None if this is the first.

        If an earlier turn was given up, this one waits for the turn before that.
        """
        before = self.before.pop(key, None)
        while before is not None and before.is_set():
            before = before.before.get(key)
        if before is not None:
            self.before[key] = before
        return before
