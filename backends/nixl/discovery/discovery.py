"""Discovery: the interface of what finds peers that come and go."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from kvxfer.backends.nixl.discovery.announcement import Announcement
from kvxfer.endpoint import Endpoint
from kvxfer.storage.gauge import Gauge


class Discovery(ABC):
    """Directory of peers that come and go, and where a holder announces itself.

    Implementors must answer `peers` at once, with those known last while they cannot tell who is
    there, and must never raise because a service is down.
    """

    @abstractmethod
    async def peers(self) -> Sequence[Endpoint]:
        """See `PeerDirectory.peers`."""

    @abstractmethod
    async def follow(self) -> None:
        """Begin to find out who is there; wait a moment for the first answer. May be repeated."""

    @abstractmethod
    async def announce(self, at: Endpoint, describe: Callable[[], Announcement]) -> None:
        """Begin to announce this process; may be repeated.

        Args:
            at: Where others reach it.
            describe: Describes it; called again and again, since its namespace may be settled.
        """

    @abstractmethod
    async def withdraw(self) -> None:
        """End the announcement, so that others look elsewhere; may be called again."""

    @abstractmethod
    async def aclose(self) -> None:
        """Withdraw, and end everything, within seconds; may be called again."""

    @abstractmethod
    def gauges(self) -> Mapping[Gauge, float]:
        """State for observers: peers that are known, and whether it works."""
