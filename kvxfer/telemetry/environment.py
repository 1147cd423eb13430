"""Observers that environment variables turn on, for engines that have no setting for them."""

import errno
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from kvxfer.endpoint import MAX_PORT, Endpoint
from kvxfer.errors import BackendUnavailableError
from kvxfer.extras import require_extra
from kvxfer.listener import listen_here
from kvxfer.settings import warn_of_misspelt_variables
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import Observer
from kvxfer.telemetry.journal import journal_observers

if TYPE_CHECKING:
    from kvxfer.telemetry.metrics import Metrics

VARIABLE = "KVXFER_METRICS"
EXPORTERS_VARIABLE = "OTEL_TRACES_EXPORTER"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

TIMEOUT_S = 5.0
"""How long a client of the metrics server may be silent."""
MAX_PROCESSES = 64
"""Maximum number of processes with the same endpoint; each takes a port of its own."""

logger = logging.getLogger(__name__)

_opened: dict[tuple[str, int], "Metrics"] = {}
_opening = threading.Lock()


def environment_observers(namespace: Namespace, *, engine: str = "") -> list[Observer]:
    """Create the observers that the environment asks for: a journal, metrics, spans.

    The journal notes the namespace of the blocks, and the name of their engine.

    The variables are `KVXFER_JOURNAL`, `KVXFER_METRICS`, and those of `span_observers`. A misspelt
    name is logged as a warning.

    `KVXFER_METRICS=host:port` serves the metrics of this process there. Of several processes, such
    as an engine's workers, each takes the next free port.

    Raises:
        InvalidArgumentError: `KVXFER_METRICS` is not an endpoint.
        MissingExtraError: prometheus_client is not installed.
        BackendUnavailableError: No port is free, or the address is not one of this machine.
    """
    warn_of_misspelt_variables()
    return [*journal_observers(namespace, engine=engine), *_metrics_of_process(), *span_observers()]


def span_observers() -> list[Observer]:
    """Create the observer for spans, if OpenTelemetry's own variables ask for spans.

    Spans go to the program's tracer provider, such as the one that `opentelemetry-instrument` sets
    up from the same variables. There are no spans if OpenTelemetry is not installed.

    Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    is_asked = any(os.environ.get(each) for each in ENDPOINT_VARIABLES)
    exporters = os.environ.get(EXPORTERS_VARIABLE, "").strip() or ("otlp" if is_asked else "none")
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if exporters == "none" or is_disabled:
        return []
    try:
        from kvxfer.telemetry.spans import Spans
    except ImportError as exc:
        logger.info("no spans, because OpenTelemetry is not installed: %s", exc)
        return []
    return [Spans()]


def _metrics_of_process() -> list["Metrics"]:
    if not (text := os.environ.get(VARIABLE, "")):
        return []
    opened = text, os.getpid()  # a forked child does not have its parent's server thread
    with _opening:
        if opened not in _opened:
            _opened[opened] = _serve_metrics(Endpoint.parse(VARIABLE, text))
        return [_opened[opened]]


def _serve_metrics(first: Endpoint) -> "Metrics":
    require_extra("metrics", "prometheus_client", what=VARIABLE)
    from prometheus_client import start_http_server

    from kvxfer.telemetry.metrics import Metrics

    metrics = Metrics()
    last = min(first.port + MAX_PROCESSES - 1, MAX_PORT) if first.port else 0
    for port in range(first.port, last + 1):
        try:
            found = socket.getaddrinfo(first.host, port, type=socket.SOCK_STREAM)
            with next(listen_here(found)) as free:  # at the first address of this machine
                host = free.getsockname()[0]
            server, _ = start_http_server(port, host, metrics.registry)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                text = f"{VARIABLE}: cannot listen at {first}: {exc}"
                raise BackendUnavailableError(text) from exc
        else:
            # Without a timeout, half a request would occupy a thread and a descriptor forever.
            handler: Any = server.RequestHandlerClass
            server.RequestHandlerClass = type("Handler", (handler,), {"timeout": TIMEOUT_S})
            logger.info("serving metrics at %s", Endpoint(first.host, server.server_port))
            return metrics
    raise BackendUnavailableError(f"{VARIABLE}: no port from {first} to {last} is free")
