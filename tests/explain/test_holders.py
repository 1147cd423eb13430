"""Blocks that a peer or a host pool dropped: its journal explains the misses of engines."""

import asyncio
from pathlib import Path

import pytest

from kvxfer.connect import open_backend
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from tests.cli.peers import LIMIT_S, RETRY_S, serving
from tests.explain.conftest import Ask

KEYS = make_keys(8)
ROOM_FOR_4 = 8192 + 4 * (4096 + 32)

pytestmark = pytest.mark.processes


async def store_and_miss(url: str, memory: BlockMemory) -> None:
    """Store seven blocks, where four have room, and look for them from another engine."""
    async with open_backend(url, memory.namespace()) as first, asyncio.timeout(LIMIT_S):
        for chosen in ((0, 1, 2), (3, 4, 5, 6)):
            keys, blocks = [KEYS[index] for index in chosen], memory.describe(0, chosen)
            # Until the peer is connected.
            while not all(outcome.done for outcome in await first.store(keys, blocks)):  # noqa: ASYNC110
                await asyncio.sleep(RETRY_S)
    async with open_backend(url, memory.namespace()) as second, asyncio.timeout(LIMIT_S):
        while not any(found := await second.lookup(KEYS)):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)
        assert found == [False] * 3 + [True] * 4 + [False]


@pytest.mark.parametrize("medium", ["pool", "nixl"])
def test_evicted_by_the_holder_of_a_tier(medium: str, tmp_path: Path, ask: Ask) -> None:
    memory = BlockMemory([[4096]], num_blocks=8)
    pool = tmp_path / "pool.sock" if medium == "pool" else None
    with serving("--capacity", str(ROOM_FOR_4), pool=pool) as holder:
        url = f"nixl://{holder.endpoint}" if pool is None else f"pool://{pool}"
        asyncio.run(store_and_miss(url, memory))
        assert holder.end() == 0
    report = ask(KEYS)
    runs = [(run["first"], run["last"], run["answer"]) for run in report["runs"]]
    assert runs == [(0, 2, "evicted"), (3, 6, "found"), (7, 7, "never stored")]
    text = report["runs"][0]["text"]
    assert text.startswith(f"evicted from host of {medium} by capacity at "), text
    assert "no cause" not in text
    assert report["found"] == {medium: 4}
