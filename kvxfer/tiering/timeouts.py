"""Deadlines of a tier."""

from dataclasses import dataclass, fields

from kvxfer.checks import require_number, require_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTimeouts:
    """Deadlines of a tier below the first, in seconds.

    Attributes:
        lookup_s: For a lookup; after it every key is a miss there. None for no limit.
        move_s: For moving one staging buffer of blocks, or for a delete, or until a buffer comes
            back; for a store or load below the first tier as often as its blocks fill
            a buffer. A disk that moves 2 MB/s is still in time.
        close_s: For closing the tier, after which the call is abandoned; also for the last blocks
            to be written back before, and for staging buffers in use to come back.
        pause_s: Time that the tier is not used after it missed a deadline: whoever asks it waits
            for the answer.

    Raises:
        InvalidArgumentError: A time is negative or not a number, or None where a limit must be.
    """

    lookup_s: float | None = 2.0
    move_s: float = 10.0
    close_s: float = 30.0
    pause_s: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            require = require_timeout if field.name == "lookup_s" else require_number
            object.__setattr__(self, field.name, require(field.name, getattr(self, field.name)))
