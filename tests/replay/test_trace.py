"""Traces: Mooncake's format, errors about lines that are not in it, and synthetic traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer import replay

LINE = {"timestamp": 27, "input_length": 600, "output_length": 3, "hash_ids": [46, 47]}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_trace_is_read_in_the_order_of_its_timestamps(tmp_path: Path) -> None:
    later = {"timestamp": 30.5, "input_length": 513, "output_length": 9, "hash_ids": [46, 2]}
    trace = replay.read_trace(write(tmp_path / "t", later, "", LINE | {"type": "chat"}))
    assert list(trace.requests()) == [[0, 1], [0, 2]]
    assert trace.timestamps_ms.tolist() == [27, 30.5]
    assert trace.input_lengths.tolist() == [600, 513]
    assert (trace.num_requests, trace.num_references, trace.num_unique) == (2, 4, 3)
    assert trace.duration_s == 0.0035
    assert trace.tokens_per_block == 512


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 1', "input data was truncated"),
        ("[]", "expected a mapping, got a list"),
        (LINE | {"timestamp": -1}, "timestamp is -1; expected a number >= 0.0"),
        (LINE | {"hash_ids": [46, -7]}, "hash_ids[1] is -7; expected a whole number >= 0"),
        (LINE | {"hash_ids": [46, 46]}, "hash_ids has 46 twice; expected each block of a prompt"),
        ({"timestamp": 1, "hash_ids": []}, "input_length is missing"),
        (LINE | {"tokens_per_block": 0}, "tokens_per_block is 0; expected a whole number >= 1"),
        (LINE | {"tokens_per_block": 10**10}, "tokens_per_block is 10000000000; expected a whole"),
        (
            LINE | {"input_length": 5000},
            "input_length is 5000, and hash_ids has 2 blocks; expected 9 or 10 of 512 tokens",
        ),
    ],
)
def test_a_broken_line_is_named_with_its_field_and_value(
    tmp_path: Path, line: dict[str, Any] | str, problem: str
) -> None:
    path = write(tmp_path / "t", LINE, "  ", line)
    with pytest.raises(replay.TraceError) as raised:
        replay.read_trace(path)
    assert str(raised.value).startswith(f"{path}, line 3: {problem}")


def test_a_line_without_an_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.replay.trace.MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(
        replay.TraceError, match="/dev/zero, line 1: more than 1 MiB; expected a request"
    ):
        replay.read_trace(Path("/dev/zero"))


# Synthetic traces
kinds = pytest.mark.parametrize("kind", replay.WORKLOADS)


@kinds
def test_a_seed_makes_one_trace_and_another_seed_another(kind: str) -> None:
    workload = replay.parse_workload(f"{kind},requests=200")
    traces = [replay.make_synthetic(workload, seed=seed) for seed in (1, 1, 2)]
    first, again, other = [list(trace.requests()) for trace in traces]
    assert first == again != other
    assert traces[0].timestamps_ms.tolist() == traces[1].timestamps_ms.tolist()
    assert len(first) == 200
    assert traces[0].name == f"synthetic {kind}, seed 1"


@kinds
def test_equal_blocks_have_equal_prefixes_as_in_a_chain_of_hashes(kind: str) -> None:
    trace = replay.make_synthetic(replay.parse_workload(f"{kind},requests=300"), seed=1)
    prefixes: dict[int, tuple[int, ...]] = {}
    for blocks in trace.requests():
        for index, block in enumerate(blocks):
            assert prefixes.setdefault(block, tuple(blocks[:index])) == tuple(blocks[:index])
    assert 0 < replay.count_ceiling(trace) == trace.num_references - trace.num_unique


@pytest.mark.parametrize(
    "workload",
    [
        replay.MultiTurn(requests=10**7, user_tokens=10**7),
        replay.Rag(requests=10, system_tokens=10**7),
        replay.Agentic(system_prompts=10**6, system_tokens=10**7),
    ],
)
def test_more_blocks_than_memory_has_room_for_are_refused_at_once(
    workload: replay.MultiTurn | replay.Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.replay.synthetic.MAX_BLOCKS", 10_000)
    with pytest.raises(
        replay.TraceError, match="more than 10,000 blocks; expected fewer or shorter"
    ):
        replay.make_synthetic(workload, tokens_per_block=16)
