"""A backend made of backends: a fast one, and larger ones behind it."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvxfer.checks import require_instance, require_instances, require_positive
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import DONE, MISSING, Backend, Outcome, require_batch
from kvxfer.storage.cascade import Cascade
from kvxfer.storage.claims import KeyClaims
from kvxfer.storage.keys import BlockKey, Namespace, group_of
from kvxfer.storage.outcomes import more_telling
from kvxfer.storage.staging import StagingMemory
from kvxfer.storage.tier import Tier, drain

DEFAULT_STAGING_BYTES = 64 << 20


class TieredBackend(Backend):
    """Keeps blocks in the first tier, and copies of them in the tiers below.

    A store ends when one tier has the block: the first, or the next one that has room. From
    there it is copied to the tiers below in the background, through staging memory; a block that
    is evicted before its turn is not. A load asks one tier after the other, each straight
    into the described memory, so a corrupt copy heals where another tier has a sound one.

    A key that any tier has is not stored again: no two tiers hold different bytes of one key,
    as long as each tier answers when it is asked what it has.

    A tier that raises holds nothing while it does, and the others go on. One that hangs holds up
    only the calls that need it.

    Blocks of which only a part was stored under their key can be loaded from any tier, but
    below the first a lookup does not find them.

    Args:
        tiers: The backends, fastest first; closed with this one.
        namespace: That of the tiers; says how many bytes a chunk has.
        staging_bytes: Bound on the memory that blocks pass through between tiers; raised to two
            of the largest chunk.

    Attributes:
        memory_kinds: What every tier reads and writes directly.

    Raises:
        InvalidArgumentError: There is no tier, one cannot reach host memory, the namespace
            has no groups, or the bound is not positive.
    """

    def __init__(
        self,
        tiers: Sequence[Backend],
        namespace: Namespace,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        require_instances("tiers", tiers, Backend, at_least_one=True)
        require_instance("namespace", namespace, Namespace)
        staging_bytes = require_positive("staging_bytes", staging_bytes)
        if not namespace.groups:
            raise InvalidArgumentError("namespace.groups", (), "at least one group")
        self.memory_kinds = frozenset.intersection(*(tier.memory_kinds for tier in tiers))
        if "cpu" not in self.memory_kinds:
            kinds = [sorted(tier.memory_kinds) for tier in tiers]
            raise InvalidArgumentError("memory_kinds of the tiers", kinds, "'cpu' in each")
        self._chunk_sizes = [namespace.chunk_size_bytes(g) for g in range(len(namespace.groups))]
        self._tiers = [Tier(index, backend) for index, backend in enumerate(tiers)]
        self._first, self._lower = self._tiers[0], self._tiers[1:]
        self._claims = KeyClaims()
        self._staging = StagingMemory(staging_bytes, max(self._chunk_sizes))
        self._cascade = Cascade(self._tiers, self._staging, self._claims)
        self._closed = False
        self.attach([self._staging.region])

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`."""
        for tier in self.tiers:
            tier.attach(memory)

    async def start(self) -> None:
        """See `Backend.start`."""
        for tier in self.tiers:
            await tier.start()

    @property
    def tiers(self) -> list[Backend]:
        """The backends, fastest first."""
        return [tier.backend for tier in self._tiers]

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`. What only a lower tier has is verified and promoted first."""
        self._check(keys)
        moving = {key for key in keys if key in self._claims}
        found = await self._find(keys)
        if lost := [key for key in keys if key not in found and self._is_moving(key, moving)]:
            await self._claims.wait(lost)
            found |= await self._find(lost)
        return [key in found for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. A block is `FAILED` when no tier has room for it."""
        self._check(keys, blocks)
        self._require_fit(keys, blocks)
        there = await self._first.lookup(keys)
        while moving := [key for key in keys if key in self._claims and key not in there]:
            await self._claims.wait(moving)
            there = await self._first.lookup(keys)
        # Those of the first tier that are claimed, e.g. being carried down, need no touch.
        free = [index for index, key in enumerate(keys) if key not in self._claims]
        outcomes = [DONE] * len(keys)
        with self._claims.hold([keys[index] for index in free]):
            absent = [keys[index] for index in free if keys[index] not in there]
            below = await self._find_below(absent)
            if left := [index for index in free if keys[index] not in below]:
                stored = await self._store_in_first_with_room(
                    [keys[index] for index in left], _chosen(blocks, left), there
                )
                for index, outcome in zip(left, stored, strict=True):
                    outcomes[index] = outcome
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. The first tier that gives a block gives it."""
        self._check(keys, blocks)
        moving = {key for key in keys if key in self._claims}
        outcomes = await self._load_from_any(keys, blocks)
        lost = [
            index
            for index, key in enumerate(keys)
            if outcomes[index] == MISSING and self._is_moving(key, moving)
        ]
        if lost:
            lost_keys = [keys[index] for index in lost]
            await self._claims.wait(lost_keys)
            again = await self._load_from_any(lost_keys, _chosen(blocks, lost))
            for index, outcome in zip(lost, again, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.delete`. Waits for whatever moves these keys between tiers."""
        self._check(keys)
        before: set[BlockKey] = set()
        after: set[BlockKey] = set()
        async with self._claims.acquire(keys):
            for tier in self._tiers:
                before |= await tier.lookup(keys)
                await tier.delete(keys)
                after |= await tier.lookup(keys)
        return len(before - after)

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await drain(self._tiers)

    async def aclose(self) -> None:
        """See `Backend.aclose`. First carries down what still waits, unless cancelled."""
        if self._closed:
            return
        self._closed = True
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._staging.aclose)  # once no tier uses it any more
            for tier in reversed(self._tiers):
                stack.push_async_callback(tier.backend.aclose)
            try:
                await self._claims.wait_for_all()
                await self._cascade.settle()
            finally:
                await self._cascade.cancel()

    async def _find(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those of `keys` that the first tier has, or that were verified in a lower one."""
        found = await self._first.lookup(keys)
        for tier in self._lower:
            below = await tier.lookup([key for key in keys if key not in found])
            found |= await self._promote(tier, [key for key in keys if key in below])
        return found

    async def _promote(self, tier: Tier, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Copy blocks to the first tier; return those that arrived in staging memory intact."""
        verified: set[BlockKey] = set()
        while keys:
            num_fitting = self._staging.num_fitting(map(self._chunk_size, keys))
            batch, keys = keys[:num_fitting], keys[num_fitting:]
            async with self._claims.acquire(batch):
                promoted = await self._first.lookup(batch)  # by another call, while this waited
                verified |= promoted
                if wanted := [key for key in batch if key not in promoted]:
                    verified |= await self._promote_batch(tier, wanted)
        return verified

    async def _promote_batch(self, tier: Tier, keys: Sequence[BlockKey]) -> set[BlockKey]:
        sizes = [self._chunk_size(key) for key in keys]
        async with self._staging.hold(sizes, [0] * len(keys)) as blocks:
            loaded = await tier.load(keys, blocks)
            intact = [index for index, outcome in enumerate(loaded) if outcome.done]
            verified = [keys[index] for index in intact]
            # What the first tier has no room for was verified all the same, and stays below.
            stored = await self._first.store(verified, blocks.take(intact)) if intact else []
            if not all(outcome.memory_safe for outcome in (*loaded, *stored)):
                self._staging.retire(blocks, drain(self._tiers))
        return set(verified)

    async def _find_below(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        found: set[BlockKey] = set()
        for tier in self._lower:
            found |= await tier.lookup([key for key in keys if key not in found])
        return found

    async def _store_in_first_with_room(
        self, keys: Sequence[BlockKey], blocks: Descriptors, there: set[BlockKey]
    ) -> list[Outcome]:
        """Store in the first tier, what it refuses in the next, and so on."""
        outcomes = [MISSING] * len(keys)
        left = list(range(len(keys)))
        for tier in self._tiers:
            chosen = [keys[index] for index in left]
            given = await tier.store(chosen, _chosen(blocks, left))
            _merge(outcomes, left, given)
            new = [index for index in left if outcomes[index].done and keys[index] not in there]
            if new:
                self._cascade.add(tier.index, [keys[index] for index in new], blocks.take(new))
            left = [index for index in left if _may_go_on(outcomes[index])]
            if not left:
                break
        return outcomes

    async def _load_from_any(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """Load from the first tier, what it does not give from the next, and so on."""
        outcomes = [MISSING] * len(keys)
        left = list(range(len(keys)))
        for tier in self._tiers:
            given = await tier.load([keys[index] for index in left], _chosen(blocks, left))
            _merge(outcomes, left, given)
            left = [index for index in left if _may_go_on(outcomes[index])]
            if not left:
                break
        return outcomes

    def _is_moving(self, key: BlockKey, moving: set[BlockKey]) -> bool:
        """Whether a key that was not found may have been on its way from tier to tier."""
        return key in moving or key in self._claims

    def _chunk_size(self, key: BlockKey) -> int:
        return self._chunk_sizes[group_of(key)]

    def _require_fit(self, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        stops = blocks.payload_starts + blocks.block_sizes
        for key, stop in zip(keys, stops.tolist(), strict=True):
            if stop > self._chunk_size(key):
                limit = f"at most {self._chunk_size(key)}, as its namespace says"
                raise InvalidArgumentError(
                    f"bytes of a block of group {group_of(key)}", stop, limit
                )

    def _check(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        if self._closed:
            raise ClosedError("tiered backend")
        for each in blocks:
            require_instance("blocks", each, Descriptors)
        require_batch(keys, *blocks)
        for key in keys:
            if group_of(key) >= len(self._chunk_sizes):
                raise InvalidArgumentError("key", key, f"a group below {len(self._chunk_sizes)}")


def _chosen(blocks: Descriptors, indices: Sequence[int]) -> Descriptors:
    return blocks if len(indices) == blocks.num_blocks else blocks.take(indices)


def _merge(outcomes: list[Outcome], indices: Sequence[int], given: Sequence[Outcome]) -> None:
    """Keep of each block what says most; its memory is as safe as its last tier left it."""
    for index, outcome in zip(indices, given, strict=True):
        outcomes[index] = more_telling(outcomes[index], outcome, memory_safe=outcome.memory_safe)


def _may_go_on(outcome: Outcome) -> bool:
    """Whether another tier may be given the memory of a block that this one left undone."""
    return not outcome.done and outcome.memory_safe
