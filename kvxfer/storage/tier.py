"""One backend among several, whose failures are its own."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[BlockKey]], Awaitable[Sequence[bool]]]
Move = Callable[[Sequence[BlockKey], Descriptors], Awaitable[Sequence[Outcome]]]


async def drain(tiers: "Sequence[Tier]") -> None:
    """See `Backend.drain`."""
    for tier in tiers:
        await tier.backend.drain()


class Tier:
    """A backend that holds nothing while it fails: what it raises is logged and goes no further.

    Args:
        index: Position among the tiers, 0 for the fastest.
        backend: The backend.
    """

    def __init__(self, index: int, backend: Backend) -> None:
        self.index = index
        self.backend = backend
        self._name = f"tier {index} ({type(backend).__name__})"

    async def lookup(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Ask which of `keys` are there; none when the backend fails."""
        return await self._ask("lookup", self.backend.lookup, keys) if keys else set()

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; every block is `FAILED` when the backend fails."""
        return await self._move("store", self.backend.store, keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; every block is `FAILED` when the backend fails."""
        return await self._move("load", self.backend.load, keys, blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Forget `keys`; return those that were removed, none when the backend fails."""
        return await self._ask("delete", self.backend.delete, keys)

    async def _ask(self, verb: str, ask: Ask, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those of `keys` of which the backend says yes."""
        try:
            answers = await ask(keys)
            return {key for key, answer in zip(keys, answers, strict=True) if answer}
        except Exception:
            logger.warning("%s: %s of %d blocks failed", self._name, verb, len(keys), exc_info=True)
            return set()

    async def _move(
        self, verb: str, move: Move, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> list[Outcome]:
        """Move a batch, and log once what failed of it."""
        try:
            outcomes = list(await move(keys, blocks))
        except Exception as exc:
            logger.warning("%s: %s of %d blocks failed", self._name, verb, len(keys), exc_info=True)
            return [Outcome(Status.FAILED, reason=f"{self._name}: {exc!r}")] * len(keys)
        if len(outcomes) != len(keys):
            reason = f"{self._name} gave {len(outcomes)} outcomes for {len(keys)} keys"
            outcomes = [Outcome(Status.FAILED, reason=reason)] * len(keys)
        reasons = [outcome.reason for outcome in outcomes if outcome.status is Status.FAILED]
        if reasons:
            text = "%s: %s of %d of %d blocks failed: %s"
            logger.warning(text, self._name, verb, len(reasons), len(keys), reasons[0])
        return outcomes
