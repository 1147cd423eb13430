"""Faults planted between a peer and its holder, for each grade of integrity."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.session import ClientSession
from kvxfer.backends.nixl.wire.messages import Found, Lookup, Message, Pinned, Publish, Pulled
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts, LentBlocks
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
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


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[list[BlockKey]]:
    """Keys of everything that holders lent."""
    asked: list[list[BlockKey]] = []
    original = HostBackend.lend

    def lend(
        self: HostBackend, wanted: BlockParts, *, fenced: bool = False
    ) -> AbstractAsyncContextManager[LentBlocks]:
        asked.append(list(wanted.keys))
        return original(self, wanted, fenced=fenced)

    monkeypatch.setattr(HostBackend, "lend", lend)
    return asked


async def load_found(pair: Pair, keys: Sequence[BlockKey]) -> tuple[list[Status], list[bytes]]:
    target = pair.memory.describe(0, range(8, 8 + len(keys)))
    canaries = [b"\x5a" * int(size) for size in target.block_sizes]
    write_payloads(target, canaries)
    return statuses(await pair.client.load(list(keys), target)), read_payloads(target)


async def test_what_a_lookup_found_is_read_without_asking_again(pins: list[list[BlockKey]]) -> None:
    async with open_pair() as pair:
        absent = make_keys(1, first=90)
        assert await pair.client.lookup([*KEYS, *absent]) == [True] * 4 + [False]
        assert await load_found(pair, KEYS) == ([Status.DONE] * 4, pair.payloads)
        assert not pins


async def test_a_block_that_was_deleted_is_missing_although_its_bytes_are_still_there(
    pins: list[list[BlockKey]],
) -> None:
    async with open_pair() as pair:
        await pair.client.lookup(KEYS)
        assert await pair.client.delete(KEYS[:1]) == [True]
        seen, [read] = await load_found(pair, KEYS[:1])
        assert seen == [Status.MISSING]
        assert read == b"\x5a" * len(read), "a missing block was written"
        assert pins == [KEYS[:1]]


async def test_a_block_that_was_looked_up_is_evicted_after_others() -> None:
    async with open_pair() as pair:
        slots = pair.host.num_slots
        await pair.client.lookup(KEYS[3:])  # of a batch the last goes first
        target = pair.memory.describe(0, [12])
        for first in range(100, 100 + slots - len(KEYS) + 1):
            await store_generated(pair.client, make_keys(1, first=first), target)
        assert await pair.client.lookup(KEYS) == [True, True, False, True]


async def test_an_answer_too_large_for_a_message_is_a_failure_and_pins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair() as pair:
        assert pair.holder.server is not None
        [peer] = pair.holder.server.sessions
        honest = peer._channel.send

        async def send(message: Message) -> None:
            if isinstance(message, Pinned):
                raise InvalidArgumentError("size of a message", 17 << 20, "at most 16 MiB")
            await honest(message)

        monkeypatch.setattr(peer._channel, "send", send)
        [outcome] = await pair.client.load(KEYS[:1], pair.memory.describe(0, [8]))
        assert outcome.status is Status.FAILED
        assert "size of a message" in outcome.reason
        assert peer.num_pins == 0


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
