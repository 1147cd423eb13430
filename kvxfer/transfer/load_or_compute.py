"""Load or compute: whether loading blocks is faster than computing them, by recent speeds."""

import math

from kvxfer import runtime
from kvxfer.checks import require_integer, require_number
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Ended, Event, Observer, Operation

STALE_S = 30.0
"""Age of the last load at which the bandwidth is unknown again: a slow tier is then retried."""

HALF_LIFE_S = 2.0
"""Time spent loading, or computing, after which an earlier measurement counts half."""


class _Speed:
    """Recent speed in units per second: a ratio of decaying sums; large batches weigh more."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """Units per second; None before the first measurement."""
        return self._units / self._seconds if self._seconds > 0 else None

    def add(self, units: float, seconds: float) -> None:
        """Add a measurement."""
        weight = 2 ** (-seconds / HALF_LIFE_S)
        self._units = weight * self._units + units
        self._seconds = weight * self._seconds + seconds


class LoadOrCompute(Observer):
    """Decision whether to load blocks or to compute them, by the recent speed of both.

    The time of a load is that of the bytes queued before it and of its own, at the bandwidth of
    recent loads. Loading pays unless that is more than `max_load_ratio` times the time to compute
    the tokens at the measured speed. It also pays while either speed is unknown: a decision needs
    data, and a tier that was slow is tried again after a while.

    An observer of the engine that loads, which measures every load that ends. Thread-safe.

    Args:
        max_load_ratio: Maximum time of a load, as a multiple of the time to compute.
        prefill_tokens_per_s: Speed of computing prompts; by default `computed` measures it.

    Raises:
        InvalidArgumentError: A number is not positive.
    """

    def __init__(self, max_load_ratio: float, *, prefill_tokens_per_s: float | None = None) -> None:
        self._max_load_ratio = _require_rate("max_load_ratio", max_load_ratio)
        self._stated: float | None = None
        if prefill_tokens_per_s is not None:
            self._stated = _require_rate("prefill_tokens_per_s", prefill_tokens_per_s)
        self._lock = runtime.lock()
        self._bandwidth = _Speed()
        self._prefill = _Speed()
        self._loaded_s = -math.inf  # end of the last load

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of recent loads; None after `STALE_S` without a load."""
        with self._lock:
            self._forget_old(runtime.monotonic())
            return self._bandwidth.value

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Speed of computing prompts, given or measured; None before the first measurement."""
        with self._lock:
            return self._stated or self._prefill.value

    def note(self, event: Event) -> None:
        """See `Observer.note`: measures loads that have ended."""
        if not isinstance(event, Ended) or event.operation is not Operation.LOAD:
            return
        late = any(outcome.status is Status.TIMED_OUT for outcome in event.outcomes)
        if event.num_bytes or late:  # else there was nothing to load
            self.loaded(event.num_bytes, event.seconds)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Note a load that ends now, `seconds` after it was submitted.

        Time in which several loads overlap counts once.
        """
        num_bytes = require_integer("num_bytes", num_bytes)
        seconds = require_number("seconds", seconds)
        with self._lock:
            now = runtime.monotonic()
            self._forget_old(now)
            self._bandwidth.add(num_bytes, min(seconds, max(0.0, now - self._loaded_s)))
            self._loaded_s = now

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note a step of the engine that computed so many tokens of prompts."""
        num_tokens = require_integer("num_tokens", num_tokens)
        seconds = require_number("seconds", seconds)
        with self._lock:
            self._prefill.add(num_tokens, seconds)

    def pays(self, num_bytes: int, num_tokens: int, *, queued_bytes: int = 0) -> bool:
        """Whether to load blocks rather than compute their tokens.

        The `queued_bytes` are those of loads that were submitted earlier and have not ended.
        """
        num_bytes = require_integer("num_bytes", num_bytes)
        num_tokens = require_integer("num_tokens", num_tokens)
        queued_bytes = require_integer("queued_bytes", queued_bytes)
        with self._lock:
            self._forget_old(runtime.monotonic())
            bandwidth, speed = self._bandwidth.value, self._stated or self._prefill.value
        if bandwidth is None or not speed:
            return True
        load_s = (queued_bytes + num_bytes) / bandwidth if bandwidth else math.inf
        return load_s <= self._max_load_ratio * num_tokens / speed

    def _forget_old(self, now: float) -> None:
        if now - self._loaded_s > STALE_S:
            self._bandwidth = _Speed()


def _require_rate(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e308:
        raise InvalidArgumentError(name, value, "a number greater than 0")
    return float(value)
