"""Salted keys: names of blocks in a backend, of which an engine can forget all at once."""

from collections.abc import Iterable

from kvxfer import runtime
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.calls import Drain
from kvxfer.storage.keys import BlockKey

SALT_BYTES = 16
"""Random bytes in front of the keys of a process after a reset."""

MAX_FAILED_SALTS = 16
"""Salts whose blocks could not be deleted and are tried again."""


class SaltedKeys:
    """Names of an engine's blocks in a backend: the key, from the first reset on behind a salt.

    A reset can mean that the weights were changed in memory. A new salt is known to this process
    only: blocks of before are not found here, not even those that a hanging backend stores later,
    and the next engine does not take new blocks for blocks of the weights on disk. Blocks under
    the salt of an earlier reset can be found by nobody any more, and may be deleted, if the backend
    can do that. The present salt is empty before the first reset.
    """

    def __init__(self, backend: Purgeable | None) -> None:
        self.salt = b""
        self._backend = backend
        self._former: dict[bytes, None] = {}  # oldest first

    def name(self, key: BlockKey) -> BlockKey:
        """Make the name of a block in the backend."""
        return BlockKey(self.salt + key)

    def keys_of(self, names: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the keys of names, without those of before the last reset."""
        salt = self.salt
        return [BlockKey(each[len(salt) :]) for each in names if each.startswith(salt)]

    def renew(self) -> bool:
        """Take another salt; return whether `delete_former` has blocks to delete."""
        if self.salt and self._backend is not None:
            self._former[self.salt] = None
        self.salt = runtime.token_bytes(SALT_BYTES)
        return bool(self._former)

    async def delete_former(self, drain: Drain) -> None:
        """Delete the blocks of earlier salts, once `drain` has ended the stores that have begun.

        Of the salts whose blocks cannot be deleted, the last `MAX_FAILED_SALTS` are tried again by
        the next call; the backend's error of the last one is raised.
        """
        former = list(self._former)  # stores under later ones may begin during the drain
        await drain()
        failure: Exception | None = None
        for salt in former:
            try:
                assert self._backend is not None
                await self._backend.purge(salt)
                self._former.pop(salt, None)
            except Exception as exc:  # noqa: BLE001 - raised when all were tried
                failure = exc
        for salt in list(self._former)[:-MAX_FAILED_SALTS]:
            self._former.pop(salt, None)
        if failure is not None:
            raise failure
