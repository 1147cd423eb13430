"""Retention: callers' wishes for how long to keep blocks, and backends that respect wishes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from kvxfer.checks import require_timeout
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import BlockMover
from kvxfer.storage.keys import BlockKey

logger = logging.getLogger(__name__)

MAX_PRIORITY = 10.0
DEFAULT_PRIORITY_SHARE = 0.5
DEFAULT_PRIORITY_HALF_LIFE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Caller's wish for how long to keep blocks, beyond what their use suggests.

    A wish changes the order of eviction and nothing else: no store fails because of it.

    Attributes:
        priority: From -10 to 10; 0 is normal. A block above 0 is evicted after normal ones, for as
            many half-lives as its priority; a block below 0 is evicted before them.
        ttl_s: Seconds from now, after which the block is evicted before all others; None for no
            limit.

    Raises:
        InvalidArgumentError: The priority is out of range, or the time is negative.
    """

    priority: float = 0.0
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.priority
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        if not is_number or not -MAX_PRIORITY <= given <= MAX_PRIORITY:
            raise InvalidArgumentError("priority", given, "a number from -10 to 10")
        object.__setattr__(self, "priority", float(given))
        object.__setattr__(self, "ttl_s", require_timeout("ttl_s", self.ttl_s))


NORMAL = Retention()


@runtime_checkable
class Retaining(Protocol):
    """Backend that evicts, and respects wishes.

    Its methods return at once and may be called on any thread.
    """

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """Note a wish for blocks; absent keys are ignored."""

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """Return what is left of the wish for each block."""


def retain_in(backend: BlockMover, keys: Sequence[BlockKey], retention: Retention) -> None:
    """Note a wish in a backend if that respects wishes; a failure is logged."""
    if (retaining := backend.provide(Retaining)) is not None:
        try:
            retaining.retain(keys, retention)
        except Exception:
            logger.exception("the retention of %d blocks cannot be noted", len(keys))


def retentions_in(backend: BlockMover, keys: Sequence[BlockKey]) -> list[Retention]:
    """Return the wishes noted in a backend; `NORMAL` if it does not respect wishes, or fails."""
    if (retaining := backend.provide(Retaining)) is not None:
        try:
            return retaining.retentions(keys)
        except Exception:
            logger.exception("the retention of %d blocks cannot be read", len(keys))
    return [NORMAL] * len(keys)


def copy_retentions(keys: Sequence[BlockKey], source: BlockMover, target: BlockMover) -> None:
    """Copy the wishes for blocks from one backend to another."""
    if target.provide(Retaining) is not None:
        for key, retention in zip(keys, retentions_in(source, keys), strict=True):
            if retention != NORMAL:
                retain_in(target, [key], retention)
