"""Simulated bucket: the blocks and requests of the object storage backend, without bytes."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, cast

from kvxfer.backends.object import Presence
from kvxfer.replay.simulated_store import SimulatedMedium
from kvxfer.storage.keys import BlockKey

RequestKind = Literal["PUT", "LIST", "GET", "HEAD"]

LIST_NAMES = 1000
"""Names in one answer to a list."""


class SimulatedBucket(SimulatedMedium):
    """Bucket of one engine, which evicts nothing, and asks for what `ObjectBackend` asks for.

    Whether a block is known to be there is decided by the cache of lookups of the real backend, in
    the time of the trace. The bucket is empty at first.

    Args:
        found_ttl_s: See `ObjectConfig`.
        missing_ttl_s: See `ObjectConfig`.

    Attributes:
        now_s: Time of the trace.
        requests: Requests by their kind.
        num_sent: Blocks that were sent, those included that were there already.
    """

    def __init__(self, found_ttl_s: float, missing_ttl_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self.requests: Counter[RequestKind] = Counter()
        self.num_sent = 0
        self._was_listed = self._knows_kinds = False
        self._presence = Presence(
            found_ttl_s=found_ttl_s, missing_ttl_s=missing_ttl_s, clock=lambda: self.now_s
        )

    @property
    def num_kept(self) -> int:
        """Blocks that are there."""
        return len(self._resident)

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there: one list at first, and a HEAD for what is not known."""
        is_first = not self._was_listed
        if blocks:
            self._read_kinds()
        for block in blocks:
            if self._presence.has(_key(block)) is None:
                self.requests["HEAD"] += 1
                self._note(block)
        if is_first and blocks:
            self._was_listed = True
            self.requests["LIST"] += max(1, -(-len(self._resident) // LIST_NAMES))
            self._presence.note_all_listed(self.now_s)
        return self.find(blocks)

    def try_load(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedMedium.try_load`; a block that is not there is a request, too."""
        self.load(blocks)
        return self.find(blocks)

    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks, a GET for each."""
        self.requests["GET"] += len(blocks)
        self.num_read += len(self.find(blocks))
        for block in blocks:
            self._note(block)

    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """Read blocks."""
        self.load(blocks)

    def store(self, blocks: Sequence[int]) -> list[int]:
        """Write the blocks that are not there.

        Of a block that is known to be there the header is read; one that is there without being
        known is sent and refused before that.

        Returns:
            The blocks that were written.
        """
        if blocks and not self.requests["PUT"]:
            self.requests["PUT"] += 2  # namespace.json, and again to see that it stays
            self.requests["GET"] += 1  # the record of the kind of our pages
            self.requests["PUT"] += 1
            self._read_kinds()
        written = []
        for block in blocks:
            if self._presence.has(_key(block)):
                self.requests["GET"] += 1
                self._note(block)
                continue
            self.requests["PUT"] += 1
            self.num_sent += 1
            if block in self._resident:
                self.requests["GET"] += 1
            else:
                self._resident.add(block)
                written.append(block)
            self._presence.change(_key(block), there=True)
        self.num_written += len(written)
        return written

    def _read_kinds(self) -> None:
        """List what is beside the pages, once."""
        self.requests["LIST"] += not self._knows_kinds
        self._knows_kinds = True

    def _note(self, block: int) -> None:
        there, since = block in self._resident, self._presence.mark()
        self._presence.note(_key(block), there=there, since=since)


def _key(block: int) -> BlockKey:
    """Use a block as a key: the cache only hashes and compares it."""
    return cast("BlockKey", block)
