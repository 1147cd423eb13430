"""Chunks of which a lower tier holds a part: a lookup finds them, a load gives that part."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.file_store import open_store
from tests.tiering.opened_tiers import open_host, open_tiers

CAPACITY = ByteSize(1 << 20)
MEMORY = BlockMemory([[4096]], num_blocks=4, blocks_per_chunk=2)
NAMESPACE = MEMORY.namespace()
PART, WHOLE, ABSENT = make_keys(3)
HALF, BOTH = MEMORY.describe(0, [1], first_block_index=1), MEMORY.describe(0, [2, 3])
PAYLOADS = make_payload(PART, 4096), make_payload(WHOLE, 8192)


def open_lower(namespace: Namespace) -> HostBackend:
    return HostBackend(HostConfig(capacity=CAPACITY), namespace)


@asynccontextmanager
async def opened(lower: str, folder: Path) -> AsyncIterator[Backend]:
    """Open a backend in which `PART` and `WHOLE` are stored."""
    if lower == "nixl":
        config = NixlConfig(listen="127.0.0.1:0", capacity=CAPACITY, transport="socket")
        async with aclosing(StandalonePeer(config, open_lower)) as peer:
            await peer.start()
            config = NixlConfig(address=str(peer.endpoint), transport="socket")
            async with NixlBackend(config, NAMESPACE) as other:
                await store(other)
            yield NixlBackend(config, NAMESPACE)
        return
    below = open_lower(NAMESPACE) if lower == "host" else open_store(folder / "store", NAMESPACE)
    await store(below)
    yield below


async def store(backend: Backend) -> None:
    for key, blocks, payload in zip([PART, WHOLE], [HALF, BOTH], PAYLOADS, strict=True):
        write_payloads(blocks, [payload])
        (outcome,) = await backend.store([key], blocks)
        assert outcome.done, outcome


@pytest.mark.parametrize("first", ["looked up", "not looked up"])
@pytest.mark.parametrize("lower", ["host", "file", "nixl"])
async def test_a_part_of_a_chunk_is_found_below_the_first_tier(
    lower: str, first: str, tmp_path: Path
) -> None:
    async with (
        opened(lower, tmp_path) as below,
        open_tiers([open_host(NAMESPACE, 4), below], NAMESPACE) as tiers,
    ):
        if first == "looked up":
            assert await tiers.lookup([PART, WHOLE, ABSENT]) == [True, True, False]
        MEMORY.fill(0)
        for key, blocks, payload in zip([PART, WHOLE], [HALF, BOTH], PAYLOADS, strict=True):
            (outcome,) = await tiers.load([key], blocks)
            assert outcome.done, outcome
            assert read_payloads(blocks) == [payload]
        (outcome,) = await tiers.load([PART], BOTH)
        assert not outcome.done


@pytest.mark.parametrize("lower", ["host", "file"])
async def test_a_chunk_that_grows_is_whole_below_after_a_flush(lower: str, tmp_path: Path) -> None:
    below = open_lower(NAMESPACE) if lower == "host" else open_store(tmp_path / "store", NAMESPACE)
    async with open_tiers([open_host(NAMESPACE, 4), below], NAMESPACE) as tiers:
        for blocks in (MEMORY.describe(0, [1]), BOTH, BOTH):
            [outcome] = await tiers.store([WHOLE], blocks)
            assert outcome.done, outcome
            await tiers.flush()
        [outcome] = await below.load([WHOLE], BOTH)
        assert outcome.done, outcome


async def test_a_chunk_that_grows_in_the_middle_is_whole_in_the_last_tier() -> None:
    first, middle, last = open_host(NAMESPACE, 4), open_lower(NAMESPACE), open_lower(NAMESPACE)
    async with open_tiers([first, middle, last], NAMESPACE) as tiers:
        for blocks in (MEMORY.describe(0, [1]), BOTH):
            [outcome] = await tiers.store([WHOLE], blocks)
            assert outcome.done, outcome
            await tiers.flush()
            await first.delete([WHOLE])  # as for room: what grows is in the tier below
        [outcome] = await last.load([WHOLE], BOTH)
        assert outcome.done, outcome


async def test_a_part_that_is_stored_again_does_not_replace_a_whole_chunk_that_waits() -> None:
    below = open_lower(NAMESPACE)
    async with open_tiers([open_host(NAMESPACE, 4), below], NAMESPACE) as tiers:
        for blocks in (BOTH, HALF):  # the write-back begins after both
            await tiers.store([WHOLE], blocks)
        await tiers.flush()
        [outcome] = await below.load([WHOLE], BOTH)
        assert outcome.done, outcome
