"""Blocks at a peer: where they are read, how they are verified, and which answers are rejected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest
import torch

from kvxfer import BlockKey, Descriptors, Status, runtime
from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig, client, exchange, reads
from kvxfer.backends.nixl.connection import MAX_PLACES, Connection, Places
from kvxfer.backends.nixl.server import ClientSession
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import memory_regions
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.testing import BlockMemory, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, statuses, store_generated
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.agent_contract import words
from tests.backends.host_blocks import flip
from tests.backends.nixl_proven import endpoint_of, until_alone
from tests.backends.nixl_wire import extents

KEYS = make_keys(4)
MEMORY = [[4096, 512]]
GRADES = ["full", "fenced"]
DONE, CORRUPT, FAILED = Status.DONE, Status.CORRUPT, Status.FAILED
BLOCK_BYTES = sum(MEMORY[0])
GPU = torch.device("cuda", 0)


@dataclass
class Pair:
    host: HostBackend
    holder: NixlBackend
    client: NixlBackend
    holder_agent: FakeNixlAgent
    memory: BlockMemory
    payloads: list[bytes]
    open_client: Callable[..., NixlBackend]


@contextlib.asynccontextmanager
async def open_pair(*, attached: bool = True, **fields: Any) -> AsyncIterator[Pair]:
    memory, agent = BlockMemory(MEMORY, num_blocks=16), FakeNixlAgent()
    namespace = memory.namespace()
    listening = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20))
    async with NixlBackend(listening, namespace, make_agent=lambda: agent) as holder:
        await holder.start()
        assert holder.server is not None
        assert holder._own is not None
        address = str(holder.server.endpoint)

        def open_client(**changes: Any) -> NixlBackend:
            config = NixlConfig(address=address, **fields | changes)
            client = NixlBackend(config, namespace, make_agent=FakeNixlAgent)
            if attached:
                client.attach(memory_regions(memory.caches))
            return client

        async with open_client() as client:
            payloads = await store_generated(client, KEYS, memory.describe(0, range(4)))
            yield Pair(holder._own, holder, client, agent, memory, payloads, open_client)


async def load(
    pair: Pair, keys: Sequence[BlockKey], backend: NixlBackend | None = None
) -> tuple[list[Status], list[bytes]]:
    target = pair.memory.describe(0, range(8, 8 + len(keys)))
    write_payloads(target, [b"\x5a" * BLOCK_BYTES] * len(keys))
    outcomes = await (backend or pair.client).load(list(keys), target)
    return statuses(outcomes), read_payloads(target)


@pytest.mark.parametrize("grade", GRADES)
async def test_a_block_whose_place_was_taken_is_not_called_missing_as_its_memory_was_written(
    grade: str,
) -> None:
    async with open_pair(integrity=grade) as pair:
        await pair.client.lookup(KEYS)
        await pair.holder.delete([KEYS[2]])
        await store_generated(pair.client, make_keys(1, first=50), pair.memory.describe(0, [12]))
        seen, read = await load(pair, KEYS)
        assert seen == [DONE, DONE, FAILED, DONE]
        assert [read[index] for index in (0, 1, 3)] == [pair.payloads[i] for i in (0, 1, 3)]
        untouched = b"\x5a" * BLOCK_BYTES
        assert await load(pair, KEYS[2:3]) == ([Status.MISSING], [untouched])  # and not looked up


async def test_memory_that_is_attached_after_the_first_call_is_refused_by_name() -> None:
    async with open_pair() as pair:
        with pytest.raises(
            InvalidArgumentError, match=r"^memory is 'attached late'; expected any .*calls$"
        ):
            pair.client.attach(memory_regions(pair.memory.caches))
        assert (await load(pair, KEYS))[0] == [DONE] * 4


def agent_of(pair: Pair) -> FakeNixlAgent:
    agent = pair.client._exchange._node.agent
    assert isinstance(agent, FakeNixlAgent)
    return agent


async def test_a_block_whose_pin_ended_during_the_read_is_neither_corrupt_nor_deleted() -> None:
    async with open_pair() as pair, pair.open_client() as other, asyncio.timeout(10):
        agent_of(pair).hold()
        loading = asyncio.create_task(load(pair, KEYS))
        await agent_of(pair).until_held()
        assert pair.holder.server is not None
        await pair.holder.server.disconnect()
        await until_alone(pair.holder._exchange)
        await pair.host.delete(KEYS[:1])  # as an eviction would, and stored anew elsewhere
        keys = [*make_keys(1, first=50), KEYS[0]]
        await store_generated(other, keys, pair.memory.describe(0, [12, 13]))
        agent_of(pair).release()
        assert (await loading)[0] == [FAILED, DONE, DONE, DONE], "what is proven has arrived"
        assert await other.lookup(KEYS[:1]) == [True]


async def test_a_pin_that_arrives_as_its_caller_is_cancelled_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cancelling(asyncio.Future[Any]):
        def set_result(self, result: Any) -> None:
            super().set_result(result)
            loading.cancel()

    def send_and_cancel(self: Connection, make: Any) -> tuple[int, asyncio.Future[Any]]:
        number, _ = send(self, make)
        answer = self._waiting[number] = Cancelling()
        return number, answer

    send = Connection._send
    async with open_pair() as pair:
        assert pair.holder.server is not None
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "_send", send_and_cancel)
            loading = asyncio.create_task(load(pair, KEYS))
            await asyncio.wait([loading])
        assert loading.cancelled()
        await pair.client.lookup(KEYS)  # this request lets the pin go
        assert [session.num_pins for session in pair.holder.server.sessions] == [0]


async def test_reads_that_never_end_do_not_keep_all_memory_for_generations_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "NUM_GENERATION_BUFFERS", 2)
    monkeypatch.setattr(reads, "GRACE_S", 0.0)
    async with open_pair(integrity="fenced", timeout_s=0.5) as pair:
        agent_of(pair).hold()
        for _ in range(2):
            await pair.client.load(KEYS, pair.memory.describe(0, range(8, 12)))
        assert (await load(pair, KEYS))[0] == [DONE] * 4


async def test_a_load_leaves_out_a_peer_that_does_not_answer_lookups() -> None:
    async with open_pair() as pair, open_pair() as other:
        keys = make_keys(8, first=20)
        address = ",".join(str(endpoint_of(each.holder)) for each in (pair, other))
        config = NixlConfig(address=address, replicas=2, timeout_s=60.0)
        client = NixlBackend(config, pair.memory.namespace(), make_agent=FakeNixlAgent)
        async with client, asyncio.timeout(10):
            await store_generated(client, keys, pair.memory.describe(0, range(8)))
            silent, _ = client._exchange.clients.values()
            silent.load = AsyncMock(side_effect=asyncio.Event().wait)  # type: ignore[method-assign]
            silent.suspension.note_late(runtime.monotonic(), "a lookup", 1.0)
            assert all(await client.lookup(keys))
            assert (await load(pair, keys, client))[0] == [DONE] * 8
            assert not silent.load.called


async def test_a_drain_ends_reads_that_never_end_by_themselves() -> None:
    async with open_pair(timeout_s=1.0) as pair, asyncio.timeout(10):
        agent_of(pair).hold()
        await pair.client.load(KEYS, pair.memory.describe(0, range(8, 12)))
        await pair.client.drain()
        assert (await load(pair, KEYS))[0] == [DONE] * 4


async def test_a_drain_waits_for_an_agent_that_takes_longer_to_end_than_callers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "RESTART_S", 0.05)
    async with open_pair(timeout_s=0.5) as pair, asyncio.timeout(10):
        may_end, aclose = asyncio.Event(), FakeNixlAgent.aclose

        async def end_late(agent: FakeNixlAgent) -> None:
            await may_end.wait()
            await aclose(agent)

        monkeypatch.setattr(FakeNixlAgent, "aclose", end_late)
        target = pair.memory.describe(0, range(8, 12))
        agent_of(pair).hold()
        await pair.client.load(KEYS, target)
        asyncio.get_running_loop().call_later(1.5, may_end.set)
        await pair.client.drain()
        assert pair.client._exchange.is_quiet(target)


async def test_a_store_that_is_cancelled_ends_when_nobody_hashes_its_memory_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def hash_late(hasher: reads.BlockHasher, blocks: Descriptors) -> list[int]:
        began.set()
        await may_end.wait()
        return hasher.checksums_here(blocks)

    async with open_pair(integrity="full") as pair, asyncio.timeout(10):
        monkeypatch.setattr(reads.BlockHasher, "checksums", hash_late)
        source = pair.memory.describe(0, [8])
        storing = asyncio.ensure_future(pair.client.store(make_keys(1, first=50), source))
        await began.wait()
        storing.cancel()
        asyncio.get_running_loop().call_later(0.5, may_end.set)
        await asyncio.wait([storing])
        assert may_end.is_set()


async def test_an_agent_whose_end_hangs_keeps_no_later_one_from_being_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "RESTART_S", 0.1)
    async with open_pair(timeout_s=1.0) as pair:
        first, may_end, aclose = agent_of(pair), asyncio.Event(), FakeNixlAgent.aclose

        async def end(agent: FakeNixlAgent) -> None:
            if agent is first:
                await may_end.wait()
            await aclose(agent)

        monkeypatch.setattr(FakeNixlAgent, "aclose", end)
        are_quiet = []
        for blocks in (range(8, 12), range(12, 16)):
            await pair.client.lookup(KEYS)
            target = pair.memory.describe(0, blocks)
            agent_of(pair).hold()
            await pair.client.load(KEYS, target)
            await pair.client._exchange.settle()
            are_quiet.append(pair.client._exchange.is_quiet(target))
        may_end.set()
        assert are_quiet == [False, True]


async def test_a_connection_that_opens_while_nixl_is_started_anew_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_peer = FakeNixlAgent.add_peer
    async with open_pair() as pair, asyncio.timeout(10):

        async def add_and_restart(agent: FakeNixlAgent, metadata: bytes) -> str:
            name = await add_peer(agent, metadata)
            if agent is not pair.holder_agent:
                monkeypatch.undo()
                await pair.client._exchange._restart()
            return name

        monkeypatch.setattr(FakeNixlAgent, "add_peer", add_and_restart)
        next(iter(pair.client._exchange.clients.values())).disconnect()
        while (await load(pair, KEYS))[0] != [DONE] * 4:
            pass


async def test_a_holder_that_has_lost_the_memory_of_a_peer_links_it_anew() -> None:
    async with open_pair() as pair, asyncio.timeout(10):
        pair.holder_agent._peers.clear()
        keys, source = make_keys(1, first=50), pair.memory.describe(0, [8])
        assert statuses(await pair.client.store(keys, source)) == [FAILED]
        while statuses(await pair.client.store(keys, source)) != [DONE]:
            pass


@pytest.mark.parametrize(("grade", "found"), [("full", CORRUPT), ("fenced", DONE)])
async def test_only_a_checksum_catches_a_bit_that_flipped(
    grade: str, found: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "HASH_RUN_BYTES", BLOCK_BYTES)
    async with open_pair(integrity=grade) as pair:
        flip(pair.host, KEYS[0])
        seen, _ = await load(pair, KEYS)
        assert seen == [found, DONE, DONE, DONE]


class Walked(dict[BlockKey, Any]):
    num_walks = 0

    def __iter__(self) -> Iterator[BlockKey]:
        self.num_walks += 1
        return super().__iter__()


def test_the_oldest_places_are_forgotten_in_one_walk_over_all() -> None:
    places, keys = Places(REGIONS), make_keys(MAX_PLACES + 3000)
    places._rows = rows = Walked()
    for start in range(0, len(keys), 1000):
        some = keys[start : start + 1000]
        places.note(some, found(*[0] * len(some)))
    num_walks, num_left = rows.num_walks, len(rows)
    assert num_walks <= len(keys) // 1000
    assert MAX_PLACES // 2 < num_left <= MAX_PLACES
    assert list(rows) == keys[-num_left:]


@pytest.mark.parametrize("reader", GRADES)
@pytest.mark.parametrize("writer", GRADES)
async def test_peers_of_either_grade_load_what_those_of_the_other_one_stored(
    writer: str, reader: str
) -> None:
    async with open_pair(integrity=writer) as pair, pair.open_client(integrity=reader) as other:
        for looks_up in (False, True, True):
            if looks_up:
                assert await other.lookup(KEYS) == [True] * 4
            assert await load(pair, KEYS, other) == ([DONE] * 4, pair.payloads)
        if (writer, reader) == ("fenced", "full"):  # hashed for the first reader who verifies
            flip(pair.host, KEYS[0])
            assert (await load(pair, KEYS[:2], other))[0] == [CORRUPT, DONE]
            assert await other.lookup(KEYS) == [False, True, True, True]


async def test_bytes_that_change_while_they_are_stored_are_not_stored() -> None:
    async with open_pair() as pair:
        agent = pair.holder_agent
        agent.hold()
        source = pair.memory.describe(0, [8, 9])
        keys = make_keys(2, first=50)
        payloads = [make_payload(key, BLOCK_BYTES) for key in keys]
        write_payloads(source, payloads)
        storing = asyncio.create_task(pair.client.store(keys, source))
        await agent.until_held()  # hashed meanwhile
        write_payloads(source.select(0, 1), [payloads[1]])
        agent.release()
        assert statuses(await storing) == [FAILED, DONE]
        assert await pair.client.lookup(keys) == [False, True]


@pytest.mark.parametrize("grade", GRADES)
async def test_a_store_is_read_once_a_device_has_computed_its_blocks(grade: str) -> None:
    async with open_pair(integrity=grade) as pair:
        source, (key,) = pair.memory.describe(0, [8]), make_keys(1, first=50)

        class Computing:
            event = 0

            def has_passed(self) -> bool:
                write_payloads(source, [make_payload(key, BLOCK_BYTES)])
                return True

        (outcome,) = await pair.client.store([key], replace(source, after=Computing()))
        assert outcome.done
        assert await load(pair, [key]) == ([DONE], [make_payload(key, BLOCK_BYTES)])


async def test_a_batch_of_several_pieces_is_moved_whole_and_a_piece_that_fails_costs_its_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "PIECE_BYTES", BLOCK_BYTES)
    read = client.Client._load_direct

    async def fail_once(self: client.Client, *args: Any) -> Any:
        if args[1] == KEYS[:1]:
            raise MemoryError
        return await read(self, *args)

    async with open_pair() as pair:
        assert await load(pair, KEYS) == ([DONE] * 4, pair.payloads)
        monkeypatch.setattr(client.Client, "_load_direct", fail_once)
        seen, payloads = await load(pair, KEYS)
        assert (seen, payloads[1:]) == ([FAILED, DONE, DONE, DONE], pair.payloads[1:])
    assert "MemoryError" in caplog.text


def alter(monkeypatch: pytest.MonkeyPatch, method: str, **changes: Any) -> None:
    """Change the requests that are passed to a method of a holder's sessions."""
    original = getattr(ClientSession, method)

    async def altered(self: ClientSession, request: wire.Message) -> Any:
        return await original(self, msgspec.structs.replace(request, **changes))

    monkeypatch.setattr(ClientSession, method, altered)


