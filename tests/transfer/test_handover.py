"""Handover: prompts go from the blocks of one engine to those of another, of any shape."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kvxfer.backends.nixl import Client, Endpoint, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import (
    BlockIdError,
    CacheMismatchError,
    DuplicateError,
    KVXferError,
    NamespaceMismatchError,
    PeerError,
    PeerTimeoutError,
)
from kvxfer.kvcache import (
    Descriptors,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    WorkerShard,
    canonicalize,
)
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, describe_caches
from kvxfer.lending import reader
from kvxfer.lending.handover import Handover
from kvxfer.storage import BlockKey, Namespace, PromptKeys
from kvxfer.storage.leases.book import LeaseBook
from kvxfer.testing import FakeNixlAgent
from tests.clock import until
from tests.transfer import handover_engines
from tests.transfer.handover_engines import (
    HND,
    LIMIT_S,
    Engine,
    EngineProcess,
    get,
    look_for_two,
    prompt,
)
from tests.transfer.test_engine import check_that_it_is_closed_at_the_end

TICKET = "0123456789abcdef"
TOKENS = prompt(22)
OURS, THEIRS = [3, 9, 4, 12, 7, 1], [11, 2, 8, 5, 6, 10]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_engine(stack: ExitStack, *args: Any, **options: Any) -> Engine:
    engine = Engine(*args, **options)
    stack.callback(engine.close)
    return engine


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


def start(stack: ExitStack, tokens_per_block: int = 4, **options: object) -> EngineProcess:
    process = EngineProcess(tokens_per_block, **options)
    stack.callback(process.end)
    return process


def ids(engine: Engine, blocks: list[int]) -> list[list[int]]:
    """Blocks of an engine for `TOKENS`, the same ones for each group."""
    count = -(-len(TOKENS) // engine.tokens_per_block)
    return [blocks[:count]] * len(engine.windows)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal": ({}, {}),
    "smaller blocks": ({}, {"tokens_per_block": 8}),
    "blocks that share no edge": ({"tokens_per_block": 6}, {}),
    "TP 4 to 2, larger blocks": ({"tp_size": 4, "tokens_per_block": 8}, {"tp_size": 2}),
    "NHD to HND, TP 2 to 1": ({"tp_size": 2}, {"layout": HND}),
    "two groups": ({"windows": (None, None)}, {"windows": (None, None)}),
}


@pytest.fixture(params=[1, 1 << 40], ids=["in place", "staged"])
def in_place_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read blocks of other shapes directly into place, or through staging memory."""
    monkeypatch.setattr(reader, "IN_PLACE_BYTES", request.param)


@pytest.mark.usefixtures("in_place_bytes")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_goes_to_an_engine_of_another_shape(shape: str, stack: ExitStack) -> None:
    theirs, ours = (open_engine(stack, **each) for each in SHAPES[shape])
    blocks = ids(theirs, THEIRS)
    for view in chain.from_iterable(chain.from_iterable(theirs.views)):
        view[blocks[0][-1]] = 0  # the rest of their last block, behind the prompt
    theirs.lend(TICKET, TOKENS, blocks)
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    assert (found.num_tokens, found.is_complete) == (len(TOKENS), True)
    wanted = ids(ours, OURS)
    for fetched in ours.fetch(theirs.endpoint, TICKET, TOKENS, wanted):
        assert not any(fetched.bad_blocks)
        assert fetched.num_verified > 0
        assert fetched.num_bytes > 0
        assert not fetched.missing
    assert ours.all_good(TOKENS, wanted)
    assert ours.is_untouched(wanted)
    num_left = -len(TOKENS) % ours.tokens_per_block
    for view in chain.from_iterable(chain.from_iterable(ours.views)):
        left = view[wanted[0][-1], :, ours.tokens_per_block - num_left :]
        assert not left.any(), "what is behind the prompt in our last block is theirs or zero"
    ours.release(theirs.endpoint, TICKET)
    wait_until_ended(theirs, TICKET)


def wait_until_ended(engine: Engine, ticket: str) -> None:
    """Wait until every worker has returned a ticket, and only once."""
    ended: list[list[str]] = [[] for _ in engine.workers]
    stop = time.monotonic() + 10
    while not all(ended):
        assert time.monotonic() < stop, "the ticket has not ended"
        for rank, each in enumerate(engine.take_ended()):
            ended[rank].extend(each)
    assert ended == [[ticket]] * len(ended)
    assert not any(engine.take_ended())


