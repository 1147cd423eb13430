"""Blocks in host memory."""

from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.host.placed import PlacedBackend, place
from kvxfer.backends.host.pool import HostPool, Integrity, PoolShape

__all__ = [
    "HostBackend",
    "HostConfig",
    "HostPool",
    "Integrity",
    "PlacedBackend",
    "PoolShape",
    "place",
]
