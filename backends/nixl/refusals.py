"""Refusals: what the log says of connections that are refused, so little that none can fill it."""

import logging

from kvxfer import runtime
from kvxfer.text import printable

PERIOD_S = 1.0
"""Period in which an address has one line."""
MAX_ADDRESSES = 64
"""Most addresses that have lines of their own within a period; all others share one line."""
MAX_CHARACTERS = 2000
"""Most characters of a line about a peer, before control characters are escaped."""

logger = logging.getLogger(__name__)


class RefusalLog:
    """Log of refused connections: one line of a kind for each address and second.

    The next line counts those that were left out before.
    """

    def __init__(self) -> None:
        self._quiet_until: dict[tuple[str, str], float] = {}
        self._num_left_out = 0

    def note(self, level: int, text: str, peer: str, reason: object) -> None:
        """Write a line, unless there was one like it within the last second.

        Args:
            level: Level of the line.
            text: The line, with `%s` for the reason; lines of one text are of one kind.
            peer: Address and port of the other side.
            reason: Reason; text of strangers in it is made printable and short.
        """
        now = runtime.monotonic()
        at = text, peer.rpartition(":")[0]
        if at not in self._quiet_until and len(self._quiet_until) >= MAX_ADDRESSES:
            known = self._quiet_until.items()
            self._quiet_until = {each: until for each, until in known if now < until}
            if len(self._quiet_until) >= MAX_ADDRESSES:
                at = text, ""
        if now < self._quiet_until.get(at, 0.0):
            self._num_left_out += 1
            return
        self._quiet_until[at] = now + PERIOD_S
        left_out = f" ({self._num_left_out} more were left out)" if self._num_left_out else ""
        self._num_left_out = 0
        logger.log(level, text, f"{printable(reason, MAX_CHARACTERS)}{left_out}")
