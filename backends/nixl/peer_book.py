"""Book of an agent's peers, with the number of connections to each."""

import asyncio
import contextlib
from collections import defaultdict

from kvxfer.backends.nixl.transfer_agent import TransferAgent
from kvxfer.errors import ClosedError


class PeerBook:
    """Book of peers: adds a peer to the agent with its first connection, removes it with the last.

    Two processes that serve each other have two connections between them, and the agent accepts
    each peer once.

    Args:
        agent: Agent to which peers are added.

    Attributes:
        agent: As given.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        # One per peer: a peer that does not answer must not hold up others.
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
        """Undo one `add`; with the last one, wait until transfers with the peer have ended."""
        async with self._locks[metadata]:
            self._num_users[metadata] -= 1
            if not self._num_users[metadata]:
                del self._num_users[metadata]
                with contextlib.suppress(ClosedError):  # the agent was closed first
                    await self.agent.remove_peer(self._names.pop(metadata))
