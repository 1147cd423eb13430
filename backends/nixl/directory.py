"""Which peers there are."""

from collections.abc import Sequence
from typing import Protocol

from kvxfer.backends.nixl.endpoint import Endpoint


class PeerDirectory(Protocol):
    """Knows the peers that hold blocks; a discovery service can be one.

    Every process that shares blocks must see the same peers sooner or later: where a block is
    follows from them, see `placement`.
    """

    async def peers(self) -> Sequence[Endpoint]:
        """Say which peers there are now, each once, in any order; asked again and again."""


class StaticPeers:
    """Peers that do not change.

    Args:
        endpoints: All of them.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    async def peers(self) -> Sequence[Endpoint]:
        """See `PeerDirectory.peers`."""
        return self._endpoints
