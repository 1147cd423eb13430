"""Reads of a peer's memory, which both sides make: of blocks to load, and of blocks to store."""

from kvxfer.backends.nixl.reads.hashing import BlockHasher
from kvxfer.backends.nixl.reads.quarantine import Quarantine
from kvxfer.backends.nixl.reads.remote_memory import (
    MAX_GENERATIONS,
    RemoteMemory,
    generations_memory,
)

__all__ = [
    "MAX_GENERATIONS",
    "BlockHasher",
    "Quarantine",
    "RemoteMemory",
    "generations_memory",
]
