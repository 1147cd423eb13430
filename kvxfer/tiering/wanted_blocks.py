"""Wanted blocks: which requests of an engine want which blocks, and where each was found."""

from collections.abc import Iterable, Sequence

from kvxfer.storage.backend import Outcome
from kvxfer.storage.keys import BlockKey


class Wanted:
    """Block that requests want; a value is that of the class until it is set."""

    num_requests: int = 0
    waiting: dict[str, None] | None = None  # requests that asked the lower tier, in order
    is_asked: bool = False  # the lower tier was asked, or need not be
    found: bool | None = None  # whether the lower tier has the block; None while unknown
    slot: int | None = None  # in the first tier, pinned for the requests
    checked: Outcome | None = None  # result of verifying that slot


class WantedBlocks:
    """Blocks that requests want, from their first lookup until each request is released.

    An answer of the lower tier is kept until the last request that wants the block is released. So
    a waiting request gets the same answer until it is scheduled, and a later request asks again.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Wanted] = {}
        self._open: dict[BlockKey, None] = {}  # to be looked up, or to be loaded
        self._keys_of: dict[str, dict[BlockKey, None]] = {}

    def want(self, key: BlockKey, req_id: str) -> Wanted:
        """Note that a request wants a block."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Wanted()
        keys = self._keys_of.setdefault(req_id, {})
        if key not in keys:
            keys[key] = None
            block.num_requests += 1
        return block

    def ask(self, key: BlockKey, req_id: str) -> bool | None:
        """Return whether the lower tier has a block; None, with a lookup queued, while unknown."""
        block = self.want(key, req_id)
        if block.waiting is None:
            block.waiting = {}
        block.waiting[req_id] = None
        if not block.is_asked:
            self._open[key] = None
        return block.found

    def ask_to_load(self, key: BlockKey) -> None:
        """Queue the load of a block that the lower tier has."""
        self._open[key] = None

    def get(self, key: BlockKey) -> Wanted | None:
        """Return a block that is wanted or being looked up; None for any other."""
        return self._blocks.get(key)

    def found(self, key: BlockKey) -> bool | None:
        """Whether the lower tier has a block; None while that is unknown."""
        block = self._blocks.get(key)
        return None if block is None else block.found

    @property
    def open(self) -> list[BlockKey]:
        """Keys to be looked up or loaded, in the order in which they were wanted."""
        return list(self._open)

    def take_unasked(self) -> list[BlockKey]:
        """Return the keys to be looked up now; afterwards, no key is open."""
        keys = [key for key in self._open if not self._blocks[key].is_asked]
        self._open.clear()
        for key in keys:
            self._blocks[key].is_asked = True
        return keys

    def tell(self, keys: Sequence[BlockKey], found: Sequence[bool]) -> None:
        """Record answers of the lower tier, except for keys that were forgotten meanwhile."""
        for key, there in zip(keys, found, strict=True):
            block = self._blocks.get(key)
            if block is not None and block.is_asked and block.found is None:
                block.found = there
                self._drop_unwanted(key, block)

    def deny(self, keys: Iterable[BlockKey]) -> None:
        """Turn blocks that cannot be loaded into misses for every waiting request."""
        for key in keys:
            if block := self._blocks.get(key):
                block.is_asked, block.found = True, False
                self._open.pop(key, None)
                self._drop_unwanted(key, block)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget the answers for blocks that are being stored: the next lookup asks again."""
        for key in keys:
            self._open.pop(key, None)
            if block := self._blocks.get(key):
                block.is_asked, block.found = False, None
                self._drop_unwanted(key, block)

    def release(self, req_id: str) -> tuple[list[BlockKey], list[BlockKey]]:
        """Note that a request no longer wants any block; running lookups go on.

        Returns the keys whose slots were pinned for the request, in the order of its lookups, and
        those of them that no other request wants, which the caller must unpin.
        """
        used: list[BlockKey] = []
        unpinned: list[BlockKey] = []
        for key in self._keys_of.pop(req_id, ()):
            block = self._blocks[key]
            block.num_requests -= 1
            if block.waiting is not None:
                block.waiting.pop(req_id, None)
            if block.slot is not None:
                used.append(key)
                if not block.num_requests:
                    unpinned.append(key)
                    block.slot = block.checked = None
            if not block.num_requests and (block.found is not None or not block.is_asked):
                self._open.pop(key, None)  # here, since a call for each block would cost more
                del self._blocks[key]
        return used, unpinned

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._open.clear()
        self._keys_of.clear()

    def _drop_unwanted(self, key: BlockKey, block: Wanted) -> None:
        """Drop a block that no request wants, unless its lookup is running."""
        if not block.num_requests and (block.found is not None or not block.is_asked):
            self._open.pop(key, None)
            del self._blocks[key]
