"""Deadlines of the tier below vLLM's host memory."""

from dataclasses import dataclass

from kvxfer.tiering.timeouts import TierTimeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTierTimeouts(TierTimeouts):
    """Deadlines of the tier below host memory, in seconds.

    Attributes:
        store_s: For a store.
        reset_s: For `LowerTier.reset`, which blocks, as `close` does.
    """

    store_s: float = 60.0
    reset_s: float = 5.0
