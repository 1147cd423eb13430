"""Ticket session: a holder's answers to one peer's requests about tickets."""

import logging
from collections.abc import Callable

from kvxfer.backends.nixl.wire.messages import (
    TICKETS_VERSION,
    Describe,
    Described,
    Found,
    HeldTicket,
    Hold,
    Release,
    Released,
    TicketRequest,
)
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.storage.leases import LeaseDesk

logger = logging.getLogger(__name__)


class TicketSession:
    """Ticket session of one peer; the desk knows it as the holder of the peer's tickets.

    Args:
        desk: Desk that is asked; None where there are no tickets.
        version: Version of the protocol that the peer and this process speak.
        find: Finds the places of the keys of a request; None where they have none.
    """

    def __init__(
        self, desk: LeaseDesk | None, version: int, find: Callable[[Hold], Found | None]
    ) -> None:
        self._desk = desk
        self._version = version
        self._find = find
        self._ended = False

    async def answer(self, request: TicketRequest) -> Described | HeldTicket | Released:
        """Answer a request; never waits.

        Raises:
            InvalidArgumentError: There are no tickets here, the version of the protocol has none,
                or a key appears twice.
            ClosedError: The session has ended: nothing would end what is held now.
        """
        if self._version < TICKETS_VERSION:
            wanted = f"at least {TICKETS_VERSION} for a {type(request).__name__}"
            raise InvalidArgumentError("version", self._version, wanted)
        if self._desk is None:
            raise InvalidArgumentError("request", type(request).__name__, "none about tickets")
        if self._ended:
            raise ClosedError("session")
        number = request.request_id
        if isinstance(request, Describe):
            return Described(request_id=number, description=self._desk.description)
        if isinstance(request, Release):
            self._desk.release(request.tickets)
            return Released(request_id=number)
        if len(set(request.keys)) < len(request.keys):
            raise InvalidArgumentError("keys", f"{len(request.keys)} keys", "each key once")
        held = self._desk.hold(request.ticket, request.keys, self)
        wants_places = request.places and held.is_known and any(held.there)
        return HeldTicket(
            request_id=number,
            is_known=held.is_known,
            is_complete=held.is_complete,
            there=held.there,
            found=self._find(request) if wants_places else None,
        )

    def end(self) -> None:
        """Tell the desk that the connection of the peer has ended."""
        self._ended = True
        if self._desk is not None:
            try:
                self._desk.drop(self)
            except Exception:
                logger.exception("tickets of a peer that has gone may be held for ever")
