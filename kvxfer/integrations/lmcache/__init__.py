"""KV caches of LMCache: `KVXferL2Adapter`, a plug-in L2 adapter over any backends of kvxfer."""

from kvxfer.integrations.lmcache.adapter import KVXferL2Adapter

__all__ = ["KVXferL2Adapter"]
