"""NIXL backend: blocks at peers, in other processes and on other machines."""

from kvxfer.backends.nixl.backend import NixlBackend
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.peers import Endpoint, PeerDirectory, StaticPeers

__all__ = ["Endpoint", "NixlBackend", "NixlConfig", "PeerDirectory", "StaticPeers"]
