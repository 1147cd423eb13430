"""The peers that an agent knows, however many connections lead to each."""

import asyncio
import contextlib
from collections import defaultdict

from kvxfer.backends.nixl.transfer_agent import TransferAgent
from kvxfer.errors import ClosedError


class PeerBook:
    """Adds a peer to an agent with its first connection, and removes it with its last one.

    Two processes that serve each other have two connections between them, and the agent takes
    each peer once.

    Args:
        agent: Knows the peers.

    Attributes:
        agent: As given.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        # One that does not answer holds up nobody but those who want the same one.
        self._locks: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._names: dict[bytes, str] = {}
        self._num_users: dict[bytes, int] = {}

    async def add(self, metadata: bytes) -> str:
        """Return the name of a peer, added now if need be; errors as `TransferAgent.add_peer`."""
        async with self._locks[metadata]:
            if metadata not in self._names:
                self._names[metadata] = await self.agent.add_peer(metadata)
                self._num_users[metadata] = 0
            self._num_users[metadata] += 1
            return self._names[metadata]

    async def remove(self, metadata: bytes) -> None:
        """Undo one `add`; with the last one, wait until nothing moves any more."""
        async with self._locks[metadata]:
            self._num_users[metadata] -= 1
            if not self._num_users[metadata]:
                del self._num_users[metadata]
                with contextlib.suppress(ClosedError):  # the agent went first
                    await self.agent.remove_peer(self._names.pop(metadata))
