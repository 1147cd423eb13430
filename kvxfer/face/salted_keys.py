"""Salted keys: names of blocks in a backend that an engine can forget all at once."""

from collections.abc import Iterable

from kvxfer import runtime
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.calls import Drain
from kvxfer.storage.keys import BlockKey

SALT_BYTES = 16
"""Random bytes in front of every key of a process after its first reset."""

MAX_FAILED_SALTS = 16
"""Maximum number of salts to remember because their blocks could not be deleted yet."""


class SaltedKeys:
    """Names of an engine's blocks in a backend: their keys, behind a salt after the first reset.

    A reset may mean that the weights changed in memory, so it takes a new salt that only this
    process knows. No earlier block is found then, not even one that a hanging backend stores later,
    and no other engine mistakes new blocks for those of the weights on disk. Nobody can find blocks
    of an earlier salt; they are deleted if the backend can do that. At first the salt is empty.
    """

    def __init__(self, backend: Purgeable | None) -> None:
        self.salt = b""
        self._backend = backend
        self._former: dict[bytes, None] = {}  # oldest first

    def name(self, key: BlockKey) -> BlockKey:
        """Return the name of a block in the backend."""
        return BlockKey(self.salt + key)

    def keys_of(self, names: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the keys of those names that have the current salt."""
        salt = self.salt
        return [BlockKey(each[len(salt) :]) for each in names if each.startswith(salt)]

    def renew(self) -> bool:
        """Take a new salt; return whether `delete_former` has blocks to delete."""
        if self.salt and self._backend is not None:
            self._former[self.salt] = None
        self.salt = runtime.token_bytes(SALT_BYTES)
        return bool(self._former)

    async def delete_former(self, drain: Drain) -> None:
        """Delete the blocks of earlier salts, once `drain` has waited for the stores under way.

        The next call retries the newest `MAX_FAILED_SALTS` salts whose blocks cannot be deleted.
        The backend's last error is raised after all salts were tried.
        """
        former = list(self._former)  # before the drain, which may miss stores of later ones
        await drain()
        failure: Exception | None = None
        for salt in former:
            try:
                assert self._backend is not None
                await self._backend.purge(salt)
                self._former.pop(salt, None)
            except Exception as exc:  # noqa: BLE001 - raised once all were tried
                failure = exc
        for salt in list(self._former)[:-MAX_FAILED_SALTS]:
            self._former.pop(salt, None)
        if failure is not None:
            raise failure
