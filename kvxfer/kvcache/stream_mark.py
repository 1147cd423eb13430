"""Stream marks: points in the work of a device that other work can wait for."""

from typing import Protocol


class StreamMark(Protocol):
    """Point in the work enqueued on a device, which other work can be made to wait for.

    Attributes:
        event: Handle of the driver's event.
    """

    event: int

    def has_passed(self) -> bool:
        """Whether the device has reached the mark; does not block.

        Raises:
            DeviceLostError: The device is gone, and never reaches it.
        """
