"""Ticket client: what a reader asks a holder about tickets, and the calls of it under way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.reconnect import Reconnect
from kvxfer.backends.nixl.wire.messages import (
    MAX_TICKETS,
    PLACES_VERSION,
    TICKETS_VERSION,
    Describe,
    Described,
    Found,
    HeldTicket,
    Hold,
    Release,
    Released,
    require_tickets,
)
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import Held


class TicketClient:
    """Client of one holder for questions about tickets, each within a deadline.

    Args:
        reconnect: Connection to the holder.
        timeout_s: Time that a call may take.
        is_fenced: Whether to ask for generations of blocks instead of checksums.

    Attributes:
        reconnect: As given.
    """

    def __init__(self, reconnect: Reconnect, *, timeout_s: float, is_fenced: bool) -> None:
        self.reconnect = reconnect
        self._timeout_s = timeout_s
        self._is_fenced = is_fenced
        self._num_calls = 0
        self._retired = False

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, and no ticket held."""
        return not (self._num_calls or self.reconnect.holds_tickets)

    def retire(self) -> None:
        """Close the connection for good as soon as no call is under way."""
        self._retired = True
        with self._call():  # the last one, unless others are under way
            pass

    async def describe(self) -> bytes:
        """Ask what a reader must know of the holder's blocks; errors as `hold`.

        It is asked once for each connection: another incarnation has another one.
        """
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            if connection.description is None:
                answer = await connection.request(
                    lambda number: Describe(request_id=number), Described
                )
                connection.description = answer.description
            return connection.description

    async def hold(self, ticket: str, keys: Sequence[BlockKey]) -> Held:
        """Ask the holder to keep the blocks of a ticket, until it is released.

        They are kept as long as the connection lasts: hold the ticket again on another one. After
        an error or a cancellation they may be kept, too.

        Args:
            ticket: The ticket, 1 to `MAX_TICKET_CHARACTERS` printable characters.
            keys: Blocks to look for, each once; may be empty.

        Raises:
            InvalidArgumentError: The ticket cannot be one.
            KVXferError: The holder cannot be reached, gives no tickets, or speaks an earlier
                version of the protocol, which has none.
            TimeoutError: It did not answer in time.
        """
        require_tickets([ticket])
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            is_new = connection.version >= PLACES_VERSION
            connection.tickets.setdefault(ticket, set()).update(keys)
            answer = await connection.request(
                lambda number: Hold(
                    request_id=number,
                    ticket=ticket,
                    keys=list(keys),
                    places=is_new,
                    fenced=is_new and self._is_fenced,
                ),
                HeldTicket,
            )
        connection.require_number(len(answer.there), len(keys))
        if not answer.is_known:
            connection.leave(ticket)
        elif answer.found is not None and ticket in connection.tickets:  # not released meanwhile
            self._note_places(connection, keys, answer.found)
        return Held(answer.is_known, answer.is_complete, answer.there)

    async def release(self, tickets: Sequence[str]) -> None:
        """Ask the holder to end the leases of tickets; errors as `hold`."""
        require_tickets(tickets)
        async with self._connected() as connection:
            connection.require_version(TICKETS_VERSION)
            for ticket in tickets:
                connection.leave(ticket)
            for start in range(0, len(tickets), MAX_TICKETS):
                await _release(connection, tickets[start : start + MAX_TICKETS])

    @contextlib.asynccontextmanager
    async def _connected(
        self, turn: AbstractAsyncContextManager[object] | None = None
    ) -> AsyncIterator[Connection]:
        """Connect for a request, and bound the time of both and of the wait for a turn before."""
        with self._call():
            async with asyncio.timeout(self._timeout_s), turn or contextlib.nullcontext():
                yield await self.reconnect.open()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._retired and not self._num_calls:
                self.reconnect.close()

    def _note_places(self, connection: Connection, keys: Sequence[BlockKey], found: Found) -> None:
        """Remember the places of blocks that the holder was asked for.

        Raises:
            ProtocolError: There is not an answer for each key, or a place is none.
        """
        connection.require_number(len(found.there), len(keys))
        try:
            connection.places.note(keys, found)
        except InvalidArgumentError as exc:
            raise ProtocolError(str(self.reconnect.endpoint), str(exc)) from exc


async def _release(connection: Connection, tickets: Sequence[str]) -> None:
    await connection.request(
        lambda number: Release(request_id=number, tickets=list(tickets)), Released
    )
