"""Load or compute: whether loading blocks is faster than computing them, from what both took."""

import math

from kvxfer import runtime
from kvxfer.checks import require_integer, require_number
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Ended, Event, Observer, Operation

STALE_S = 30.0
"""Seconds without a load after which the bandwidth is unknown again, so that a store that was slow
is tried anew."""

HALF_LIFE_S = 2.0
"""Seconds of loading, or of computing, after which a measurement counts half."""


class _Speed:
    """Speed of late, in units per second: sums that decay, so that large batches count more."""

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
    """Decision whether to load blocks or to compute them, by what both took lately.

    Loading takes the time of what is queued before it and of its own bytes, at the bandwidth of
    the last loads. Where that is more than `max_load_ratio` times the time of computing the tokens
    at the measured speed, it does not pay. Without a measurement of both it pays: so nothing is
    decided on no data, and a tier that was slow is tried again after a while.

    An observer of the engine that loads: it measures every batch that ends. Thread-safe.

    Args:
        max_load_ratio: Largest time of a load, as a multiple of that of computing.
        prefill_tokens_per_s: Speed of computing prompts, where it is stated; by default it is what
            `computed` measures.

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
        """Bandwidth of late loads; None when there were none for `STALE_S`."""
        with self._lock:
            self._forget_old(runtime.monotonic())
            return self._bandwidth.value

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Speed of computing, as stated or measured; None before the first measurement."""
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
        """Note a load that ends now, so many seconds after it was submitted.

        Of loads at the same time each moment counts once.
        """
        num_bytes = require_integer("num_bytes", num_bytes)
        seconds = require_number("seconds", seconds)
        with self._lock:
            now = runtime.monotonic()
            self._forget_old(now)
            self._bandwidth.add(num_bytes, min(seconds, max(0.0, now - self._loaded_s)))
            self._loaded_s = now

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note a step of the engine that computed these tokens of prompts."""
        num_tokens = require_integer("num_tokens", num_tokens)
        seconds = require_number("seconds", seconds)
        with self._lock:
            self._prefill.add(num_tokens, seconds)

    def pays(self, num_bytes: int, num_tokens: int, *, queued_bytes: int = 0) -> bool:
        """Whether to load blocks, and not to compute their tokens.

        The `queued_bytes` are those of loads that were submitted before and have not ended.
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
        raise InvalidArgumentError(name, value, "a number, more than 0")
    return float(value)
