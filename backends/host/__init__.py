"""Host memory backend."""

from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.host.pool import HostPool
from kvxfer.backends.host.pool_shape import PoolShape
from kvxfer.backends.host.slots import SlotMover, key_in_slot, slot_key
from kvxfer.storage.integrity import Integrity

__all__ = [
    "HostBackend",
    "HostConfig",
    "HostPool",
    "Integrity",
    "PoolShape",
    "SlotMover",
    "key_in_slot",
    "slot_key",
]
