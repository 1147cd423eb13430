"""Recording of vLLM's requests: their chunks in order, once each, and no error to the engine."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext

from kvxfer.integrations.vllm.offloading.requests import Requests
from kvxfer.replay import read_trace
from kvxfer.storage.keys import make_block_key
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.trace_recorder import TraceRecorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def arrive(recorder: Requests, req_id: str, *chunks: int) -> ReqContext:
    """Let a request arrive, and then vLLM tell its chunks, of two groups of different sizes."""
    context = ReqContext(req_id)
    if not hasattr(context, "set_offload_key_position"):
        pytest.skip("this vLLM does not tell the chunks of a request")
    recorder.arrive(context)
    for index, chunk in enumerate(chunks):
        key = make_block_key(b"%d" % chunk, 0)
        context.set_offload_key_position(key, 32 * (index + 1))
    for index in range(2 * len(chunks)):
        context.set_offload_key_position(make_block_key(b"%d" % index, 1), 16 * (index + 1))
    return context


def test_requests_are_recorded_when_they_are_scheduled_for_the_first_time(path: Path) -> None:
    recorder = Requests(Reports(), trace=TraceRecorder(str(path)))
    arrive(recorder, "a", 1, 2)
    arrive(recorder, "aborted", 9)
    arrive(recorder, "without a whole chunk")
    context = arrive(recorder, "b", 1, 3, 4)
    recorder.schedule(["b", "without a whole chunk"])
    recorder.finish("aborted")
    recorder.schedule(["a", "aborted", "unknown"])
    context.set_offload_key_position(make_block_key(b"5", 0), 128)  # of the answer
    recorder.schedule(["b"])
    recorder.close()
    trace = read_trace(path)
    lengths = sorted(zip(trace.input_lengths.tolist(), map(len, trace.requests()), strict=True))
    assert lengths == [(64, 2), (96, 3)]
    assert trace.num_unique == 4
    assert trace.tokens_per_block == 32


class OtherContext:
    req_id = "a"


class BrokenContext(OtherContext):
    _offload_key_positions = 7


@pytest.mark.parametrize(
    ("context", "said"),
    [(OtherContext(), "does not tell their chunks"), (BrokenContext(), "no more requests are")],
)
def test_what_cannot_be_recorded_costs_one_line_of_the_log(
    path: Path, caplog: pytest.LogCaptureFixture, context: OtherContext, said: str
) -> None:
    recorder = Requests(Reports(), trace=TraceRecorder(str(path)))
    for _ in range(3):
        recorder.arrive(context)
        recorder.schedule(["a"])
    recorder.close()
    assert [said in record.message for record in caplog.records] == [True]
    assert path.read_text() == ""