async def test_a_store_is_published_with_a_checksum_for_each_block_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair() as pair:
        alter(monkeypatch, "_publish", checksums=[7])
        keys = make_keys(2, first=50)
        outcomes = await pair.client.store(keys, pair.memory.describe(0, [8, 9]))
        assert statuses(outcomes) == [FAILED] * 2
        assert "checksums is 1; expected 2" in outcomes[0].reason
        assert await pair.client.lookup(keys) == [False] * 2


async def test_a_holder_that_answers_with_generations_unasked_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair() as pair:
        alter(monkeypatch, "_lookup", fenced=True)
        assert await pair.client.lookup(KEYS) == [True] * 4
        assert (await load(pair, KEYS))[0] == [FAILED] * 4


SIZE = 8
REGIONS = Regions([(1 << 20, 64)])


def found(*offsets: int | None, **fields: Any) -> wire.Found:
    """Make the answer to a lookup: the offset of each block, or None for a missing block."""
    present = [offset for offset in offsets if offset is not None]
    answer = wire.Found(
        request_id=1,
        there=[offset is not None for offset in offsets],
        starts=[0] * len(present),
        checksums=list(range(len(present))),
        extents=extents(*present, length=SIZE),
    )
    return msgspec.structs.replace(answer, **fields)


def fencing(*offsets: int, length: int = SIZE, num_bytes: int) -> wire.Fencing:
    return wire.Fencing(extents=extents(*offsets, length=length), generations=bytes(num_bytes))


