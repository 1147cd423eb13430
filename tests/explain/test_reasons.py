"""Reasons of misses, from real backends: the command says what really happened."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.connect import connect, open_backend
from kvxfer.storage import Backend, BlockKey, Namespace, Outcome, Retention, Status
from kvxfer.storage.eviction.retention import retain_in
from kvxfer.storage.observer import Moved, Operation
from kvxfer.telemetry.journal import journal_observers
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from tests.cli.peers import LIMIT_S, RETRY_S, serving
from tests.explain.conftest import Ask

KEYS = make_keys(12)
ROOM_FOR_4 = 8192 + 4 * (4096 + 32)


def answers(report: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(run["first"], run["last"], run["answer"]) for run in report["runs"]]


async def store(backend: Backend, memory: BlockMemory, keys: Sequence[BlockKey]) -> list[Status]:
    outcomes = await backend.store(keys, memory.describe(0, range(len(keys))))
    return [outcome.status for outcome in outcomes]


def tiers(root: Path) -> list[str]:
    return [f"host://?capacity={ROOM_FOR_4}", f"file://{root}?capacity=1MiB&min_free=1"]


async def test_what_was_found_names_its_tier_and_what_was_never_stored_says_so(
    memory: BlockMemory, tmp_path: Path, ask: Ask
) -> None:
    backend = open_backend(tiers(tmp_path / "kv"), memory.namespace())
    async with backend:
        await store(backend, memory, KEYS[:3])
        await backend.flush()
    async with open_backend(tiers(tmp_path / "kv"), memory.namespace()) as backend:
        await store(backend, memory, KEYS[3:4])
        assert await backend.lookup(KEYS[:6]) == [True] * 4 + [False] * 2
    report = ask([*KEYS[3:4], *KEYS[:3], *KEYS[4:6]])
    assert answers(report) == [(0, 0, "found"), (1, 3, "found"), (4, 5, "never stored")]
    assert [run["tier"] for run in report["runs"]] == ["host", "file", ""]
    assert (report["found"], report["missed"]) == ({"host": 1, "file": 3}, {"never stored": 2})
    assert "the journal begins" in report["notes"][0]


@pytest.mark.parametrize("medium", ["host", "file"])
async def test_evicted_by_the_wish_of_a_caller_says_which(
    memory: BlockMemory, tmp_path: Path, ask: Ask, medium: str
) -> None:
    url = {
        "host": f"host://?capacity={ROOM_FOR_4}",
        "file": f"file://{tmp_path}/kv?capacity={4 * 8192 + 4096}&min_free=1",
    }[medium]
    async with open_backend(url, memory.namespace()) as backend:
        await store(backend, memory, KEYS[:4])
        retain_in(backend, KEYS[1:2], Retention(ttl_s=0))
        retain_in(backend, KEYS[2:3], Retention(priority=-1))
        await store(backend, memory, KEYS[4:7])
        assert sum(await backend.lookup(KEYS[:4])) == 1
    runs = ask(KEYS[:4])["runs"]
    assert {run["answer"] for run in runs} == {"evicted", "found"}
    told = [run["text"].partition(" at ")[0] for run in runs if run["answer"] == "evicted"]
    how = "after its time to live", "by its low priority", "by capacity"
    assert sorted(told) == sorted(f"evicted from {medium} {each}" for each in how)


async def test_another_namespace_is_known_from_the_journal_of_its_engine(
    memory: BlockMemory, ask: Ask
) -> None:
    url = "host://?capacity=1MiB"
    ours, theirs = (
        connect(url, memory.caches, namespace=Namespace(model="m", revision="1", dtype=dtype))
        for dtype in ("F32", "BF16")
    )
    async with ours, theirs:
        await theirs.store(KEYS[:1], [[0]])
        assert await ours.lookup(KEYS[:1]) == [False]
    report = ask(KEYS[:1])
    assert answers(report) == [(0, 0, "in another namespace")]
    assert "dtype is 'F32' here, 'BF16' there" in report["runs"][0]["text"]


async def test_a_part_lacks_bytes(ask: Ask) -> None:
    memory = BlockMemory([[4096]], num_blocks=4, blocks_per_chunk=2)
    namespace = Namespace(model="model", revision="1")
    url = "host://?capacity=1MiB"
    async with connect(url, memory.caches, namespace=namespace, blocks_per_chunk=2) as engine:
        await engine.store(KEYS[:1], [[0]])
        assert await engine.lookup(KEYS[:1]) == [True]
        (outcome,) = await engine.load(KEYS[:1], [[2, 3]])
    assert outcome.status is Status.MISSING
    assert answers(ask(KEYS[:1])) == [(0, 0, "partial")]


async def store_and_miss(url: str, memory: BlockMemory) -> None:
    """Store seven blocks, where four have room, and look for them from another engine."""
    async with open_backend(url, memory.namespace()) as first, asyncio.timeout(LIMIT_S):
        for chosen in ((0, 1, 2), (3, 4, 5, 6)):
            keys, blocks = [KEYS[index] for index in chosen], memory.describe(0, chosen)
            # Until the peer is connected.
            while not all(outcome.done for outcome in await first.store(keys, blocks)):  # noqa: ASYNC110
                await asyncio.sleep(RETRY_S)
    async with open_backend(url, memory.namespace()) as second, asyncio.timeout(LIMIT_S):
        while not any(found := await second.lookup(KEYS[:8])):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)
        assert found == [False] * 3 + [True] * 4 + [False]


@pytest.mark.processes
@pytest.mark.parametrize("medium", ["pool", "nixl"])
def test_evicted_by_the_holder_of_a_tier(
    memory: BlockMemory, medium: str, tmp_path: Path, ask: Ask
) -> None:
    pool = tmp_path / "pool.sock" if medium == "pool" else None
    with serving("--capacity", str(ROOM_FOR_4), pool=pool) as holder:
        url = f"nixl://{holder.endpoint}" if pool is None else f"pool://{pool}"
        asyncio.run(store_and_miss(url, memory))
        assert holder.end() == 0
    report = ask(KEYS[:8])
    assert answers(report) == [(0, 2, "evicted"), (3, 6, "found"), (7, 7, "never stored")]
    text = report["runs"][0]["text"]
    assert text.startswith(f"evicted from host of {medium} by capacity at "), text
    assert "no cause" not in text
    assert report["found"] == {medium: 4}


RECORDED = {
    (Operation.STORE, "failed", "writing is paused after repeated errors"): "paused tier",
    (Operation.STORE, "failed", "no room, and no block can be evicted"): "back-pressure",
    (Operation.STORE, "failed", "no room: none of 4 slots can be evicted"): "back-pressure",
    (
        Operation.LOAD,
        "missing",
        "a part of the chunk is stored, without all these bytes",
    ): "partial",
}
"""Reasons in journals of earlier releases, which new words must not take from `kvxfer explain`."""


@pytest.mark.parametrize(("recorded", "answer"), RECORDED.items(), ids=str)
def test_the_reasons_of_earlier_journals_are_known(
    ask: Ask, recorded: tuple[Operation, str, str], answer: str
) -> None:
    operation, status, reason = recorded
    (observer,) = journal_observers(Namespace(model="m"))
    outcome = Outcome(Status(status), reason=reason)
    observer.note(Moved("file", operation, KEYS[:1], [outcome], {}, 0.5))
    assert answers(ask(KEYS[:1])) == [(0, 0, answer)]
