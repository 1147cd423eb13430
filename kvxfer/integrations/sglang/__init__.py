"""Storage of SGLang's hierarchical cache: `KVXferStorage`, named in SGLang's configuration."""

from kvxfer.integrations.sglang.storage import KVXferStorage

__all__ = ["KVXferStorage"]
