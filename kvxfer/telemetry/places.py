"""Places of tiers, in the words of vLLM's KV events."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where the blocks of a tier are, in vLLM's words.

    Attributes:
        medium: "CPU" for memory, or "STORAGE".
        locality: "LOCAL" or "REMOTE", as seen by the publisher; None if that is not known.
    """

    medium: str
    locality: str | None


_PLACES = {
    "host": Place("CPU", "LOCAL"),
    "nixl": Place("CPU", "LOCAL"),  # of peers, a tier tells the blocks that it holds for them
    "file": Place("STORAGE", "LOCAL"),
}


def place_of(tier: str) -> Place:
    """Tell where the blocks of a tier are, by its name, such as "file" or "file_2"."""
    return _PLACES.get(tier.rstrip("0123456789").rstrip("_"), Place("STORAGE", None))
