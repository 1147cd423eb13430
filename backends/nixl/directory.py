"""Directory of peers: the endpoints at which blocks are held."""

from collections.abc import Sequence
from typing import Protocol

from kvxfer.backends.nixl.endpoint import Endpoint


class PeerDirectory(Protocol):
    """Directory of the peers that hold blocks; a discovery service can be one.

    Every process that shares blocks must see the same peers sooner or later: they determine where a
    block is, see `placement`.
    """

    async def peers(self) -> Sequence[Endpoint]:
        """List the present peers, each once, in any order; called for every batch."""


class StaticPeers:
    """Directory of peers that do not change.

    Args:
        endpoints: Endpoints of all peers.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    async def peers(self) -> Sequence[Endpoint]:
        """See `PeerDirectory.peers`."""
        return self._endpoints
