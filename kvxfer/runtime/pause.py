"""Pauses after failures: how long they last, and what the log says about them."""

import logging
from collections import Counter
from math import inf

from kvxfer.runtime.runtime import monotonic, random

MAX_ERRORS = 5
PAUSE_S = 30.0
"""Failures in a row, and the pause after them, that tell a dead disk from one that stutters."""

MOST_DOUBLINGS = 64
"""Maximum doublings of a pause without an upper bound: endless doubling would overflow a float."""

LOG_PAUSE_S = 10.0
MAX_PAUSED_LINES = 64
"""Pause between two log lines about the same failure, and how many lines are paused by name."""

logger = logging.getLogger(__name__)


class Pause:
    """Pause after failures in a row: each is twice as long as the previous one.

    It takes the time as an argument and never waits: its owner sleeps, sets a timer or refuses
    calls. Without `longest_s`, all pauses are as long as the first. An `uneven` pause is shortened
    at random, by at most half, so that processes that failed together do not return together.
    """

    def __init__(
        self, first_s: float, longest_s: float | None = None, *, uneven: bool = False
    ) -> None:
        self.first_s = first_s
        self.num_failures = 0
        self.until = -inf
        self._longest_s = first_s if longest_s is None else longest_s
        self._uneven = uneven

    def is_on(self, now: float) -> bool:
        """Whether it is too early for another attempt."""
        return now < self.until

    def left_s(self, now: float) -> float:
        """Compute the seconds until the next attempt."""
        return max(0.0, self.until - now)

    def begin(self, now: float) -> None:
        """Count a failure, and begin the pause after it."""
        self.until = now + self.next_s()

    def next_s(self) -> float:
        """Count a failure; return the seconds of the pause after it, for owners that sleep."""
        doubled = self.first_s * 2.0 ** min(self.num_failures, MOST_DOUBLINGS)
        self.num_failures += 1
        share = random().uniform(0.5, 1.0) if self._uneven else 1.0
        return min(doubled, self._longest_s) * share

    def reset(self) -> None:
        """End the pause after a success; the next failure is the first of a new row."""
        self.num_failures = 0
        self.until = -inf


class Suspension(Pause):
    """Suspension of a tier: for a while after a missed deadline, every key is a miss there."""

    def __init__(self, name: str, pause_s: float, *, what: str = "the tier") -> None:
        super().__init__(pause_s)
        self._name = name
        self._what = what

    def note_late(self, now: float, call: str, timeout_s: float) -> None:
        """Suspend the tier, or prolong its suspension, after a call has exceeded its timeout."""
        if not self.is_on(now):
            text = "%s: %s took longer than %g s; %s is not used for %g s"
            logger.warning(text, self._name, call, timeout_s, self._what, self.first_s)
        self.begin(now)


class CircuitBreaker:
    """Circuit breaker: pauses calls after failures in a row, then lets one through as a probe.

    Logs once when it opens and once when it closes. Belongs to one event loop. While it is
    `closed`, it lets every call through.

    Source: M. Nygard, "Release It!", chapter 5, Circuit Breaker.
    """

    def __init__(
        self, name: str, *, max_errors: int = MAX_ERRORS, pause_s: float = PAUSE_S
    ) -> None:
        self._name = name
        self._max_errors = max_errors
        self._pause = Pause(pause_s)
        self.closed = True
        self._is_probed = False
        self._num_errors = 0
        self._num_probes = 0

    @property
    def probe(self) -> int:
        """Number of the probe that is under way, to pass to `abandon`; 0 if there is none."""
        return self._num_probes if self._is_probed else 0

    def allows(self) -> bool:
        """Whether to make a call now; after an allowed call, `record` or `abandon` must follow."""
        if self.closed or self._is_probed or self._pause.is_on(monotonic()):
            return self.closed
        self._is_probed = True
        self._num_probes += 1
        return True

    def record(self, error: str) -> None:
        """Note how a call ended; the error is empty if it succeeded."""
        if not error:
            if not self.closed:
                logger.warning("%s: works again", self._name)
            self.closed, self._is_probed, self._num_errors = True, False, 0
            return
        self._num_errors += 1
        if self._is_probed or self._num_errors >= self._max_errors:
            self.trip(error)

    def trip(self, error: str) -> None:
        """Open at once, regardless of the number of failures, and restart the pause."""
        if self.closed:
            text = "%s: paused, retrying every %g s: %s"
            logger.warning(text, self._name, self._pause.first_s, error)
        self.closed = self._is_probed = False
        self._pause.begin(monotonic())

    def abandon(self, probe: int) -> None:
        """Take back a probe that showed neither success nor failure, such as a cancelled one.

        `probe` is the value of the attribute right after the call was allowed. The probe of
        another call is left alone.
        """
        if probe and probe == self.probe:
            self._is_probed = False


class LogPause:
    """Pause between equal log lines, so that failures without end do not fill the log.

    Each line has a text, one of a few, and a subject. The next line with the same text counts those
    that were left out. Beyond `MAX_PAUSED_LINES` subjects, the others of a text share a pause.
    """

    def __init__(self, pause_s: float = LOG_PAUSE_S) -> None:
        self._pause_s = pause_s
        self._quiet_until: dict[tuple[str, str], float] = {}
        self._num_left_out: Counter[str] = Counter()  # by text

    def log(
        self,
        logger: logging.Logger,
        level: int,
        text: str,
        *arguments: object,
        subject: str = "",
        error: BaseException | None = None,
    ) -> None:
        """Log a line, unless one with the same text and subject came less than a pause ago.

        The traceback of an `error` follows the line.
        """
        now, line = monotonic(), (text, subject)
        if line not in self._quiet_until and len(self._quiet_until) >= MAX_PAUSED_LINES:
            ends = self._quiet_until.copy().items()  # other threads may log at the same time
            self._quiet_until = {each: end for each, end in ends if now < end}
            if len(self._quiet_until) >= MAX_PAUSED_LINES:
                line = text, ""
        if now < self._quiet_until.get(line, -inf):
            self._num_left_out[text] += 1
            return
        self._quiet_until[line] = now + self._pause_s
        if num_left_out := self._num_left_out.pop(text, 0):
            text += f" ({num_left_out} more were left out)"
        logger.log(level, text, *arguments, exc_info=error)
