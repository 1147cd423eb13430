"""Mooncake Store: blocks in a pool of memory of a cluster's processes, which a master manages."""

from kvxfer.backends.mooncake.backend import (
    CallFailedError,
    MooncakeBackend,
    MooncakeConfig,
    StoreClient,
)

__all__ = ["CallFailedError", "MooncakeBackend", "MooncakeConfig", "StoreClient"]