def test_a_last_block_that_begins_before_what_is_wanted_is_not_cleared(stack: ExitStack) -> None:
    theirs, ours = open_engine(stack), open_engine(stack, tokens_per_block=8)
    theirs.lend(TICKET, TOKENS, ids(theirs, THEIRS))
    wanted = ids(ours, OURS)
    ours.compute(TOKENS, wanted)
    ours.fetch(theirs.endpoint, TICKET, TOKENS, wanted, first_token=20)
    assert ours.all_good(TOKENS, wanted)


@pytest.mark.usefixtures("in_place_bytes")
@pytest.mark.parametrize(("their_size", "bad"), [(4, [14]), (8, [15, 16])])
def test_a_page_that_was_altered_after_its_offer_is_bad(
    their_size: int, bad: list[int], stack: ExitStack
) -> None:
    theirs, ours = open_engine(stack, their_size), open_engine(stack)
    theirs.lend(TICKET, TOKENS, ids(theirs, THEIRS))
    ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])  # now its checksums are known
    theirs.alter(THEIRS[1])
    targets = [13, 14, 15, 16, 17, 18]
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [targets])
    assert fetched.bad_blocks == [bad]
    assert fetched.missing == {"corrupt": 1}
    assert "other bytes" in fetched.reason
    good = ours.good(TOKENS, [targets])[0][0]
    wrong = {block for block, is_good in zip(targets, good, strict=True) if not is_good}
    assert wrong
    assert wrong <= set(bad)


@pytest.mark.parametrize(
    "offer",
    [
        pytest.param(lambda e: e.offer(TICKET, TOKENS, [[99] * 6]), id="no such block"),
        pytest.param(lambda e: e.offer(TICKET, TOKENS, [[3] * 6]), id="a block twice"),
    ],
)
def test_an_offer_that_fails_ends_its_ticket(offer: Any, stack: ExitStack) -> None:
    theirs, ours = open_engine(stack), open_engine(stack)
    offer(theirs)
    theirs.settle()
    assert theirs.take_ended() == [[TICKET]]
    assert not any(theirs.take_ended())
    assert ours.ask(theirs.endpoint, TICKET, TOKENS).num_tokens == 0


def test_a_ticket_that_was_lent_in_part_ends_once_it_is_withdrawn(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = open_engine(stack)
    [worker] = theirs.workers
    monkeypatch.setattr(worker._lender, "_begin_hashing", Mock(side_effect=MemoryError))
    keys = PromptKeys(TOKENS).block_keys(0, theirs.tokens_per_block, len(TOKENS))

    async def lend() -> None:
        worker.lend(TICKET, keys, THEIRS, is_complete=True)

    with pytest.raises(MemoryError):
        get(worker.submit(lend()))
    theirs.revoke(TICKET)
    wait_until_ended(theirs, TICKET)


def test_a_look_for_ended_tickets_that_fails_is_followed_by_others(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, failures = open_engine(stack), iter([MemoryError(), MemoryError()])
    count = LeaseBook.num_tickets.fget  # type: ignore[attr-defined]

    def num_tickets(book: LeaseBook) -> int:
        for failure in failures:
            raise failure
        return int(count(book))

    monkeypatch.setattr(LeaseBook, "num_tickets", property(num_tickets))
    theirs.lend(TICKET, TOKENS, [THEIRS])
    theirs.revoke(TICKET)
    wait_until_ended(theirs, TICKET)
    assert caplog.text.count("cannot look for tickets") == 1


def test_without_listen_a_ticket_ends_at_once(stack: ExitStack) -> None:
    ours = open_engine(stack, lends=False)
    assert ours.workers[0].port == 0
    ours.offer(TICKET, TOKENS, [OURS])
    ours.settle()
    assert ours.take_ended() == [[TICKET]]


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ({"model": "theirs"}, (NamespaceMismatchError, PeerError), "model.*theirs"),
        ({"windows": (None, None)}, CacheMismatchError, "groups: ours is 1, theirs is 2"),
    ],
)
def test_an_engine_that_differs_is_refused_by_field_and_both_values(
    other: dict[str, Any], error: Any, words: str, stack: ExitStack
) -> None:
    theirs, ours = open_engine(stack, **other), open_engine(stack)
    with pytest.raises(error, match=words):
        ours.ask(theirs.endpoint, TICKET, TOKENS)