@pytest.mark.parametrize(("size", "start"), [(SIZE - 1, 0), (SIZE - 1, 1), (SIZE, 1)])
def test_a_part_of_what_was_stored_has_no_checksum_and_so_no_place(size: int, start: int) -> None:
    places = Places(REGIONS)
    places.note(KEYS[:1], found(0))
    blocks = Descriptors.of_pieces(words(1 << 20), [size])
    part = replace(blocks, payload_starts=np.array([start]))
    assert places.take(KEYS[:1], part) is None


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (found(8 * SIZE), "region"),
        (found(0, starts=[]), r"\(1, 0\)"),
        (found(0, checksums=[1, 2]), "checksums is 2"),
        (found(0, there=[False]), "0 blocks"),
        (found(*[0] * (wire.MAX_FRAGMENTS + 1)), "fragments is 65537"),
        (found(0, fences=fencing(8, num_bytes=16)), "bytes of generations is 16"),
        (found(0, fences=fencing(8, num_bytes=7)), "bytes of generations is 7"),
        (found(0, fences=fencing(8, 16, num_bytes=8)), "extents of generations"),
        (found(0, fences=fencing(8, length=16, num_bytes=8)), "extents of generations"),
        (found(0, fences=fencing(64, num_bytes=8)), "region"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_changes_nothing(
    answer: wire.Found, shown: str
) -> None:
    places = Places(REGIONS)
    with pytest.raises(InvalidArgumentError, match=shown):
        places.note(KEYS[:1], answer)
    assert KEYS[0] not in places


def gpu_region() -> MemoryRegion:
    """Label some host memory as a GPU's."""
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    return MemoryRegion(memory.ctypes.data, memory.nbytes, memory, GPU)


@pytest.mark.parametrize("transport", ["auto", "socket"])
async def test_memory_of_a_gpu_needs_nixl_for_every_peer_and_that_of_the_host_goes_on(
    transport: str,
) -> None:
    async with open_pair(attached=False, transport=transport) as pair:
        other = pair.open_client()
        regions = memory_regions(pair.memory.caches)
        with pytest.raises(InvalidArgumentError, match=f"cuda:0.*={transport}.*transport=nixl"):
            other.attach([*regions, gpu_region()])
        other.attach(regions)
        assert await load(pair, KEYS[:2], other) == ([DONE] * 2, pair.payloads[:2])
        await other.aclose()


async def test_blocks_of_a_gpu_are_refused_by_name_unless_the_backend_reaches_it() -> None:
    blocks = Descriptors.of_pieces(words(gpu_region().address), [BLOCK_BYTES], device=GPU)
    async with open_pair() as pair:
        for kinds, refused in (
            ({"cpu"}, "device of blocks is 'cuda:0'"),
            ({"cpu", "cuda"}, "memory of cuda:0 that was attached"),
        ):
            pair.client._exchange.memory_kinds = frozenset(kinds)
            for move in (pair.client.load, pair.client.store):
                with pytest.raises(InvalidArgumentError, match=refused):
                    await move(KEYS[:1], blocks)


def test_extents_are_those_of_one_device_and_their_sum_does_not_wrap() -> None:
    starts, devices = [300, 100, 500], [torch.device("cuda", 1), HOST, GPU]
    pairs = zip(starts, devices, strict=True)
    regions = Regions().extend(MemoryRegion(start, 100, None, device) for start, device in pairs)
    for index in range(3):
        told = extents(7, 7, length=SIZE, regions=index)
        blocks = regions.resolve(told)
        assert blocks.device == devices[index]
        assert blocks.addresses.tolist() == [starts[index] + 7] * 2
        assert regions.contains(blocks)
        assert regions.locate(blocks) == told
    with pytest.raises(InvalidArgumentError, match="'cuda:1, cuda:0'; expected one"):
        regions.resolve(extents(7, 7, length=SIZE, regions=(2, 0)))
    half = 1 << 62
    wrapping = extents(0, 0, 0, 0, length=[half, half, half, half + 4096], ends=(0, 4))
    with pytest.raises(InvalidArgumentError, match="fewer bytes in all"):
        Regions([(100, (1 << 63) - 100)]).resolve(wrapping)
    sent = msgspec.msgpack.encode(wire.Reach(regions=list(regions)))
    assert Regions(msgspec.msgpack.decode(sent, type=wire.Reach).regions).devices == regions.devices


@pytest.mark.parametrize("device", ["cuda", "cuda:-1", "cuda:01", "cuda:128", "meta", "", "CPU"])
def test_a_device_that_is_neither_the_host_nor_a_gpu_is_refused_by_name(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match="device of a region") as caught:
        Regions([wire.Region(100, 100), wire.Region(300, 100, device)])
    assert caught.value.value == device


async def test_a_block_is_asked_of_a_suspended_peer_that_alone_may_have_it() -> None:
    async with open_pair() as pair:
        keys = make_keys(4, first=20)
        blocks = pair.memory.describe(0, range(4))
        await store_generated(pair.client, keys, blocks)
        for peer in pair.client._exchange.clients.values():
            peer.suspension.note_late(runtime.monotonic(), "another lookup", 1.0)
        assert all(each.done for each in await pair.client.load(keys, blocks))
