"""Leases: how long the blocks of a ticket stay in place for readers, and their lender."""

from kvxfer.storage.leases.book import MAX_TICKET_CHARACTERS, make_ticket, require_ticket
from kvxfer.storage.leases.cache_lender import CacheLender, Held

__all__ = ["MAX_TICKET_CHARACTERS", "CacheLender", "Held", "make_ticket", "require_ticket"]
