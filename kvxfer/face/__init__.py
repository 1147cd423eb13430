"""Face of an asynchronous backend for engines that block; the plugs share it."""

from kvxfer.face.salted_keys import SaltedKeys

__all__ = ["SaltedKeys"]
