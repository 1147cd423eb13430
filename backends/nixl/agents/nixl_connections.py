"""Connections of a NIXL agent to other agents, kept for peers that come back."""

import contextlib
import hashlib
from typing import Any

from kvxfer.backends.nixl.agents.nixl_module import nixl_errors
from kvxfer.backends.nixl.wire import (
    AgentMetadata,
)
from kvxfer.errors import InvalidArgumentError, PeerLostError


class NixlConnections:
    """Connections of one NIXL agent; for the agent's thread only.

    NIXL ends a connection on this side only: UCX keeps its socket until the other process ends. So
    a peer that reconnects gets the connection that it had, or each time would cost a descriptor on
    both sides.

    Args:
        nixl: NIXL's module.
        agent: The agent.
        name: Name of the agent.
        max_kept: See `NixlLimits`.
    """

    def __init__(self, nixl: Any, agent: Any, name: str, max_kept: int) -> None:
        self._nixl = nixl
        self._errors = nixl_errors(nixl)
        self._agent = agent
        self._max_kept = max_kept
        self._kept: dict[str, bytes] = {}  # digests of metadata
        # Names of agents are of one length, and so all metadata begins alike.
        self._metadata_start = agent.get_agent_metadata().partition(name.encode())[0]

    def open(self, peer: AgentMetadata) -> bool:
        """Connect to a peer that is not connected; return whether the connection was kept.

        Raises:
            InvalidArgumentError: NIXL cannot read the metadata, or it is that of another agent.
            PeerLostError: The peer cannot be reached.
        """
        kept = self._kept.pop(peer.name, None)
        if kept == _digest(peer):
            return True
        if kept:
            self.close(peer.name)
        if not peer.opaque.startswith(self._metadata_start + peer.name.encode()):
            wanted = f"that of agent {peer.name!r}"
            raise InvalidArgumentError("metadata", peer.opaque[:64], wanted)
        try:
            self._agent.add_remote_agent(peer.opaque)
        except self._nixl.nixlBackendError as exc:
            raise PeerLostError(peer.name, f"it cannot be reached ({exc})") from exc
        except self._errors as exc:
            raise InvalidArgumentError(
                "metadata", peer.opaque[:16], f"metadata that NIXL can read ({exc})"
            ) from exc
        return False

    def keep(self, peer: AgentMetadata) -> None:
        """Keep the connection to a peer that has left, which may be gone."""
        self._kept[peer.name] = _digest(peer)
        if len(self._kept) > self._max_kept:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self.close(oldest)

    def close(self, name: str) -> None:
        """End a connection that is not kept."""
        with contextlib.suppress(*self._errors):  # the peer may be gone already
            self._agent.remove_remote_agent(name)


def _digest(peer: AgentMetadata) -> bytes:
    return hashlib.sha256(peer.encode()).digest()
