"""Observed backend: a wrapper that tells observers what is moved to and from a backend."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import (
    Backend,
    Begun,
    CopySource,
    ImmediateMover,
    Outcome,
    Status,
    WrappingBackend,
)
from kvxfer.storage.calls import Begin
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import NOT_ARRIVED, BlockParts, Lender, LentBlocks, ReservedBlocks
from kvxfer.storage.observer import Asked, Observable, Operation, Reports

T = TypeVar("T")


def medium_of(backend: Backend) -> str:
    """Name the medium of a backend after its class: `HostBackend` is "host"."""
    return type(backend).__name__.removesuffix("Backend").lower()


def observed(backend: Backend, reports: Reports) -> "ObservedBackend":
    """Wrap a backend so that observers learn what happens; the backend need not know of them.

    An `Observable` backend itself reports what only it knows. The tier is named after the backend's
    medium.
    """
    reports = reports.of(medium_of(backend))
    if (observable := backend.provide(Observable)) is not None:
        observable.observe(reports)
    return ObservedBackend(backend, reports)


class ObservedBackend(WrappingBackend):
    """Backend that reports every store, load and lookup of an inner backend to observers.

    Created by `observed`, and only if there are observers: without them, no wrapper costs time.
    """

    def __init__(self, inner: Backend, reports: Reports) -> None:
        super().__init__(inner)
        self._reports = reports

    def provide(self, interface: type[T]) -> T | None:
        """See `BlockMover.provide`: its reports, an observed mover or lender, else the inner's."""
        if interface in (Observable, CopySource):
            return None  # it is observed already; a load for a copy is reported as a load
        own: object = self._reports if interface is Reports else self
        if interface is ImmediateMover and (mover := self.inner.provide(ImmediateMover)):
            own = _ObservedMover(mover, self._reports)
        elif interface is Lender and (lender := self.inner.provide(Lender)):
            own = _ObservedLender(lender, self._reports)
        return own if isinstance(own, interface) else self.inner.provide(interface)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        began = runtime.monotonic()
        found = await self.inner.lookup(keys)
        _tell_lookup(self._reports, keys, found, began)
        return found

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        return await self._reports.move(Operation.STORE, keys, blocks, self.inner.store)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        return await self._reports.move(Operation.LOAD, keys, blocks, self.inner.load)


def _tell_lookup(
    reports: Reports, keys: Sequence[BlockKey], found: Sequence[bool], began: float
) -> None:
    if len(found) != len(keys):
        return
    seconds, tier = runtime.monotonic() - began, reports.tier
    reports.tell(Asked(tier, keys, found, seconds))
    reports.looked_up(keys, [tier if there else "" for there in found], began)


class _ObservedBegun(Begun):
    """Transfer that reports its outcomes, once, when it has ended."""

    def __init__(
        self, begun: Begun, tell: Callable[[Sequence[Outcome]], None], num_blocks: int
    ) -> None:
        super().__init__(())
        self._begun, self._tell, self._num_blocks = begun, tell, num_blocks

    def poll(self) -> Sequence[Outcome] | None:
        try:
            outcomes = self._begun.poll()
        except Exception as exc:
            self._tell([Outcome(Status.FAILED, reason=repr(exc))] * self._num_blocks)
            raise
        if outcomes is not None:
            self._tell(outcomes)
        return outcomes


class _ObservedMover(ImmediateMover):
    """Mover on the calling thread that reports what it moves."""

    def __init__(self, inner: ImmediateMover, reports: Reports) -> None:
        self._inner, self._reports = inner, reports
        self.hashes = inner.hashes

    def begin_store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        return self._begin(Operation.STORE, self._inner.begin_store, keys, blocks)

    def begin_load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
        return self._begin(Operation.LOAD, self._inner.begin_load, keys, blocks)

    def _begin(
        self, operation: Operation, begin: Begin, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> Begun | None:
        began = runtime.monotonic()

        def tell(outcomes: Sequence[Outcome]) -> None:
            self._reports.moved(operation, keys, outcomes, blocks.block_sizes.tolist(), began)

        begun = begin(keys, blocks)
        return None if begun is None else _ObservedBegun(begun, tell, len(keys))


class _ObservedLender(Lender):
    """Lender that reports what peers read and fill."""

    def __init__(self, inner: Lender, reports: Reports) -> None:
        self._inner, self._reports = inner, reports
        self.regions, self.max_loans = inner.regions, inner.max_loans

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        """See `Lender.lend`; reported when the blocks are ready to be read."""
        began = runtime.monotonic()
        async with self._inner.lend(wanted, fenced=fenced) as lent:
            self._reports.moved(Operation.LOAD, wanted.keys, lent.outcomes, wanted.sizes, began)
            yield lent

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        """See `Lender.peek`; reported as a lookup, since what the reader does stays unknown."""
        began = runtime.monotonic()
        seen = self._inner.peek(keys, fenced=fenced)
        if seen is not None and seen.blocks is not None:  # else the reader calls `lookup`, too
            _tell_lookup(self._reports, keys, [outcome.done for outcome in seen.outcomes], began)
        return seen

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        """See `Lender.make_room`; reported when the context ends, even if it fails."""
        began = runtime.monotonic()
        waited: set[int] = set()
        room: ReservedBlocks | None = None
        try:
            async with self._inner.make_room(offered) as room:
                waited = {index for index, each in enumerate(room.outcomes) if each is None}
                yield room
        finally:
            if room is not None:
                outcomes = [outcome or NOT_ARRIVED for outcome in room.outcomes]
                sizes = [size if index in waited else 0 for index, size in enumerate(offered.sizes)]
                self._reports.moved(Operation.STORE, offered.keys, outcomes, sizes, began)
