"""Blocks in the memory of other processes and machines, moved by NIXL or by sockets."""

from kvxfer.backends.nixl.backend import NixlBackend
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.directory import PeerDirectory, StaticPeers
from kvxfer.backends.nixl.endpoint import Endpoint

__all__ = ["Endpoint", "NixlBackend", "NixlConfig", "PeerDirectory", "StaticPeers"]
