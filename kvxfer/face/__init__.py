"""Face of an asynchronous backend for engines that block; the plugs share it."""

from kvxfer.face.row_store import RowPool, RowStore, count_leading
from kvxfer.face.salted_keys import SaltedKeys

__all__ = ["RowPool", "RowStore", "SaltedKeys", "count_leading"]
