"""Mooncake Store: blocks in memory that processes of a cluster give to a pool with a master."""

from kvxfer.backends.mooncake.backend import MooncakeBackend
from kvxfer.backends.mooncake.client import CallFailedError, Code, StoreClient
from kvxfer.backends.mooncake.config import MooncakeConfig

__all__ = ["CallFailedError", "Code", "MooncakeBackend", "MooncakeConfig", "StoreClient"]
