"""One backend among several, whose failures are its own."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import MISSING, Backend, Outcome, Status
from kvxfer.storage.calls import Calls, Move, call_backend
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging import StagedBlocks, StagingMemory

LOOKUP_TIMEOUT_S = 2.0
"""How long a tier may take to say what it has; then it is a miss there."""

MOVE_TIMEOUT_S = 10.0
"""How long a tier may take for one staging buffer of blocks, or for a delete. A disk that writes
2 MB/s is still in time."""

CLOSE_TIMEOUT_S = 30.0
"""How long a tier may take to close; then it is left behind."""

PAUSE_S = 5.0
"""How long a tier that did not answer in time is not asked again."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tier:
    """A backend that holds nothing while it fails or hangs.

    What it raises is logged and goes no further. One that does not answer in time is not asked
    for `PAUSE_S`, nor before what was left behind there has ended, so that no hanging tier takes
    more than its share of what the others need, too.

    Args:
        index: Position among the tiers, 0 for the fastest.
        backend: The backend.
        lookup_timeout_s: How long it may take to say what it has; None for as long as the caller
            waits.
        num_buffers: Staging buffers that it may have at one time.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        *,
        lookup_timeout_s: float | None = LOOKUP_TIMEOUT_S,
        num_buffers: int = 1,
    ) -> None:
        self.index = index
        self.backend = backend
        self._lookup_timeout_s = lookup_timeout_s
        self._name = f"tier {index} ({type(backend).__name__})"
        self._calls = Calls()
        self._silent_until = 0.0
        self._share = asyncio.Semaphore(num_buffers)

    @property
    def answers(self) -> bool:
        """Whether it may be asked: it answered the last time, or that is long enough ago."""
        return not self._calls.num_late and time.monotonic() >= self._silent_until

    async def lookup(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Ask which of `keys` are there; none when the backend fails or does not answer."""
        if not keys or not self.answers:
            return set()
        what = f"lookup of {len(keys)} blocks"
        found = await self._ask(what, self._lookup_timeout_s, self.backend.lookup(keys))
        if found is None or len(found) != len(keys):
            return set()
        return {key for key, there in zip(keys, found, strict=True) if there}

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; every block is `FAILED` when the backend fails."""
        return await self._move("store", keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; every block is `FAILED` when the backend fails."""
        return await self._move("load", keys, blocks)

    async def store_in_time(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """As `store`; every block is `TIMED_OUT` when it takes longer than `MOVE_TIMEOUT_S`."""
        return await self._move_in_time(self.store, keys, blocks)

    async def load_in_time(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """As `load`; every block is `TIMED_OUT` when it takes longer than `MOVE_TIMEOUT_S`."""
        return await self._move_in_time(self.load, keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`; none was there when the backend fails or does not answer."""
        deleted = None
        if self.answers:
            what = f"delete of {len(keys)} blocks"
            deleted = await self._ask(what, MOVE_TIMEOUT_S, self.backend.delete(keys))
        return deleted or [False] * len(keys)

    async def drain(self) -> None:
        """See `Backend.drain`; also waits for what was left behind."""
        await self._calls.drain()
        await self.backend.drain()

    async def aclose(self) -> None:
        """Close the backend; one that takes longer than `CLOSE_TIMEOUT_S` is left behind."""
        try:
            await self._calls.within(CLOSE_TIMEOUT_S, self.backend.aclose())
        except TimeoutError:
            logger.warning("%s: not closed after %g s", self._name, CLOSE_TIMEOUT_S)

    def hold(
        self, staging: StagingMemory, sizes: Sequence[int], starts: Sequence[int]
    ) -> AbstractAsyncContextManager[StagedBlocks]:
        """Hold a staging buffer for blocks on their way from or to this tier."""
        return staging.hold(sizes, starts, share=self._share)

    async def _ask(self, what: str, timeout_s: float | None, call: Awaitable[T]) -> T | None:
        """Await an answer; None when the backend fails or does not answer."""
        try:
            return await self._calls.within(timeout_s, call)
        except Exception as exc:
            if timeout_s is not None and type(exc) is TimeoutError:
                self._note_silence(what, timeout_s)
            else:
                logger.warning("%s: %s failed", self._name, what, exc_info=True)
        return None

    async def _move_in_time(
        self, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        try:
            return list(await self._calls.within(MOVE_TIMEOUT_S, move(keys, blocks)))
        except TimeoutError:
            self._note_silence(f"moving {len(keys)} blocks", MOVE_TIMEOUT_S)
        reason = f"{self._name} took longer than {MOVE_TIMEOUT_S:g} s"
        return [Outcome(Status.TIMED_OUT, memory_safe=False, reason=reason)] * len(keys)

    async def _move(
        self, verb: str, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move a batch, and log once what failed of it; one that does not answer has nothing."""
        if not self.answers:
            silent = Outcome(Status.TIMED_OUT, reason=f"{self._name} does not answer")
            return [MISSING if verb == "load" else silent] * len(keys)
        name = f"{self._name}: {verb}"
        move: Move = self.backend.store if verb == "store" else self.backend.load
        outcomes = await call_backend(move, keys, blocks, name=name)
        reasons = [outcome.reason for outcome in outcomes if outcome.status is Status.FAILED]
        if reasons:
            text = "%s of %d of %d blocks failed: %s"
            logger.warning(text, name, len(reasons), len(keys), reasons[0])
        return outcomes

    def _note_silence(self, what: str, timeout_s: float) -> None:
        self._silent_until = time.monotonic() + PAUSE_S
        text = "%s: %s took longer than %g s; it is not asked for %g s"
        logger.warning(text, self._name, what, timeout_s, PAUSE_S)
