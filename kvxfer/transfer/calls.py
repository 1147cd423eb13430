"""Calls to a backend, whatever it does."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvxfer.errors import DeviceLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey

logger = logging.getLogger(__name__)

Move = Callable[[Sequence[BlockKey], Descriptors], Awaitable[Sequence[Outcome]]]


async def call_backend(
    move: Move, keys: Sequence[BlockKey], blocks: Descriptors
) -> Sequence[Outcome]:
    """Store or load a batch; every block is `FAILED` when the backend raises or miscounts.

    Of a lost device nobody can say whether it still touches memory.

    Args:
        move: `store` or `load` of a backend.
        keys: The keys.
        blocks: The blocks, one per key.

    Returns:
        One outcome per key, in order.
    """
    try:
        outcomes = await move(keys, blocks)
    except Exception as exc:
        name = getattr(move, "__name__", "transfer")
        logger.exception("%s of %d blocks failed", name, len(keys))
        safe = not isinstance(exc, DeviceLostError)
        return [Outcome(Status.FAILED, memory_safe=safe, reason=repr(exc))] * len(keys)
    if len(outcomes) != len(keys):
        reason = f"the backend gave {len(outcomes)} outcomes for {len(keys)} keys"
        return [Outcome(Status.FAILED, reason=reason)] * len(keys)
    return outcomes