def test_a_port_of_another_worker_gives_no_pages(stack: ExitStack) -> None:
    """Worker 1 has other heads of the same prompt."""
    theirs, ours = open_engine(stack, tp_size=2), open_engine(stack, tp_size=2)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    forged = Endpoint(theirs.endpoint.host, theirs.endpoint.port + 1)
    with pytest.raises(CacheMismatchError, match=r"rank of the first worker: ours is 0, theirs"):
        ours.ask(forged, TICKET, TOKENS)
    for loading in ours.begin_fetch(forged, found, TOKENS, [OURS]):
        with pytest.raises(CacheMismatchError, match="rank"):
            get(loading)
    assert ours.is_untouched([[]])


def test_a_fetch_says_which_deadline_an_engine_missed_that_says_nothing(stack: ExitStack) -> None:
    theirs = open_engine(stack)
    ours = open_engine(stack, lends=False, handshake_timeout_s=0.2, timeout_s=2.0)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    (fetch,) = ours.begin_fetch(
        Endpoint("127.0.0.1", silent.getsockname()[1]), found, TOKENS, [OURS]
    )
    with pytest.raises(PeerTimeoutError, match=r"the handshake took longer than 0\.2 s"):
        get(fetch)


def test_what_arrived_counts_where_a_fetch_that_waits_for_a_gpu_first_is_out_of_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = open_engine(stack), open_engine(stack, lends=False, timeout_s=1.0)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    block_bytes, load = ours.workers[0]._description.groups[0].payload_size_bytes, Client.load
    asked: list[BlockKey] = []

    async def load_late(client: Client, keys: list[BlockKey], blocks: Descriptors) -> Any:
        asked.extend(keys)
        await asyncio.sleep(LIMIT_S * (len(asked) == len(OURS)))  # with the last block
        return await load(client, keys, blocks)

    monkeypatch.setattr(reader, "RUN_BYTES", 2 * block_bytes)
    monkeypatch.setattr(Client, "load", load_late)
    found, began = ours.ask(theirs.endpoint, TICKET, TOKENS), time.monotonic()
    mark = SimpleNamespace(has_passed=lambda: time.monotonic() > began + 0.6)
    monkeypatch.setattr(ours.workers[0].reader._memory, "mark", lambda _: mark)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
    fetched = get(loading)
    assert (fetched.num_verified, fetched.bad_blocks) == (4, [OURS[4:]])
    assert time.monotonic() < began + 1.5


@pytest.mark.parametrize("first", [0, 1])
def test_a_fetch_waits_for_the_worker_that_completes_a_ticket_last(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    theirs, ours = open_engine(stack, tp_size=2), open_engine(stack, lends=False)
    hold, told = Client.hold, list[bool]()

    async def watched_hold(client: Client, ticket: str, keys: Any) -> Any:
        held = await hold(client, ticket, keys)
        told.append(held.is_complete)
        return held

    theirs.lend(TICKET, TOKENS, [THEIRS], num_tokens=8, is_complete=False)
    found, workers = ours.ask(theirs.endpoint, TICKET, TOKENS), theirs.workers
    monkeypatch.setattr(Client, "hold", watched_hold)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS], waits_for=TICKET)
    theirs.workers = [workers[first]]
    theirs.offer(TICKET, TOKENS, [THEIRS])
    until(lambda: loading.done() or (True in told and told[told.index(True) :].count(False) > 1))
    theirs.workers = [workers[1 - first]]
    theirs.offer(TICKET, TOKENS, [THEIRS])
    assert get(loading).bad_blocks == [[]]
    assert ours.all_good(TOKENS, [OURS])


