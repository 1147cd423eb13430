"""Faults planted between a peer and its holder, for each grade of integrity."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.places import read_proofs
from kvxfer.backends.nixl.session import ClientSession
from kvxfer.backends.nixl.wire.messages import (
    Extents,
    Fencing,
    Found,
    Lookup,
    Publish,
    Pulled,
)
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import Fences
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.host_blocks import flip
from tests.backends.nixl_pair import KEYS, Pair, open_pair

GRADES = ["full", "fenced"]
DONE, CORRUPT, FAILED = Status.DONE, Status.CORRUPT, Status.FAILED


async def load(
    pair: Pair, keys: Sequence[BlockKey], client: NixlBackend | None = None
) -> tuple[list[Status], list[bytes]]:
    target = pair.memory.describe(0, range(8, 8 + len(keys)))
    outcomes = await (client or pair.client).load(list(keys), target)
    return statuses(outcomes), read_payloads(target)


async def open_other(pair: Pair, integrity: str) -> NixlBackend:
    """Open another peer of the same holder, with a grade of its own."""
    assert pair.holder.server is not None
    address = str(pair.holder.server.endpoint)
    config = NixlConfig(address=address, integrity=integrity)  # type: ignore[arg-type]
    other = NixlBackend(config, pair.memory.namespace(), make_agent=FakeNixlAgent)
    other.attach(memory_regions(pair.memory.caches))
    return other


@pytest.mark.parametrize(("grade", "found"), [("full", CORRUPT), ("fenced", DONE)])
async def test_only_a_checksum_catches_a_bit_that_flipped_in_memory(
    grade: str, found: Status
) -> None:
    async with open_pair(integrity=grade) as pair:
        flip(pair.host, KEYS[0])
        seen, _ = await load(pair, KEYS)
        assert seen == [found, DONE, DONE, DONE]


@pytest.mark.parametrize("reader", GRADES)
@pytest.mark.parametrize("writer", GRADES)
async def test_peers_of_either_grade_load_what_those_of_the_other_one_stored(
    writer: str, reader: str
) -> None:
    async with open_pair(integrity=writer) as pair, await open_other(pair, reader) as other:
        for looks_up in (False, True, True):
            if looks_up:
                assert await other.lookup(KEYS) == [True] * 4
            assert await load(pair, KEYS, other) == ([DONE] * 4, pair.payloads)


async def test_a_block_that_was_stored_unhashed_is_hashed_for_its_first_reader_who_verifies() -> (
    None
):
    async with open_pair(integrity="fenced") as pair, await open_other(pair, "full") as other:
        assert await load(pair, KEYS[:2], other) == ([DONE] * 2, pair.payloads[:2])
        flip(pair.host, KEYS[0])
        seen, _ = await load(pair, KEYS[:2], other)
        assert seen == [CORRUPT, DONE]
        assert await other.lookup(KEYS) == [False, True, True, True]


async def test_bytes_that_change_while_they_are_stored_are_not_stored() -> None:
    async with open_pair() as pair:
        agent = pair.holder_agents[-1]
        agent.hold()
        source = pair.memory.describe(0, [8, 9])
        keys = make_keys(2, first=50)
        payloads = [make_payload(key, pair.memory.chunk_size_bytes(0)) for key in keys]
        write_payloads(source, payloads)
        storing = asyncio.create_task(pair.client.store(keys, source))
        await agent.until_held()  # hashed meanwhile
        write_payloads(source.select(0, 1), [payloads[1]])
        agent.release()
        assert statuses(await storing) == [FAILED, DONE]
        assert await pair.client.lookup(keys) == [False, True]


@pytest.mark.parametrize("num_checksums", [0, 1, 3])
async def test_a_store_is_published_with_a_checksum_for_each_block_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, num_checksums: int
) -> None:
    original = ClientSession._publish

    async def publish(self: ClientSession, request: Publish) -> Pulled:
        checksums = [7] * num_checksums
        return await original(self, msgspec.structs.replace(request, checksums=checksums))

    async with open_pair() as pair:
        monkeypatch.setattr(ClientSession, "_publish", publish)
        keys = make_keys(2, first=50)
        outcomes = await pair.client.store(keys, pair.memory.describe(0, [8, 9]))
        assert statuses(outcomes) == [FAILED] * 2
        assert f"checksums is {num_checksums}; expected 2" in outcomes[0].reason
        assert await pair.client.lookup(keys) == [False] * 2


ADDRESS = 1 << 20


def extents(*offsets: int, length: int = 8) -> Extents:
    return Extents(
        regions=np.zeros(len(offsets), np.uint32).tobytes(),
        offsets=np.array(offsets, np.uint64).tobytes(),
        lengths=np.full(len(offsets), length, np.uint64).tobytes(),
        block_offsets=np.arange(len(offsets) + 1).tobytes(),
    )


def found(fences: Fencing) -> Found:
    return Found(request_id=1, there=[True, True], extents=extents(0, 8), fences=fences)


def generations(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def test_generations_are_read_with_their_places() -> None:
    answer = found(Fencing(extents=extents(8, 32), generations=generations(2**64 - 1, 7)))
    proofs = read_proofs(Regions([(ADDRESS, 64)]), answer, 2)
    assert isinstance(proofs, Fences)
    assert proofs.addresses.tolist() == [ADDRESS + 8, ADDRESS + 32]
    assert proofs.generations.tolist() == [2**64 - 1, 7]


@pytest.mark.parametrize(
    ("fences", "shown"),
    [
        (Fencing(extents=extents(8), generations=generations(1, 2)), "extents of generations"),
        (Fencing(extents=extents(8, 16), generations=generations(1)), "bytes of generations is 8"),
        (Fencing(extents=extents(8, 16), generations=b"\1" * 15), "bytes of generations is 15"),
        (
            Fencing(extents=extents(8, 16, length=16), generations=generations(1, 2)),
            "extents of generations",
        ),
        (Fencing(extents=extents(8, 64), generations=generations(1, 2)), "region"),
    ],
)
def test_generations_that_cannot_be_are_refused(fences: Fencing, shown: str) -> None:
    with pytest.raises(InvalidArgumentError, match=shown):
        read_proofs(Regions([(ADDRESS, 64)]), found(fences), 2)


async def test_a_holder_that_answers_with_generations_unasked_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = ClientSession._lookup

    async def lookup(self: ClientSession, request: Lookup) -> Found:
        return await original(
            self, Lookup(request_id=request.request_id, keys=request.keys, places=True, fenced=True)
        )

    async with open_pair() as pair:
        monkeypatch.setattr(ClientSession, "_lookup", lookup)
        assert await pair.client.lookup(KEYS) == [True] * 4
        seen, _ = await load(pair, KEYS)
        assert seen == [FAILED] * 4
