"""Suspension of a tier, or of a peer, that missed a deadline."""

import logging
from math import inf

logger = logging.getLogger(__name__)


class Suspension:
    """Suspension of a tier: for a while after a missed deadline every key is a miss there.

    Args:
        name: Name of the tier in the log.
        pause_s: Time that the tier is not used.
        what: Word for it in the log.
    """

    def __init__(self, name: str, pause_s: float, *, what: str = "the tier") -> None:
        self._name = name
        self._what = what
        self._pause_s = pause_s
        self._until = -inf

    def is_on(self, now: float) -> bool:
        """Whether the tier is not to be used."""
        return now < self._until

    def begin(self, now: float, call: str, timeout_s: float) -> None:
        """Suspend the tier, or suspend it for longer, since a call took longer than its timeout."""
        if not self.is_on(now):
            text = "%s: %s took longer than %g s; %s is not used for %g s"
            logger.warning(text, self._name, call, timeout_s, self._what, self._pause_s)
        self._until = now + self._pause_s
