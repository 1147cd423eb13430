"""Observed backend: a wrapper that tells observers what is moved to and from a backend."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import Backend, Begun, BlockMover, ImmediateMover, Outcome, Status
from kvxfer.storage.calls import Begin
from kvxfer.storage.eviction.retention import Retention, retain_in, retentions_in
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import (
    NOT_ARRIVED,
    BlockParts,
    LendingBackend,
    LentBlocks,
    ReservedBlocks,
)
from kvxfer.storage.observer import (
    Asked,
    Observable,
    Operation,
    Reports,
)


def medium_of(backend: Backend) -> str:
    """Name the medium of a backend after its class: `HostBackend` is "host"."""
    return type(backend).__name__.removesuffix("Backend").lower()


def observed(backend: Backend, reports: Reports) -> "ObservedBackend":
    """Wrap a backend so that observers are told what happens; it need not know of them.

    What only the backend knows it tells itself, if it is `Observable`.

    Args:
        backend: The backend; closed with the wrapper.
        reports: Reports to the observers; the tier is named after the backend's medium.
    """
    reports = reports.of(medium_of(backend))
    if isinstance(backend, Observable):
        backend.observe(reports)
    can = isinstance(backend, ImmediateMover), isinstance(backend, LendingBackend)
    return _WRAPPERS[can](backend, reports)


def unwrapped(backend: BlockMover) -> BlockMover:
    """Return the backend that is observed, or `backend` itself where it is not."""
    return backend.inner if isinstance(backend, ObservedBackend) else backend


class ObservedBackend(Backend):
    """Backend that tells observers of every store, load and lookup of another one.

    Made by `observed`, only where somebody observes: otherwise there is no wrapper to pay for.

    Args:
        inner: The backend; closed with this one.
        reports: Reports of its tier.

    Attributes:
        inner: As given.
    """

    def __init__(self, inner: Backend, reports: Reports) -> None:
        self.inner = inner
        self._reports = reports
        self.memory_kinds = inner.memory_kinds

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`."""
        self.inner.attach(memory)

    async def start(self) -> None:
        """See `Backend.start`."""
        await self.inner.start()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        began = runtime.monotonic()
        found = await self.inner.lookup(keys)
        self._tell_lookup(keys, found, began)
        return found

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        call = self.inner.store(keys, blocks)
        return await self._reports.move(Operation.STORE, keys, blocks, call)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        call = self.inner.load(keys, blocks)
        return await self._reports.move(Operation.LOAD, keys, blocks, call)

    def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
        """See `Retaining.retain`."""
        retain_in(self.inner, keys, retention)

    def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
        """See `Retaining.retentions`."""
        return retentions_in(self.inner, keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        return await self.inner.delete(keys)

    async def flush(self) -> None:
        """See `Backend.flush`."""
        await self.inner.flush()

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await self.inner.drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.inner.aclose()

    def _tell_lookup(self, keys: Sequence[BlockKey], found: Sequence[bool], began: float) -> None:
        if len(found) != len(keys):
            return
        seconds, tier = runtime.monotonic() - began, self._reports.tier
        self._reports.tell(Asked(tier, keys, found, seconds))
        self._reports.looked_up(keys, [tier if there else "" for there in found], began)


class _ObservedBegun(Begun):
    """Transfer that tells its outcomes when it has ended.

    Args:
        begun: The transfer.
        tell: Told the outcomes, once.
        num_blocks: Blocks of the transfer.
    """

    def __init__(
        self, begun: Begun, tell: Callable[[Sequence[Outcome]], None], num_blocks: int
    ) -> None:
        super().__init__(())
        self._begun = begun
        self._tell = tell
        self._num_blocks = num_blocks

    def poll(self) -> Sequence[Outcome] | None:
        """See `Begun.poll`."""
        with self._telling_failure():
            outcomes = self._begun.poll()
        if outcomes is not None:
            self._tell(outcomes)
        return outcomes

    def wait(self) -> Sequence[Outcome]:
        """See `Begun.wait`."""
        with self._telling_failure():
            outcomes = self._begun.wait()
        self._tell(outcomes)
        return outcomes

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self._tell([Outcome(Status.FAILED, reason=repr(exc))] * self._num_blocks)
            raise


class _Immediate(ObservedBackend, ImmediateMover):
    """Observed backend that also moves on the calling thread."""

    def __init__(self, inner: Backend, reports: Reports) -> None:
        super().__init__(inner, reports)
        assert isinstance(inner, ImmediateMover)
        self._mover, self.hashes = inner, inner.hashes

    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        """See `ImmediateMover.begin_store`."""
        return self._begin(Operation.STORE, self._mover.begin_store, keys, blocks)

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        """See `ImmediateMover.begin_load`."""
        return self._begin(Operation.LOAD, self._mover.begin_load, keys, blocks)

    def _begin(
        self, operation: Operation, begin: Begin, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> Begun | None:
        began = runtime.monotonic()

        def tell(outcomes: Sequence[Outcome]) -> None:
            sizes = blocks.block_sizes.tolist()
            self._reports.moved(operation, keys, outcomes, sizes, began)

        begun = begin(keys, blocks)
        return None if begun is None else _ObservedBegun(begun, tell, len(keys))


class _Lending(ObservedBackend, LendingBackend):
    """Observed backend that also lends its blocks: what peers read and fill is counted, too."""

    def __init__(self, inner: Backend, reports: Reports) -> None:
        super().__init__(inner, reports)
        assert isinstance(inner, LendingBackend)
        self._lender = inner
        self.regions = inner.regions

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        """See `Lender.lend`; told when the blocks are ready to be read."""
        began = runtime.monotonic()
        async with self._lender.lend(wanted, fenced=fenced) as lent:
            self._reports.moved(Operation.LOAD, wanted.keys, lent.outcomes, wanted.sizes, began)
            yield lent

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        """See `Lender.peek`; counts as a lookup, since nobody is told what the reader does."""
        began = runtime.monotonic()
        seen = self._lender.peek(keys, fenced=fenced)
        if seen is not None and seen.blocks is not None:  # else `lookup` is asked as well
            self._tell_lookup(keys, [outcome.done for outcome in seen.outcomes], began)
        return seen

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        """See `Lender.make_room`; told when the blocks have arrived."""
        began = runtime.monotonic()
        waited: set[int] = set()
        room: ReservedBlocks | None = None
        try:
            async with self._lender.make_room(offered) as room:
                waited = {index for index, each in enumerate(room.outcomes) if each is None}
                yield room
        finally:
            if room is not None:
                outcomes = [outcome or NOT_ARRIVED for outcome in room.outcomes]
                sizes = [size if index in waited else 0 for index, size in enumerate(offered.sizes)]
                self._reports.moved(Operation.STORE, offered.keys, outcomes, sizes, began)


class _ImmediateLending(_Immediate, _Lending):
    """Observed backend that does both, such as host memory."""


_WRAPPERS: Mapping[tuple[bool, bool], type[ObservedBackend]] = {
    (False, False): ObservedBackend,
    (True, False): _Immediate,
    (False, True): _Lending,
    (True, True): _ImmediateLending,
}
"""Wrappers of a backend, by whether it is an `ImmediateMover` and a `LendingBackend`: callers ask
the wrapper what it can do."""
