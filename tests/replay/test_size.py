"""Size: traces of ten million blocks are replayed as small ones are."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvxfer.cli import main
from kvxfer.replay import (
    MultiTurn,
    Trace,
    make_synthetic,
    write_trace,
)

NUM_COPIES = 46


def repeat(trace: Trace, num_copies: int) -> Trace:
    """Repeat a trace with other blocks each time, one after the other."""
    copies = range(num_copies)
    lengths = np.tile(np.diff(trace.bounds), num_copies)
    pause_ms = 1000 * (trace.duration_s + 1)
    return Trace(
        name=trace.name,
        tokens_per_block=trace.tokens_per_block,
        timestamps_ms=np.concatenate([trace.timestamps_ms + nth * pause_ms for nth in copies]),
        input_lengths=np.tile(trace.input_lengths, num_copies),
        output_lengths=np.tile(trace.output_lengths, num_copies),
        block_ids=np.concatenate([trace.block_ids + nth * trace.num_unique for nth in copies]),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    chats = make_synthetic(MultiTurn(requests=4000, requests_per_s=4), seed=1)
    trace = repeat(chats, NUM_COPIES)
    assert trace.num_references > 10_000_000
    return trace


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_policies_and_capacities_are_replayed_for_ten_million_blocks(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert main(["replay", str(path), "--json", "--blocks", "1000,20000,10000000"]) == 0
    rows = json.loads(capsys.readouterr().out)["capacities"]
    assert {row["policy"] for row in rows} == {"lru", "arc"}
    for each in (rows[:3], rows[3:]):
        hits = [row["num_hits"] for row in each]
        assert hits == sorted(hits)
