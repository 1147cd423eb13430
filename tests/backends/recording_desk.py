"""Desk for tickets that records what peers ask of it."""

from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import CacheLender, Held
from kvxfer.storage.lending import BlockParts, LendingBackend, LentBlocks, ReservedBlocks


class RecordingDesk(CacheLender):
    """Lender of the blocks of a backend under tickets that are known and never end by themselves.

    Attributes:
        tickets: Blocks of each ticket; one that is released is taken out.
        held: Tickets that each present holder has asked for.
        dropped: Holders that are gone, each as often as it was dropped.
        num_holds: Tickets that were asked for so far.
    """

    def __init__(
        self, tickets: dict[str, Sequence[BlockKey]] | None = None, description: bytes = b"pages"
    ) -> None:
        self.description = description
        self.tickets = dict(tickets or {})
        self.held: dict[Hashable, list[str]] = {}
        self.dropped: list[Hashable] = []
        self.num_holds = 0

    def of(self, inner: LendingBackend) -> Self:
        self.inner, self.regions = inner, [*inner.regions]
        return self

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self.inner.lookup(keys)

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self.inner.delete(keys)

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        async with self.inner.lend(wanted, fenced=fenced) as lent:
            yield lent

    def peek(self, keys: Sequence[BlockKey], *, fenced: bool = False) -> LentBlocks | None:
        return self.inner.peek(keys, fenced=fenced)

    @asynccontextmanager
    async def make_room(self, offered: BlockParts) -> AsyncIterator[ReservedBlocks]:
        async with self.inner.make_room(offered) as room:
            yield room

    def hold(
        self, ticket: str, keys: Sequence[BlockKey], holder: Hashable, number: int = 0
    ) -> Held:
        self.num_holds += 1
        self.held.setdefault(holder, []).append(ticket)
        offered = {key for blocks in self.tickets.values() for key in blocks}
        is_known = ticket in self.tickets
        return Held(is_known, is_known, [key in offered for key in keys])

    def release(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            self.tickets.pop(ticket, None)

    def drop(self, holder: Hashable, numbers: Collection[int] | None = None) -> None:
        if numbers is not None:
            return
        self.held.pop(holder, None)
        self.dropped.append(holder)
