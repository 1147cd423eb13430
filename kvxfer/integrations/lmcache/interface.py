"""Interface of LMCache's L2 adapters: all imports from LMCache.

A release is recognised by its interface, never by its version number.
"""

from kvxfer.errors import UnsupportedEngineError
from kvxfer.extras import installed_version

SUPPORTED = "0.5.6"


try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.platform import create_event_notifier
except ImportError as exc:
    version = installed_version("lmcache")
    raise UnsupportedEngineError("lmcache", version, SUPPORTED, str(exc)) from exc
