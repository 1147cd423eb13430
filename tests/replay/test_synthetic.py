"""Synthetic traces: the same for the same seed, and prompts that share what they should."""

import pytest

from kvxfer.replay import (
    WORKLOADS,
    Agentic,
    MultiTurn,
    Rag,
    TraceError,
    Workload,
    count_ceiling,
    make_synthetic,
    parse_workload,
)

kinds = pytest.mark.parametrize("kind", WORKLOADS)


@kinds
def test_a_seed_makes_one_trace_and_another_seed_another(kind: str) -> None:
    workload = parse_workload(kind, {"requests": "200"})
    traces = [make_synthetic(workload, seed=seed) for seed in (1, 1, 2)]
    first, again, other = [list(trace.requests()) for trace in traces]
    assert first == again != other
    assert traces[0].timestamps_ms.tolist() == traces[1].timestamps_ms.tolist()
    assert len(first) == 200
    assert traces[0].name == f"synthetic {kind}, seed 1"


@kinds
def test_equal_blocks_have_equal_prefixes_as_in_a_chain_of_hashes(kind: str) -> None:
    trace = make_synthetic(parse_workload(kind, {"requests": "300"}), seed=1)
    prefixes: dict[int, tuple[int, ...]] = {}
    for blocks in trace.requests():
        for index, block in enumerate(blocks):
            assert prefixes.setdefault(block, tuple(blocks[:index])) == tuple(blocks[:index])
    assert 0 < count_ceiling(trace) == trace.num_references - trace.num_unique


def test_blocks_are_whole_and_end_where_texts_differ() -> None:
    one = MultiTurn(requests=50, system_prompts=1, system_tokens=100, requests_per_s=100)
    trace = make_synthetic(one, seed=1, tokens_per_block=16)
    lengths = [len(blocks) for blocks in trace.requests()]
    assert lengths == (trace.input_lengths // 16).tolist()
    heads = {tuple(blocks[:6]) for blocks in trace.requests()}
    assert len(heads) == 1  # 96 of the 100 tokens that all have
    assert len({blocks[6] for blocks in trace.requests() if len(blocks) > 6}) > 1


@pytest.mark.parametrize(
    "workload",
    [
        MultiTurn(requests=10**7, user_tokens=10**7),
        Rag(requests=10, system_tokens=10**7),
        Agentic(agents=10**6, system_tokens=10**7),
    ],
)
def test_more_blocks_than_memory_has_room_for_are_refused_at_once(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.replay.synthetic.MAX_BLOCKS", 10_000)
    with pytest.raises(TraceError, match="more than 10,000 blocks; expected fewer or shorter"):
        make_synthetic(workload, tokens_per_block=16)
