"""Preloading: the blocks used last of a lower tier are brought into the first one."""

import asyncio
import logging
from typing import Protocol, runtime_checkable

from kvxfer import runtime
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import Lender
from kvxfer.tiering.tiered_backend import tiers_of

BATCH_BLOCKS = 64
"""Blocks that are brought up at one time."""

logger = logging.getLogger(__name__)


@runtime_checkable
class RemembersUse(Protocol):
    """Backend that knows which of its blocks were used last."""

    async def recently_used(self, num_blocks: int) -> list[BlockKey]:
        """Find the blocks that were used last, the very last one first."""


async def preload(backend: Backend, num_blocks: int, timeout_s: float) -> int:
    """Bring the blocks used last into the first tier, the very last one first.

    They are verified on their way; a corrupt one stays below, and the log says why.

    Args:
        backend: The tiers.
        num_blocks: Most blocks to bring up; no more than the first tier has room for, or the
            first ones would be evicted for the last ones.
        timeout_s: Seconds after which the rest stays below.

    Returns:
        Number of blocks that are in the first tier.
    """
    began = runtime.monotonic()
    first, *lower = tiers_of(backend)
    known: list[BlockKey] = []
    found: list[BlockKey] = []
    try:
        async with asyncio.timeout(timeout_s):
            for tier in lower:
                if (remembering := tier.provide(RemembersUse)) is not None:
                    known = await remembering.recently_used(num_blocks)
                    for start in range(0, len(known), BATCH_BLOCKS):
                        batch = known[start : start + BATCH_BLOCKS]
                        await backend.lookup(batch)
                        there = await first.lookup(batch)
                        found += [key for key, each in zip(batch, there, strict=True) if each]
                    break
    except TimeoutError:
        logger.warning("preloading was cut off after %g s", timeout_s)
    if found and (lender := first.provide(Lender)) is not None:
        lender.peek(found)  # counts as a use: the last one used is the last one to be evicted
    text = "preloaded %d of the %d blocks used last in %.1f s"
    logger.info(text, len(found), len(known), runtime.monotonic() - began)
    return len(found)
