"""OpenTelemetry spans: an observer that creates one for each batch, move and lookup."""

from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import StatusCode, TracerProvider

from kvxfer import runtime
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.observer import Ended, Event, LookedUp, Moved, Observer

_ERRORS = frozenset({Status.CORRUPT, Status.FAILED, Status.TIMED_OUT})


class Spans(Observer):
    """Observer that creates a span for each batch, for its moves in each tier, and each lookup.

    A span is created when its operation has ended, with the time at which that began, as a child
    of the span in which the engine was called. The default provider is that of the program.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvxfer", tracer_provider=tracer_provider)

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        match event:
            case Moved():
                more = {"kvxfer.tier": event.tier, "kvxfer.cause": event.cause.value}
                self._make_move(f"{event.operation} {event.tier}", event, more)
            case Ended():
                self._make_move(event.operation, event, {"kvxfer.waited_s": event.waited_s})
            case LookedUp():
                hits = sum(map(bool, event.tiers))
                counts = {"kvxfer.blocks": len(event.keys), "kvxfer.hits": hits}
                self._make("lookup", event.seconds, counts)
            case _:  # other events have no span
                pass

    def _make_move(self, name: str, event: Moved | Ended, more: Mapping[str, str | float]) -> None:
        counts = {
            "kvxfer.blocks": len(event.keys),
            "kvxfer.bytes": event.num_bytes,
            "kvxfer.done": sum(outcome.done for outcome in event.outcomes),
        }
        self._make(name, event.seconds, {**counts, **more}, event.outcomes)

    def _make(
        self,
        name: str,
        seconds: float,
        attributes: Mapping[str, str | float],
        outcomes: Sequence[Outcome] = (),
    ) -> None:
        now = int(1e9 * runtime.wall_time())
        began = now - int(seconds * 1e9)
        span = self._tracer.start_span(f"kvxfer.{name}", attributes=attributes, start_time=began)
        wrong = next((each for each in outcomes if each.status in _ERRORS), None)
        if wrong is not None:
            span.set_status(StatusCode.ERROR, f"{wrong.status.value}: {wrong.reason}")
        span.end(now)
