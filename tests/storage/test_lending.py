"""Lenders: blocks are read and written in place."""

from collections.abc import AsyncIterator

import pytest
import xxhash

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.runtime import Threads
from kvxfer.storage.backend import Backend, Status
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts, Lender, StagedLender
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from kvxfer.testing.payloads import read_payloads
from kvxfer.units import ByteSize

KEYS = make_keys(4)


@pytest.fixture
def memory() -> BlockMemory:
    return make_memory()


@pytest.fixture(params=["host", "fenced", "staged"])
async def lending(
    request: pytest.FixtureRequest, memory: BlockMemory
) -> AsyncIterator[tuple[Lender, Backend]]:
    namespace = memory.namespace()
    if request.param in {"host", "fenced"}:
        integrity = MemoryIntegrity("full" if request.param == "host" else "fenced")
        config = HostConfig(capacity=ByteSize(1 << 20), integrity=integrity)
        async with HostBackend(config, namespace) as host:
            yield host, host
        return
    threads, engine = Threads("test-lending", 1), CPUCopyEngine()
    async with DictBackend(DictConfig(), namespace) as backend:
        lender = StagedLender(
            backend, namespace, copy_engine=engine, threads=threads, max_bytes=1 << 18
        )
        yield lender, backend
        await lender.aclose()
    await threads.aclose()
    engine.close()


def whole(memory: BlockMemory, keys: list[BlockKey]) -> BlockParts:
    size = memory.chunk_size_bytes(0)
    return BlockParts(keys, [0] * len(keys), [size] * len(keys))


async def test_what_was_stored_is_lent_with_its_checksum(
    lending: tuple[Lender, Backend], memory: BlockMemory
) -> None:
    lender, backend = lending
    payloads = await store_generated(backend, KEYS[:2], memory.describe(0, [0, 1]))
    async with lender.lend(whole(memory, [KEYS[3], KEYS[1], KEYS[0]])) as loan:
        statuses = [outcome.status for outcome in loan.outcomes]
        assert statuses == [Status.MISSING, Status.DONE, Status.DONE]
        assert loan.blocks is not None
        assert read_payloads(loan.blocks) == [payloads[1], payloads[0]]
        expected = [xxhash.xxh3_64_intdigest(payloads[index]) for index in (1, 0)]
        assert loan.checksums == expected
        for address, length in zip(loan.blocks.addresses, loan.blocks.lengths, strict=True):
            assert any(
                region.address <= address and address + length <= region.address + region.num_bytes
                for region in lender.regions
            )


@pytest.mark.parametrize(
    ("keys", "starts", "sizes"),
    [
        ([], [], []),
        (KEYS[:1], [0], [0]),
        (KEYS[:1], [-1], [8]),
        (KEYS[:1], [0], [1 << 40]),
        (KEYS[:2], [0], [8]),
        ([KEYS[0], KEYS[0]], [0, 0], [8, 8]),
        (make_keys(1, group=7), [0], [8]),
    ],
)
async def test_what_no_block_has_is_refused(
    lending: tuple[Lender, Backend], keys: list[BlockKey], starts: list[int], sizes: list[int]
) -> None:
    lender, _ = lending
    for context in (lender.lend, lender.make_room):
        with pytest.raises(InvalidArgumentError):
            async with context(BlockParts(keys, starts, sizes)):
                pytest.fail("lent")


async def test_only_host_memory_says_where_blocks_are(
    request: pytest.FixtureRequest, lending: tuple[Lender, Backend], memory: BlockMemory
) -> None:
    lender, backend = lending
    payloads = await store_generated(backend, KEYS[:2], memory.describe(0, [0, 1]))
    if request.node.callspec.params["lending"] == "fenced":
        assert lender.peek([KEYS[1], KEYS[3], KEYS[0]]) is None, "nobody has hashed them"
        async with lender.lend(whole(memory, KEYS[:2])):
            pass
    sight = lender.peek([KEYS[1], KEYS[3], KEYS[0]])
    if not isinstance(lender, HostBackend):
        assert sight is None
        return
    assert sight is not None
    assert sight.blocks is not None
    assert statuses(sight.outcomes) == [Status.DONE, Status.MISSING, Status.DONE]
    assert read_payloads(sight.blocks) == [payloads[1], payloads[0]]
    assert sight.checksums == [xxhash.xxh3_64_intdigest(payloads[index]) for index in (1, 0)]
    absent = lender.peek([KEYS[3]])
    assert absent is not None
    assert absent.blocks is None
