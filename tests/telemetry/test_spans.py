"""Spans follow batches into the tiers, as children of the span in which the engine was called."""

import asyncio
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvxfer import Namespace, TransferEngine
from kvxfer.connect import connect
from kvxfer.telemetry.spans import Spans
from kvxfer.testing import BlockMemory, DictBackend, FaultRates, FaultyBackend
from kvxfer.testing.conformance.suite import make_keys

KEYS = make_keys(3)


class Exported:
    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("program")

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


def test_so_they_are_when_the_engine_has_a_loop_of_its_own(memory: BlockMemory) -> None:
    exported = Exported()
    engine = connect(
        "host://?capacity=1MiB",
        memory.caches,
        namespace=Namespace(model="model", revision="1"),
        observers=[Spans(exported.provider)],
    )

    async def use() -> None:
        with exported.tracer.start_as_current_span("request"):
            await engine.store(KEYS[:2], [[0, 1]])
            await engine.lookup(KEYS)

    asyncio.run(use())
    engine.close()
    spans = exported.spans()
    request = spans["request"]
    assert set(spans) == {"request", "kvxfer.store", "kvxfer.store host", "kvxfer.lookup"}
    for name in set(spans) - {"request"}:
        span = spans[name]
        assert span.parent.span_id == request.get_span_context().span_id, name
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time, name
    batch, move = spans["kvxfer.store"].attributes, spans["kvxfer.store host"].attributes
    assert [batch[f"kvxfer.{name}"] for name in ("blocks", "bytes", "done")] == [2, 8192, 2]
    assert (move["kvxfer.tier"], move["kvxfer.cause"]) == ("host", "request")
    assert dict(spans["kvxfer.lookup"].attributes or {}) == {"kvxfer.blocks": 3, "kvxfer.hits": 2}


async def test_a_batch_that_failed_is_an_error(memory: BlockMemory) -> None:
    exported = Exported()
    rates = FaultRates(failure=1.0)
    faulty = FaultyBackend(DictBackend(None, memory.namespace()), seed=0, rates=rates)
    spans = Spans(exported.provider)
    async with TransferEngine(memory.caches, faulty, observers=[spans]) as engine:
        await engine.store(KEYS[:1], [[0]])
    status = exported.spans()["kvxfer.store"].status
    assert status.status_code is StatusCode.ERROR
    assert (status.description or "").startswith("failed: ")
