"""Write-back queue of a tier: which blocks are copied to it now, which later, and which never."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, islice
from math import inf
from typing import Generic, TypeVar

from kvxfer.runtime import Pause
from kvxfer.storage.keys import BlockKey

MAX_BLOCKS = 1 << 16

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Pauses before a failed tier is tried again: the first one, doubled up to the longest."""

MAX_ATTEMPTS = 10
"""Maximum attempts to copy one block while its tier stores other blocks."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """Block of the queue."""

    block: T
    number: int  # place in the order of arrival, which a later entry of the same key takes over
    num_failures: int = 0  # while the tier worked for others; no retry from `MAX_ATTEMPTS` on
    pause: Pause | None = None  # set when the block is put off


class WriteBackQueue(Generic[T]):
    """Write-back queue of one tier: blocks that the tiers above have and this one is to get.

    Policy only: the queue copies nothing, never waits, and takes the time as an argument. The
    caller takes blocks, copies them, and then reports how the copy of each ended.

    - A full queue drops its oldest blocks, which are the next to be evicted anyway.
    - If all blocks of a batch fail, the tier has failed: after a pause, which doubles each time, a
      single block is tried, and the others follow once it is stored.
    - A block that fails goes to the end of the queue, so that it delays no other. After
      `MAX_ATTEMPTS` failures while its tier works, it is given up.
    - A block that cannot be read above is put off, with a pause of its own, and delays no other.
    - A block that is added again while it is being copied waits for that copy to end.
    - A block that is added under the key of another is joined with it; by default, it replaces it.
    """

    def __init__(
        self,
        *,
        max_blocks: int = MAX_BLOCKS,
        join: Callable[[T, T], T] = lambda earlier, block: block,  # noqa: ARG005
    ) -> None:
        self._join = join
        self.max_blocks = max_blocks
        self.pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        # Oldest first. In a plain dict, finding the first is slow after many were taken.
        self._waiting = OrderedDict[BlockKey, _Entry[T]]()
        self._taken: dict[BlockKey, _Entry[T]] = {}
        self._put_off: dict[BlockKey, _Entry[T]] = {}
        self._numbers = count()
        self._due: list[tuple[float, BlockKey]] = []  # when put-off blocks are due; may be stale

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken) + len(self._put_off)

    @property
    def num_taken(self) -> int:
        """Blocks that are being copied."""
        return len(self._taken)

    def is_taken(self, key: BlockKey) -> bool:
        """Whether a block is being copied."""
        return key in self._taken

    @property
    def is_failing(self) -> bool:
        """Whether the tier has failed, and stored nothing since."""
        return self.pause.num_failures > 0

    def pause_s(self, now: float) -> float:
        """Seconds until blocks may be taken again, if none is being copied."""
        self._bring_back(now)
        due_at = self._due[0][0] if self._put_off and not self._waiting else -inf
        return max(self.pause.left_s(now), due_at - now)

    def waiting(self) -> Iterator[T]:
        """Iterate over the blocks that wait, oldest first."""
        return (entry.block for entry in self._waiting.values())

    def add(self, blocks: Mapping[BlockKey, T]) -> list[BlockKey]:
        """Add blocks, joined with earlier ones of their keys; return the keys dropped."""
        number = next(self._numbers)
        for key, block in blocks.items():
            earlier = self._put_off.pop(key, None) or self._waiting.get(key)
            known = earlier or self._taken.get(key)
            joined = self._join(known.block, block) if known else block
            self._waiting[key] = _Entry(joined, number if earlier is None else earlier.number)
        oldest = chain(self._put_off, self._waiting)
        dropped = list(islice(oldest, max(0, len(self) - self.max_blocks)))
        for key in dropped:
            self._drop(key)
        return dropped

    def forget(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Forget blocks that the tiers above lost; return the keys that were waiting."""
        waited = []
        for key in keys:
            if self._drop(key):
                waited.append(key)
            if key in self._taken:
                self._taken[key].num_failures = MAX_ATTEMPTS  # not to be retried
        return waited

    def take(self, now: float, limit: int) -> dict[BlockKey, T]:
        """Take the oldest blocks to copy them now: at most `limit`, one if the tier has failed.

        The caller must end each with `end`, `give_back`, `put_off` or `skip`.
        """
        if self.pause.is_on(now):
            return {}
        self._bring_back(now)
        if self.is_failing:
            limit = min(limit, 1 - self.num_taken)
        free = (key for key in self._waiting if key not in self._taken)
        keys = list(islice(free, max(0, limit)))
        taken = {key: self._waiting[key].block for key in keys}
        self._taken |= {key: self._waiting.pop(key) for key in keys}
        return taken

    def claim(self, keys: Iterable[BlockKey]) -> dict[BlockKey, T]:
        """Return the taken blocks that are still to be copied; call it before reading their bytes.

        If a block was added again meanwhile, unchanged, one copy serves both. If a different one
        was added under its key, that one waits in its place, and the taken one is not copied.
        """
        claimed = {}
        for key in keys:
            entry, newer = self._taken.get(key), self._waiting.get(key)
            if entry is None:
                continue
            if newer is not None and newer.block != entry.block:
                self._merge(newer, entry)
                continue
            claimed[key] = entry.block = self._waiting.pop(key, entry).block
        return claimed

    def mark(self) -> int:
        """Return a mark of this moment, for `has_older`."""
        return next(self._numbers)

    def has_older(self, mark: int) -> bool:
        """Whether a block that was added before `mark` still waits or is being copied."""
        entries = chain(self._waiting.values(), self._taken.values(), self._put_off.values())
        return any(entry.number < mark for entry in entries)

    def end(
        self, now: float, *, stored: Iterable[BlockKey], failed: Iterable[BlockKey]
    ) -> list[BlockKey]:
        """End the blocks of a batch; return the keys that failed and are not retried."""
        was_failing, stored, failed = self.is_failing, list(stored), list(failed)
        if stored:
            self.pause.reset()
        elif failed:
            self._pause(now)
        self.skip(stored)
        for key in failed:
            if key in self._taken:
                self._taken[key].num_failures += not was_failing
        return [key for key in failed if not self._retry(key)]

    def put_off(self, now: float, keys: Iterable[BlockKey], *, failed: bool) -> list[BlockKey]:
        """End blocks that could not be read above, which is no failure of this tier; retry them.

        A read that `failed` counts as an attempt. Returns the keys that are no longer retried.
        """
        given_up = []
        for key in keys:
            entry = self._taken.pop(key, None)
            if entry is None or key in self._waiting:
                self._merge(self._waiting.get(key), entry)
                continue
            entry.num_failures += failed
            if entry.num_failures >= MAX_ATTEMPTS:
                given_up.append(key)
                continue
            entry.pause = entry.pause or Pause(self.pause.first_s, LONGEST_PAUSE_S)
            entry.pause.begin(now)
            self._put_off[key] = entry
            heappush(self._due, (entry.pause.until, key))
        return given_up

    def retry_as(self, blocks: Mapping[BlockKey, T]) -> None:
        """Retry taken blocks that the tiers above lost as other blocks of their keys."""
        for key, block in blocks.items():
            if key in self._taken:
                self._taken[key].block = block
            self._retry(key)

    def give_back(self, now: float, keys: Iterable[BlockKey]) -> None:
        """End blocks that were not tried because the tier is unavailable; they are retried."""
        self._pause(now)
        for key in keys:
            self._retry(key)

    def skip(self, keys: Iterable[BlockKey]) -> None:
        """End blocks that need no copy; has no effect on those that have ended already."""
        for key in keys:
            self._taken.pop(key, None)

    def clear(self, prefix: bytes = b"") -> list[BlockKey]:
        """Forget the blocks of a prefix, even those being copied; return their keys."""
        known = self._put_off | self._waiting | self._taken
        forgotten = [key for key in known if key.startswith(prefix)]
        for key in forgotten:
            self._drop(key)
            self._taken.pop(key, None)
        return forgotten

    def _retry(self, key: BlockKey) -> bool:
        """Let a block wait again; return False if it has no attempts left, and has ended."""
        entry = self._taken.pop(key, None)
        if entry is not None and entry.num_failures < MAX_ATTEMPTS:
            self._merge(self._waiting.setdefault(key, entry), entry)
            return True
        return entry is None or key in self._waiting  # added again meanwhile

    def _merge(self, newer: _Entry[T] | None, earlier: _Entry[T] | None) -> None:
        """Give a block that was added again the turn of the earlier one, which is not copied."""
        if newer is not None and earlier is not None:
            newer.number = min(newer.number, earlier.number)

    def _drop(self, key: BlockKey) -> bool:
        return bool(self._waiting.pop(key, None) or self._put_off.pop(key, None))

    def _bring_back(self, now: float) -> None:
        """Let put-off blocks wait again once their pause is over."""
        while self._due and (self._due[0][0] <= now or not self._is_due(*self._due[0])):
            due_at, key = heappop(self._due)
            if self._is_due(due_at, key):
                self._waiting[key] = self._put_off.pop(key)

    def _is_due(self, due_at: float, key: BlockKey) -> bool:
        """Whether an element of `_due` is current: its block is still put off until then."""
        entry = self._put_off.get(key)
        return entry is not None and entry.pause is not None and entry.pause.until == due_at

    def _pause(self, now: float) -> None:
        """Pause after a failure of the tier, unless the attempt began before the present pause."""
        if not self.pause.is_on(now):
            self.pause.begin(now)
