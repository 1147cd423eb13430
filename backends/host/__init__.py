"""Host memory backend."""

from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.host.placed import PlacedBackend, place
from kvxfer.backends.host.pool import HostPool
from kvxfer.backends.host.pool_shape import PoolShape
from kvxfer.storage.integrity import Integrity

__all__ = [
    "HostBackend",
    "HostConfig",
    "HostPool",
    "Integrity",
    "PlacedBackend",
    "PoolShape",
    "place",
]
