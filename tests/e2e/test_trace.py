"""A real engine's trace has its hits, its journal explains each, and its events have all blocks."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvxfer.backends.file import BlockTree, refuse_partial_walk
from kvxfer.explain import Answer, explain
from kvxfer.replay import bytes_per_token, count_ceiling, plan_tiers, read_trace
from kvxfer.replay.simulation import SimulatedTier, SimulatedTiers
from kvxfer.storage.observer import Requested
from kvxfer.telemetry.journal import Noted, list_files
from tests.e2e import models
from tests.e2e.conftest import Start
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import AuditedEngine, random_prompts
from tests.telemetry.event_subscriber import EventSubscriber

pytestmark = pytest.mark.e2e

CAPACITY = "3200KiB"


def run_alone(engine: AuditedEngine, prompt: list[int]) -> int:
    """Run a prompt, with nothing in the device's own cache; return its blocks that were hits."""
    (generation,) = engine.generate([prompt], max_tokens=1)
    engine.offload()
    return generation.cached_tokens // TOKENS_PER_BLOCK


def request_ids(journal: Path) -> list[str]:
    """List the requests of a journal that have whole blocks, in the order of their schedule."""
    records = (record for file in list_files(journal) for record in file.records())
    events = [each.event for each in records if isinstance(each, Noted)]
    return [each.request_id for each in events if isinstance(each, Requested) and each.keys]


def require_explained(journal: Path, order: list[list[int]], hits: list[int]) -> None:
    """Check that every request is explained by its id: as many blocks were found as hit."""
    seen: set[str] = set()
    answers: set[Answer] = set()
    for index, (prompt, num_hits) in enumerate(zip(order, hits, strict=True)):
        (report,) = explain([request_ids(journal)[index]], journal)
        assert report.num_blocks == len(prompt) // TOKENS_PER_BLOCK
        assert sum(report.found.values()) == num_hits, report
        for run in report.runs:
            if run.answer is not Answer.FOUND:
                answers.add(run.answer)
                is_new = Answer.NEVER_STORED is run.answer
                assert is_new == seen.isdisjoint(run.keys) or run.answer is Answer.NOT_LOOKED_UP
            seen.update(run.keys)
    assert answers == {Answer.NEVER_STORED, Answer.EVICTED, Answer.NOT_LOOKED_UP}


def test_a_recorded_trace_has_the_hits_of_the_engine(start: Start, tmp_path: Path) -> None:
    path, journal = tmp_path / "trace.jsonl", tmp_path / "journal"
    engine = start(
        "llama",
        capacity=CAPACITY,
        environment={"KVXFER_TRACE": str(path), "KVXFER_JOURNAL": str(journal)},
        kv_cache_memory_bytes=32 << 20,
        max_model_len=2048,
    )
    first, second, third = random_prompts(3, shared_tokens=300, own_tokens=400, seed=1)
    other, more, last = random_prompts(3, shared_tokens=150, own_tokens=500, seed=2)
    order = [first, second, first, third, other, more, second, last, other, first + [7] * 200]
    hits = [run_alone(engine, prompt) for prompt in order]
    engine.close()
    require_explained(journal, order, hits)

    trace = read_trace(path)
    block_bytes = TOKENS_PER_BLOCK * bytes_per_token(models.DEFAULT_DIRECTORY / "llama")
    (tier,) = map(SimulatedTier, plan_tiers(f"host://?capacity={CAPACITY}", block_bytes))
    modelled, tiers = [0], SimulatedTiers([tier])
    for blocks in trace.requests():
        tiers.replay(blocks)
        modelled.append(tier.num_hits)
    assert trace.tokens_per_block == TOKENS_PER_BLOCK
    assert [len(blocks) for blocks in trace.requests()] == [
        len(each) // TOKENS_PER_BLOCK for each in order
    ]
    assert [after - before for before, after in pairwise(modelled)] == hits
    assert 0 < sum(hits) < count_ceiling(trace)  # some were evicted


def test_an_index_from_vllms_events_is_that_of_the_tiers(start: Start, tmp_path: Path) -> None:
    files, events, replay = (tmp_path / name for name in ("files", "events", "replay"))
    engine = start(
        "llama",
        files=files,
        capacity="1MiB",
        events={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{events}",
            "replay_endpoint": f"ipc://{replay}",
        },
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )
    for seed in range(3):
        prompts = random_prompts(1, shared_tokens=700, own_tokens=5, seed=seed)
        engine.generate(prompts, max_tokens=2)
        engine.settle()  # a reset of the device would tell routers to forget everything
    engine.generate(random_prompts(1, shared_tokens=5, own_tokens=5), max_tokens=2)  # one more step

    found = list(BlockTree(files, on_error=refuse_partial_walk).blocks())
    in_host = engine.metrics()['vllm:kvxfer_stored_blocks{tier="host"}']
    with EventSubscriber.opened(f"ipc://{events}", f"ipc://{replay}") as subscriber:
        subscriber.catch_up()
    assert subscriber.kept["file"] == {each.key for each in found}
    assert len(subscriber.kept["CPU"]) == in_host
    assert len(found) > in_host > 0
    assert subscriber.kept["GPU"]
