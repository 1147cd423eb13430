"""Spans of OpenTelemetry: an observer that makes one of each batch, move and lookup."""

import functools
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import StatusCode, TracerProvider

from kvxfer import runtime
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.observer import Ended, Event, LookedUp, Moved, Observer

EXPORTER_GROUP = "opentelemetry_traces_exporter"
"""Entry points of exporters, as of OpenTelemetry's SDK."""

logger = logging.getLogger(__name__)

_ERRORS = frozenset({Status.CORRUPT, Status.FAILED, Status.TIMED_OUT})


class Spans(Observer):
    """Spans of what has ended: a batch, its moves in each tier, a lookup.

    Each is made when it is over, with the time at which it began, as a child of the span in which
    the engine was called.

    Args:
        tracer_provider: Makes the tracer; by default that of the program.
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
            case _:  # no span of its own
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


@functools.cache
def provider_of_process(exporters: tuple[str, ...]) -> TracerProvider | None:
    """Make what gives spans to exporters, once for a process.

    Args:
        exporters: Their names, such as "otlp" or "console".

    Returns:
        None where the program has a tracer provider of its own, which is used then, or where there
        is no exporter of these names: then there are no spans before the program has one.
    """
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    try:
        from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        logger.warning("spans go nowhere: pip install opentelemetry-sdk (%s)", exc)
        return None
    processors = []
    for name in exporters:
        found = tuple(importlib.metadata.entry_points(group=EXPORTER_GROUP, name=name))
        if not found:
            text = "spans do not go to %r: pip install opentelemetry-exporter-%s"
            logger.warning(text, name, name)
            continue
        try:
            exporter = found[0].load()()
        except Exception as exc:  # noqa: BLE001 - of settings that it alone knows
            logger.warning("spans do not go to %r: %r", name, exc)
            continue
        processors.append(BatchSpanProcessor(exporter))
    if not processors:
        return None
    provider = SDKTracerProvider()
    for each in processors:
        provider.add_span_processor(each)
    return provider