def test_an_engine_that_waits_for_a_ticket_asks_for_few_pages(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = open_engine(stack), open_engine(stack, lends=False)
    asked = look_for_two(monkeypatch)
    worker, made = ours.workers[0], PromptKeys(TOKENS)
    asking = worker.submit(worker.reader.ask(theirs.endpoint, TICKET, made, waits=True))
    until(lambda: len(asked) > 2)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    assert get(asking).num_tokens == len(TOKENS)
    assert asked == [len(THEIRS), *[2] * (len(asked) - 2), len(THEIRS)]


def test_blocks_that_we_do_not_have_are_refused_before_anything_is_read(stack: ExitStack) -> None:
    theirs, ours = open_engine(stack), open_engine(stack)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    with pytest.raises(BlockIdError, match=r"block_ids\[0\] is 99"):
        ours.fetch(theirs.endpoint, TICKET, TOKENS, [[*OURS[:5], 99]])
    with pytest.raises(DuplicateError, match=r"block_ids\[0\] is 3"):
        ours.fetch(theirs.endpoint, TICKET, TOKENS, [[*OURS[:5], 3]])
    assert ours.is_untouched([[]])


def test_an_engine_that_was_started_anew_with_other_blocks_is_refused(stack: ExitStack) -> None:
    theirs, ours = open_engine(stack), open_engine(stack)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    theirs.close()
    again = open_engine(stack, 8, port=theirs.endpoint.port)
    again.lend(TICKET, TOKENS, ids(again, THEIRS))
    stop = time.monotonic() + 20
    while True:
        [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
        error = loading.exception(LIMIT_S)
        if isinstance(error, CacheMismatchError):
            break
        assert isinstance(error, KVXferError)  # not connected again yet
        assert time.monotonic() < stop
    assert (error.field, error.ours, error.theirs) == ("tokens_per_block", (4,), (8,))
    assert ours.is_untouched([[]])


def test_a_copy_that_hangs_keeps_the_copy_engine_open(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.runtime.threads.CLOSE_TIMEOUT_S", 0.01)
    engine, ends = open_engine(stack), threading.Event()
    [worker] = engine.workers
    monkeypatch.setattr(worker._copy_engine, "close", closed := Mock())
    worker._threads.start(ends.wait)
    engine.close()
    ends.set()
    assert not closed.called


def test_a_call_that_does_not_end_keeps_no_port_and_is_counted_and_has_what_it_uses(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvxfer.lending.handover.CLOSE_S", 1.0)
    engine = open_engine(stack)
    [worker] = engine.workers
    monkeypatch.setattr(worker._copy_engine, "close", closed := Mock())
    monkeypatch.setattr(worker.reader, "close", closed)
    port, stop = worker.port, time.monotonic() + 1.3

    async def hang() -> None:
        while time.monotonic() < stop:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    worker.submit(hang())
    engine.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert "hand-over: 1 calls still run after 0.5 s and are abandoned" in caplog.text
    assert not closed.called


def test_workers_that_stall_together_leave_staging_memory_to_other_engines(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "IN_PLACE_BYTES", 1 << 40)
    theirs, others = open_engine(stack, 8, tp_size=4), open_engine(stack, 8)
    ours = open_engine(stack, timeout_s=2 * LIMIT_S)
    stalled = {Endpoint(theirs.endpoint.host, worker.port) for worker in theirs.workers}
    load, begun = Client.load, threading.Semaphore(0)

    async def stall(client: Client, *args: Any) -> Any:
        if client.endpoint in stalled:
            begun.release()
            await asyncio.Event().wait()
        return await load(client, *args)

    monkeypatch.setattr(Client, "load", stall)
    for engine, ticket in ((theirs, TICKET), (others, "another")):
        engine.lend(ticket, TOKENS, ids(engine, THEIRS))
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, ids(ours, OURS))
    num_buffers = ours.workers[0]._exchange.staging.num_buffers
    for _ in range(num_buffers - 1):
        assert begun.acquire(timeout=LIMIT_S)
    [fetched] = ours.fetch(others.endpoint, "another", TOKENS, ids(ours, OURS))
    loading.cancel()
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, ids(ours, OURS))


def test_a_fetch_whose_reads_stall_ends_them_and_reports_bad_blocks_in_safe_memory(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents: list[FakeNixlAgent] = []

    def make_agent() -> FakeNixlAgent:
        agents.append(FakeNixlAgent())
        return agents[-1]

    opened = partial(Handover, make_agent=make_agent)
    monkeypatch.setattr(handover_engines, "Handover", opened)
    config: dict[str, Any] = {"transport": "auto", "timeout_s": 1.0}
    theirs, ours = open_engine(stack, **config), open_engine(stack, lends=False, **config)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    for agent in agents:
        agent.hold()
    [fetched] = map(get, ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS]))
    for agent in agents:
        agent.release()
    assert (fetched.bad_blocks, fetched.memory_safe) == ([OURS], True)
    assert ours.is_untouched([[]])


def test_release_never_raises(stack: ExitStack) -> None:
    ours = open_engine(stack)
    ours.release(Endpoint("x" * 70, 7100), TICKET)
    ours.release(Endpoint("127.0.0.1", 1), TICKET)


def test_a_ticket_is_released_at_all_workers_whatever_other_engines_were_asked_since(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_ENGINES", 1)
    theirs, others, ours = open_engine(stack, tp_size=2), open_engine(stack), open_engine(stack)
    theirs.lend(TICKET, TOKENS, [THEIRS])
    others.lend("another", TOKENS, [THEIRS])
    ours.ask(theirs.endpoint, TICKET, TOKENS)
    ours.ask(others.endpoint, "another", TOKENS)
    ours.release(theirs.endpoint, TICKET)
    wait_until_ended(theirs, TICKET)


def test_a_gpu_is_not_promised_blocks_that_a_processor_would_have_to_copy(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = open_engine(stack, tokens_per_block=8), open_engine(stack)
    theirs.lend(TICKET, TOKENS, ids(theirs, THEIRS))
    monkeypatch.setattr(reader, "HOST", torch.device("cuda"))  # as if our caches were on one
    with pytest.raises(CacheMismatchError, match="pieces of 8192 bytes, for a GPU"):
        ours.fetch(theirs.endpoint, TICKET, TOKENS, ids(ours, OURS))
    assert ours.is_untouched([[]])


# Peers of other releases

BOX = PageBox(layer_name="0", part="k", dtype=torch.int16, digits=(Digit("token", 4, 2),))
GROUP = GroupDescription(tokens_per_block=4, payload_size_bytes=8, boxes=(BOX,))
TOLD = CacheDescription(shard=WorkerShard(num_kv_heads=2, tp_size=2), groups=(GROUP,))
PEER_KEYS = [BlockKey(b"one"), BlockKey(b"other")]


def test_an_engine_of_a_release_with_fewer_fields_offers_under_the_keys_that_are_asked_for() -> (
    None
):
    words = msgspec.msgpack.decode(TOLD.encode())
    del words["groups"][0]["has_states"], words["groups"][0]["boxes"][0]["encoding"]
    older = msgspec.msgpack.encode(words)
    engine = reader.PeerEngine(older)
    assert engine.description == TOLD
    it = SimpleNamespace(encode=lambda: older)  # as that release describes itself
    offered = reader.worker_keys(it, PEER_KEYS)  # type: ignore[arg-type]
    assert engine.worker_keys(0, PEER_KEYS) == offered != reader.worker_keys(TOLD, PEER_KEYS)


# Engines in processes of their own, which die, stop and lie


@pytest.mark.processes
@pytest.mark.parametrize("their_size", [4, 8])
def test_a_prompt_goes_from_process_to_process_by_nixl(their_size: int, stack: ExitStack) -> None:
    theirs = start(stack, their_size, transport="nixl")
    ours = open_engine(stack, transport="nixl")
    theirs.call("lend", TICKET, TOKENS, [THEIRS])
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    theirs.call("alter", THEIRS[0])
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert fetched.bad_blocks == [OURS[: their_size // 4]]
    ours.release(theirs.endpoint, TICKET)
    until(lambda: theirs.call("take_ended") == [[TICKET]])


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["socket", "nixl"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_dies_or_stops_during_a_fetch_ends_it(
    number: signal.Signals, transport: str, stack: ExitStack
) -> None:
    theirs = start(stack, transport=transport)
    ours = open_engine(stack, transport=transport, timeout_s=1.5)
    theirs.call("lend", TICKET, TOKENS, [THEIRS], num_tokens=8, is_complete=False)
    found = ours.ask(theirs.endpoint, TICKET, TOKENS, waits=True)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS], waits_for=TICKET)
    until(lambda: all(ours.good(TOKENS, [OURS])[0][0][:2]))
    theirs.signal(number)
    fetched = get(loading)
    assert set(fetched.bad_blocks[0]) >= set(OURS[2:])
    good = ours.good(TOKENS, [OURS])[0][0]
    bad = set(fetched.bad_blocks[0])
    assert all(is_good or b in bad for b, is_good in zip(OURS, good, strict=True))


def lying(stack: ExitStack, description: bytes) -> Engine:
    """Engine with a false description of its caches."""
    theirs = open_engine(stack)
    lender = theirs.workers[0]._lender
    assert lender is not None
    lender.description = description
    theirs.lend(TICKET, TOKENS, [THEIRS])
    return theirs


@pytest.mark.processes
@pytest.mark.parametrize("tp_size", [1 << 10, 1 << 40])
def test_a_lender_that_claims_too_many_workers_is_refused(tp_size: int, stack: ExitStack) -> None:
    ours = open_engine(stack)
    described = ours.workers[0]._description
    shard = WorkerShard(num_kv_heads=4, tp_size=tp_size)
    claim = msgspec.structs.replace(described, shard=shard)
    theirs = lying(stack, claim.encode())
    with pytest.raises(CacheMismatchError, match=r"num_workers.*at most 128.*theirs is"):
        ours.ask(theirs.endpoint, TICKET, TOKENS)


@pytest.mark.processes
def test_a_lender_of_another_shape_than_it_says_gives_nothing(stack: ExitStack) -> None:
    """Its blocks have 4 tokens, but it says 8, so half of a read would be another prompt's."""
    ours, real = open_engine(stack), open_engine(stack, tokens_per_block=8)
    described: CacheDescription = real.workers[0]._description
    theirs = lying(stack, described.encode())
    assert ours.ask(theirs.endpoint, TICKET, TOKENS).num_tokens == 0
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert fetched.bad_blocks == [OURS]
    assert ours.is_untouched([[]])


@pytest.mark.processes
def test_blocks_that_do_not_fit_into_staging_memory_are_refused_by_both_sizes(
    stack: ExitStack,
) -> None:
    theirs, ours = open_engine(stack, tokens_per_block=128), open_engine(stack, staging=1)
    theirs.lend(TICKET, TOKENS, [[3]])
    their_bytes = 2 * 2 * 128 * 4 * 3 * 4
    with pytest.raises(CacheMismatchError, match=f"payload_size_bytes.*at most.*{their_bytes}"):
        ours.ask(theirs.endpoint, TICKET, TOKENS)


AT_THE_END = """
import sys
from tests.transfer.handover_engines import Engine, prompt

transport = sys.argv[1]
tokens, ids = prompt(22), [[3, 9, 4, 12, 7, 1]]
prefill, decode = Engine(transport=transport), Engine(transport=transport, lends=False)
prefill.lend("0123456789abcdef", tokens, ids)
if transport == "socket":
    decode.fetch(prefill.endpoint, "0123456789abcdef", tokens, ids)
    assert decode.all_good(tokens, ids)
opened = [decode, prefill]
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["", "without new threads"])
@pytest.mark.parametrize("transport", ["socket", "nixl"])
def test_a_hand_over_can_be_closed_when_the_interpreter_ends(transport: str, how: str) -> None:
    """Its leases are still running, and its connections are open."""
    check_that_it_is_closed_at_the_end(AT_THE_END, transport, how)


# States of recurrent layers: one for the whole prompt, found by its tokens, never by a part

STATE_TOKENS = list(range(10))
STATE_BLOCK = 3


class StateEngine(Engine):
    """Engine with a group of tokens and one of states."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        tokens_per_block: int = 4,
        state: tuple[int, int] = (3, 5),
        dtype: torch.dtype = torch.float16,
        tp_size: int = 1,
    ) -> None:
        self.states = torch.zeros(8, *state, dtype=dtype)
        super().__init__(tokens_per_block, tp_size=tp_size, windows=(None, 1))
        stack.callback(self.close)

    def _add_worker(self, rank: int, layout: str, model: str, config: NixlConfig) -> None:
        size, heads, states = self.tokens_per_block, 2 // self.tp_size, self.states
        full = FullAttentionSpec(
            tokens_per_block=size, num_kv_heads=heads, head_dim=6, dtype=torch.float16
        )
        shapes, dtypes = (tuple(states.shape[1:]),), (states.dtype,)
        spec = MambaSpec(tokens_per_block=4096, shapes=shapes, dtypes=dtypes)
        groups = (KVCacheGroup(full, ("layers.0",)), KVCacheGroup(spec, ("layers.1",)))
        self.tokens = torch.zeros(8, 2, size, heads, 6, dtype=torch.float16)
        caches = canonicalize(
            {"layers.0": self.tokens, "layers.1": [states]},
            KVCacheConfig(8, groups, null_block_id=0),
            layouts={"layers.0": layout},
        )
        shard = WorkerShard(num_kv_heads=2, rank=rank, tp_size=self.tp_size)
        described = describe_caches(caches, shard)
        self.workers.append(Handover(config, Namespace(model=model), described, caches))
        self.workers[-1].start()

    def lend_state(self, num_tokens: int) -> None:
        prompt = PromptKeys(STATE_TOKENS)
        keys = prompt.block_keys(0, self.tokens_per_block, len(STATE_TOKENS))
        blocks = [*range(1, len(keys) + 1), STATE_BLOCK]
        keys.append(prompt.state_key(1, num_tokens))
        self.workers[0].offer(TICKET, keys, blocks, is_complete=True)


@pytest.mark.parametrize("first_token", [0, 4, 8])
@pytest.mark.parametrize("their_size", [4, 8])
def test_the_state_comes_with_the_tokens(
    their_size: int, first_token: int, stack: ExitStack
) -> None:
    theirs, ours = StateEngine(stack, tokens_per_block=their_size), StateEngine(stack)
    theirs.states[STATE_BLOCK] = torch.arange(15).reshape(3, 5)
    theirs.tokens.normal_()
    theirs.lend_state(len(STATE_TOKENS))
    found = ours.ask(theirs.endpoint, TICKET, STATE_TOKENS)
    assert (found.num_tokens, found.has_states) == (len(STATE_TOKENS), (False, True))
    [fetched] = ours.fetch(
        theirs.endpoint, TICKET, STATE_TOKENS, [[5, 6, 7], [2]], first_token=first_token
    )
    assert fetched.bad_blocks == [[], []]
    assert torch.equal(ours.states[2], theirs.states[STATE_BLOCK])
    assert int(ours.states.count_nonzero()) == 14
    last = theirs.tokens[-(-10 // their_size), :, 8 % their_size : 8 % their_size + 2]
    assert torch.equal(ours.tokens[7, :, :2], last)


def test_a_state_after_other_tokens_is_not_there(stack: ExitStack) -> None:
    theirs, ours = StateEngine(stack), StateEngine(stack)
    theirs.lend_state(len(STATE_TOKENS) - 1)
    assert ours.ask(theirs.endpoint, TICKET, STATE_TOKENS).num_tokens == 0
    # The last block has one token more.
    assert ours.ask(theirs.endpoint, TICKET, STATE_TOKENS[:-1]).num_tokens == 0


def test_a_part_of_the_prompt_has_no_state(stack: ExitStack) -> None:
    theirs, ours = StateEngine(stack), StateEngine(stack)
    theirs.lend_state(len(STATE_TOKENS))
    [fetched] = ours.fetch(theirs.endpoint, TICKET, STATE_TOKENS, [[5, 6], [2]], num_tokens=8)
    assert fetched.bad_blocks == [[], [2]]


@pytest.mark.parametrize(
    ("theirs", "field", "values"),
    [
        ({"state": (5, 3)}, "s0", ("3 of 'layers.1.state0'", 5)),
        ({"dtype": torch.bfloat16}, "dtype of layers.1.state0", (torch.float16, torch.bfloat16)),
        ({"tp_size": 2}, "tp_size", (1, 2)),
    ],
)
def test_other_states_are_refused_by_field_and_both_values(
    theirs: dict[str, Any], field: str, values: tuple[Any, Any], stack: ExitStack
) -> None:
    other, ours = StateEngine(stack, **theirs), StateEngine(stack)
    with pytest.raises(CacheMismatchError) as caught:
        ours.ask(other.endpoint, TICKET, STATE_TOKENS)
    assert caught.value.group == 1
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, *values)
