"""Host pool of another process: `kvxfer serve --pool` holds it, engines attach to it."""

from kvxfer.backends.pool.backend import Attachment, PoolBackend, PoolConfig
from kvxfer.backends.pool.server import PoolServer

__all__ = ["Attachment", "PoolBackend", "PoolConfig", "PoolServer"]
