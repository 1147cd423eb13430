"""Mooncake Store: blocks in memory that processes of a cluster give to a pool with a master."""

from kvxfer.backends.mooncake.backend import (
    CallFailedError,
    MooncakeBackend,
    MooncakeConfig,
    StoreClient,
)

__all__ = ["CallFailedError", "MooncakeBackend", "MooncakeConfig", "StoreClient"]
