"""Transfer agents of the NIXL backend, which read the memory of peers."""

from kvxfer.backends.nixl.agents.base import Flight, Fragments, TransferAgent
from kvxfer.backends.nixl.agents.nixl import NixlAgent
from kvxfer.backends.nixl.agents.socket import MAX_LINES, SocketAgent

__all__ = ["MAX_LINES", "Flight", "Fragments", "NixlAgent", "SocketAgent", "TransferAgent"]
