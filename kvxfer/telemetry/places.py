"""Places of tiers, in the terms of vLLM's KV events."""

from typing import NamedTuple


class Place(NamedTuple):
    """Location of a tier's blocks, in vLLM's terms.

    Attributes:
        medium: "CPU" for memory, or "STORAGE".
        locality: "LOCAL" or "REMOTE", as seen by the publisher; None if unknown.
    """

    medium: str
    locality: str | None


_PLACES = {
    "host": Place("CPU", "LOCAL"),
    "nixl": Place("CPU", "LOCAL"),  # the tier's events are of blocks that it holds for peers
    "file": Place("STORAGE", "LOCAL"),
}


def place_of(tier: str) -> Place:
    """Return the place of a tier's blocks, by the tier's name, such as "file" or "file_2"."""
    return _PLACES.get(tier.rstrip("0123456789").rstrip("_"), Place("STORAGE", None))
