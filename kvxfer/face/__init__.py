"""Blocking calls over an asynchronous backend, shared by the plugs."""

from kvxfer.face.row_store import RowPool, RowStore, count_leading
from kvxfer.face.salted_keys import SaltedKeys

__all__ = ["RowPool", "RowStore", "SaltedKeys", "count_leading"]
