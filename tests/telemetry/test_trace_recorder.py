"""Recorder: what it writes is a trace, and nothing that fails reaches the engine."""

import json
import logging
import resource
from pathlib import Path

import pytest

from kvxfer.replay import read_trace
from kvxfer.telemetry.trace_recorder import RecordedRequest, TraceRecorder


def request(*blocks: int, arrival_s: float = 1.75) -> RecordedRequest:
    hashes = [block.to_bytes(32, "big") for block in blocks]
    return RecordedRequest(arrival_s, 16 * len(blocks) + 3, 16, hashes)


def record(path: Path, *requests: RecordedRequest, **how: int) -> None:
    recorder = TraceRecorder(str(path), **how)
    for each in requests:
        recorder.record(each)
    recorder.close()
    recorder.close()


def test_recorded_requests_are_a_trace_with_their_equal_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, request(1, 2), request(1, 3, arrival_s=2))
    record(path, request(1, 2, arrival_s=4))
    trace = read_trace(path)
    assert list(trace.requests()) == [[0, 1], [0, 2], [0, 1]]
    assert trace.timestamps_ms.tolist() == [1750, 2000, 4000]
    assert trace.input_lengths.tolist() == [35] * 3
    assert trace.tokens_per_block == 16


def test_a_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path / "no" / "such" / "folder", *[request(1)] * 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not recording requests" in caplog.text


def test_a_file_does_not_grow_beyond_its_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(50):
        record(path, request(1, 2, 3), max_bytes=1000)
    assert 500 < path.stat().st_size <= 1000
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert "it has reached 1000 bytes" in caplog.text


def test_a_request_that_the_disk_takes_in_part_is_left_out_wholly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, request(1, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = TraceRecorder(str(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        full.record(request(1, 3))
        full.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record(path, request(1, 4))
    assert list(read_trace(path).requests()) == [[0, 1], [0, 2]]
