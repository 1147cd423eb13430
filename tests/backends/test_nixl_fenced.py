"""Faults planted between a peer and its holder, for each grade of integrity."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

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
    Pull,
    Pulled,
)
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import InvalidArgumentError, TransferFailedError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import Fences
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.host_blocks import flip
from tests.backends.nixl_pair import KEYS, Pair, open_pair

GRADES = ["full", "fenced"]
DONE, CORRUPT, FAILED = Status.DONE, Status.CORRUPT, Status.FAILED
NEW = make_keys(1, first=50)


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


async def replace(pair: Pair, key: BlockKey) -> None:
    """Evict a block of the holder, and store another one in its slot."""
    assert await pair.holder.delete([key]) == [True]
    await store_generated(pair.holder, NEW, pair.memory.describe(0, [12]))


@pytest.mark.parametrize("grade", GRADES)
async def test_a_block_that_was_replaced_after_its_lookup_is_not_loaded(grade: str) -> None:
    async with open_pair(integrity=grade) as pair:
        await pair.client.lookup(KEYS)
        await replace(pair, KEYS[1])
        seen, read = await load(pair, KEYS)
        assert seen == [DONE, FAILED, DONE, DONE]
        assert [read[i] for i in (0, 2, 3)] == [pair.payloads[i] for i in (0, 2, 3)]


@pytest.mark.parametrize("grade", GRADES)
async def test_a_block_that_is_replaced_while_it_is_read_is_not_loaded(grade: str) -> None:
    async with open_pair(integrity=grade) as pair:
        await pair.client.lookup(KEYS)
        pair.stalled.hold()
        loading = asyncio.create_task(load(pair, KEYS))
        await pair.stalled.until_held()
        await replace(pair, KEYS[2])
        pair.stalled.release()
        seen, read = await loading
        assert seen == [DONE, DONE, FAILED, DONE]
        assert [read[i] for i in (0, 1, 3)] == [pair.payloads[i] for i in (0, 1, 3)]


async def test_a_pinned_block_that_the_holder_overwrites_all_the_same_has_failed() -> None:
    async with open_pair(integrity="fenced") as pair:
        pair.stalled.hold()
        loading = asyncio.create_task(load(pair, KEYS[:2]))  # without places: pinned
        await pair.stalled.until_held()
        pool, slot = pair.host._pool, pair.host._index.slot_of(KEYS[0])
        pool.unseal([slot])
        pool.slots[slot][:] = 0
        pair.stalled.release()
        seen, read = await loading
        assert seen == [FAILED, DONE]
        assert read[1] == pair.payloads[1]


async def test_the_generation_is_read_after_the_bytes_and_not_beside_them() -> None:
    async with open_pair(integrity="fenced") as pair:
        await pair.client.lookup(KEYS[:1])
        pair.stalled.hold()
        loading = asyncio.create_task(load(pair, KEYS[:1]))
        await pair.stalled.until_held()
        assert pair.stalled.in_flight == 1
        pair.stalled.release()
        assert await loading == ([DONE], pair.payloads[:1])


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


@pytest.mark.parametrize("integrity", ["full", "fenced"])
async def test_a_store_that_is_cancelled_is_never_published(integrity: str) -> None:
    async with open_pair(integrity=integrity) as pair:
        agent = pair.holder_agents[-1]
        agent.hold()
        source = pair.memory.describe(0, [8])
        storing = asyncio.create_task(pair.client.store(NEW, source))
        await agent.until_held()
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        write_payloads(source, [b"\x01" * int(source.block_sizes[0])])  # it is the caller's again
        agent.release()
        await until_idle(pair)
        assert await pair.client.lookup(NEW) == [False]


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Event of a holder that has read a store, of which its peer does not get to know."""
    done = asyncio.Event()
    original = ClientSession._pull

    async def pull(self: ClientSession, request: Pull) -> Pulled:
        pulled = await original(self, request)
        if request.keys != NEW:
            return pulled
        done.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ClientSession, "_pull", pull)
    return done


@pytest.mark.parametrize("grade", GRADES)
async def test_a_store_whose_peer_is_gone_before_it_confirms_is_never_published(
    unanswered: asyncio.Event, grade: str
) -> None:
    async with open_pair() as pair, await open_other(pair, grade) as other:
        storing = asyncio.create_task(other.store(NEW, pair.memory.describe(0, [8])))
        await unanswered.wait()
        assert pair.holder.server is not None
        assert sum(each.num_pins for each in pair.holder.server.sessions) == 1
        for client in other._exchange.clients.values():
            client.disconnect()
        [outcome] = await storing
        assert outcome.status is FAILED
        await until_idle(pair)
        assert await pair.client.lookup(NEW) == [False]


@pytest.mark.parametrize("grade", GRADES)
async def test_a_store_that_the_peer_gives_up_before_it_confirms_is_forgotten(
    unanswered: asyncio.Event, grade: str
) -> None:
    async with open_pair() as pair, await open_other(pair, grade) as other:
        storing = asyncio.create_task(other.store(NEW, pair.memory.describe(0, [8])))
        await unanswered.wait()
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        await until_idle(pair)
        assert await pair.client.lookup(NEW) == [False]


@dataclass
class SlowPublishing:
    """Holder that publishes nothing, from the time on when it is `on`, before it may go on."""

    on: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowPublishing:
    slow = SlowPublishing()
    original = ClientSession._publish

    async def publish(self: ClientSession, request: Publish) -> Pulled:
        if slow.on:
            slow.asked.set()
            await slow.go_on.wait()
        return await original(self, request)

    monkeypatch.setattr(ClientSession, "_publish", publish)
    return slow


@pytest.mark.parametrize("grade", GRADES)
async def test_a_store_that_is_given_up_while_it_is_confirmed_is_forgotten(
    slow: SlowPublishing, grade: str
) -> None:
    async with open_pair() as pair, await open_other(pair, grade) as other:
        slow.on = True
        storing = asyncio.create_task(other.store(NEW, pair.memory.describe(0, [8])))
        await slow.asked.wait()
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        await until_idle(pair)
        assert await pair.client.lookup(NEW) == [False]


@pytest.mark.parametrize("grade", GRADES)
async def test_what_waits_to_be_published_is_found_by_nobody_before(
    slow: SlowPublishing, grade: str
) -> None:
    async with open_pair() as pair, await open_other(pair, grade) as other:
        slow.on = True
        size = pair.memory.chunk_size_bytes(0)
        source = pair.memory.describe(0, [8])
        write_payloads(source, [make_payload(NEW[0], size)])
        storing = asyncio.create_task(other.store(NEW, source))
        await slow.asked.wait()
        assert await pair.client.lookup(NEW) == [False]
        slow.go_on.set()
        assert statuses(await storing) == [DONE]
        assert await pair.client.lookup(NEW) == [True]
        assert await load(pair, NEW) == ([DONE], [make_payload(NEW[0], size)])


async def test_nothing_can_be_published_that_was_not_pulled() -> None:
    async with open_pair(integrity="fenced") as pair:
        [client] = pair.client._exchange.clients.values()
        connection = await client.open()
        with pytest.raises(TransferFailedError, match="pull is 99; expected one that waits"):
            await connection.request(partial(Publish, pull=99, checksums=[]), Pulled)


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


async def until_idle(pair: Pair) -> None:
    """Wait until the holder does nothing for its peers, and has pinned nothing for them."""
    assert pair.holder.server is not None
    async with asyncio.timeout(10):
        while not all(each.is_idle for each in pair.holder.server.sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


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
