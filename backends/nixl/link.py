"""The way to one peer's memory, by NIXL."""

import contextlib

import numpy as np

from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.transfer_agent import Operation, TransferAgent
from kvxfer.backends.nixl.transport import Transport
from kvxfer.errors import ClosedError
from kvxfer.kvcache.descriptors import Descriptors, pair_fragments


class Link:
    """Moves bytes between registered memory here and that of one peer.

    Args:
        agent: Moves them.
        peer: What the agent calls the peer.
        carrier: What carries them.
        remote: The peer's registered memory.
    """

    def __init__(
        self, agent: TransferAgent, peer: str, carrier: Transport, remote: RegionTable
    ) -> None:
        self.carrier = carrier
        self.remote = remote
        self._agent = agent
        self._peer = peer

    async def read(self, theirs: Descriptors, ours: Descriptors) -> None:
        """Copy blocks of the peer's memory to ours.

        Raises:
            TransferFailedError: Some bytes may have been moved; our memory is quiet.
            asyncio.CancelledError: As before.
        """
        await self._transfer(Operation.READ, ours, theirs)

    async def write(self, ours: Descriptors, theirs: Descriptors) -> None:
        """Copy blocks of our memory to the peer's; errors as `read`."""
        await self._transfer(Operation.WRITE, ours, theirs)

    async def aclose(self) -> None:
        """Forget the peer, once nothing moves any more."""
        with contextlib.suppress(ClosedError):  # the agent went first
            await self._agent.remove_peer(self._peer)

    async def _transfer(self, operation: Operation, ours: Descriptors, theirs: Descriptors) -> None:
        local, remote, lengths = pair_fragments(ours, theirs)
        await self._agent.transfer(
            operation, self._peer, *map(np.ascontiguousarray, (local, remote, lengths))
        )
