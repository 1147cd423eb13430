"""One engine behind the proxy, and its ejection after failures."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from examples.proxy.legs import Lender
from kvxfer.errors import KVXferError

FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0

logger = logging.getLogger(__name__)


class EngineFailedError(KVXferError):
    """Engine that could not be reached, broke off, or answered with an error."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Engine:
    """One engine, the number of its requests in progress, and its ejection.

    A failure ejects the engine for 0.5 s; each further failure in a row doubles that time, up to
    30 s. Then the engine is probed, and comes back or stays ejected.

    Attributes:
        lenders: Addresses at which it lends blocks, by its answers since the last ejection.
        ejected: Event that is set while the engine is ejected.
        retry_at_s: Time of the event loop at which it may be probed, while it is ejected.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_requests = 0
        self.lenders: set[Lender] = set()
        self.ejected = asyncio.Event()
        self.retry_at_s = 0.0
        self._num_failures = 0

    @property
    def lender(self) -> Lender | None:
        """Address at which it lends the blocks of any prompt; None if unknown, or with replicas."""
        return next(iter(self.lenders)) if len(self.lenders) == 1 else None

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request that is in progress inside the block."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def eject(self, reason: str, now_s: float) -> None:
        """Eject the engine for a while, longer after each failure in a row."""
        back_off_s = min(FIRST_BACK_OFF_S * 2.0 ** min(self._num_failures, 32), MAX_BACK_OFF_S)
        self._num_failures += 1
        self.retry_at_s = now_s + back_off_s
        self.lenders.clear()
        if not self.ejected.is_set():
            logger.warning("ejected %s for %.1f s: %s", self.url, back_off_s, reason)
        self.ejected.set()

    def bring_back(self) -> None:
        """End the ejection, but remember the failures: no request has succeeded yet."""
        if self.ejected.is_set():
            logger.info("%s is back", self.url)
        self.ejected.clear()

    def succeeded(self) -> None:
        """End the ejection, and forget the failures: a request has succeeded."""
        self.bring_back()
        self._num_failures = 0
