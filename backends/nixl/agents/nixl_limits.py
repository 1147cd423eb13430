"""Limits of a NIXL agent."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlLimits:
    """Limits of a NIXL agent.

    Attributes:
        piece_bytes: Most bytes of a piece of a read: pieces of several reads take turns, and a read
            that is given up ends with those in flight.
        piece_fragments: Most fragments of a piece, for which NIXL makes descriptors at once.
        max_kept: Most connections that are kept for peers that have left; the oldest is ended.
        max_unanswered: Most peers that may leave the read of their beacon unanswered: each keeps a
            slot and its metadata.
    """

    piece_bytes: int = 64 << 20
    piece_fragments: int = 4096
    max_kept: int = 1024
    max_unanswered: int = 512
