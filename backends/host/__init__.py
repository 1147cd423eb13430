"""Host memory backend."""

from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.host.pool import HostPool, PoolShape
from kvxfer.backends.host.slots import SlotMover, keys_in_slots, slot_key
from kvxfer.storage.integrity import Integrity, MemoryIntegrity

__all__ = [
    "HostBackend",
    "HostConfig",
    "HostPool",
    "Integrity",
    "MemoryIntegrity",
    "PoolShape",
    "SlotMover",
    "keys_in_slots",
    "slot_key",
]
