"""Marks in what a device has to do."""

from typing import Protocol


class StreamMark(Protocol):
    """A place in the work that was given to a device, which other work can be made to wait for.

    Attributes:
        event: Handle of the driver's event.
    """

    event: int
