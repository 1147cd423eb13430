"""Handover: prompts go from the blocks of one engine to those of another, of any shape."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import msgspec
import pytest
import torch

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import (
    BlockIdError,
    CacheMismatchError,
    DuplicateError,
    KVXferError,
    NamespaceMismatchError,
    PeerError,
    PeerTimeoutError,
)
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, WorkerShard
from kvxfer.lending import reader
from kvxfer.storage.keys import BlockKey
from tests.transfer.handover_engines import HND, LIMIT_S, NHD, NULL, Engine, get, prompt

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


def ids(engine: Engine, blocks: list[int]) -> list[list[int]]:
    """Blocks of an engine for `TOKENS`, the same ones for each group."""
    count = -(-len(TOKENS) // engine.tokens_per_block)
    return [blocks[:count]] * len(engine.windows)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal": ({}, {}),
    "larger blocks": ({"tokens_per_block": 8}, {}),
    "smaller blocks": ({}, {"tokens_per_block": 8}),
    "blocks that share no edge": ({"tokens_per_block": 6}, {}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 2": ({"tp_size": 2}, {"tp_size": 2}),
    "TP 4 to 2, larger blocks": ({"tp_size": 4, "tokens_per_block": 8}, {"tp_size": 2}),
    "HND to NHD": ({"layout": HND}, {"layout": NHD}),
    "NHD to HND, TP 2 to 1": ({"tp_size": 2}, {"layout": HND}),
    "two groups": ({"windows": (None, None)}, {"windows": (None, None)}),
}


@pytest.fixture(params=[1, 1 << 40], ids=["in place", "staged"])
def in_place_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks of other shapes read to their places, or by way of staging memory."""
    monkeypatch.setattr(reader, "IN_PLACE_BYTES", request.param)


@pytest.mark.usefixtures("in_place_bytes")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_goes_to_an_engine_of_another_shape(shape: str, stack: ExitStack) -> None:
    theirs, ours = (open_engine(stack, **each) for each in SHAPES[shape])
    blocks = ids(theirs, THEIRS)
    for view in chain.from_iterable(chain.from_iterable(theirs.views)):
        view[blocks[0][-1]] = 0  # what is behind the prompt in their last block
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


def test_a_window_needs_only_the_end_of_a_prompt(stack: ExitStack) -> None:
    windows = (None, 8)
    theirs, ours = (open_engine(stack, windows=windows) for _ in range(2))
    blocks = [THEIRS, [NULL, NULL, NULL, *THEIRS[:3]]]
    theirs.lend(TICKET, TOKENS, blocks)
    assert ours.ask(theirs.endpoint, TICKET, TOKENS).num_tokens == len(TOKENS)
    wanted = [OURS, [NULL, NULL, NULL, 20, 21, 22]]
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, wanted)
    assert not any(fetched.bad_blocks)
    assert fetched.num_verified == 9
    [good] = ours.good(TOKENS, wanted)
    assert good == [[True] * 6, [False] * 3 + [True] * 3]
    assert ours.is_untouched([OURS, [20, 21, 22]])


@pytest.mark.usefixtures("in_place_bytes")
@pytest.mark.parametrize(("their_size", "bad"), [(4, [14]), (8, [15, 16])])
def test_a_page_that_was_altered_after_its_offer_is_bad(
    their_size: int, bad: list[int], stack: ExitStack
) -> None:
    theirs, ours = open_engine(stack, their_size), open_engine(stack)
    theirs.lend(TICKET, TOKENS, ids(theirs, THEIRS))
    ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])  # its checksums are known by now
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


def test_without_listen_a_ticket_ends_at_once(stack: ExitStack) -> None:
    ours = open_engine(stack, lends=False)
    assert ours.workers[0].port == 0
    ours.offer(TICKET, TOKENS, [OURS])
    ours.settle()
    assert ours.take_ended() == [[TICKET]]


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            {"model": "theirs"},
            (NamespaceMismatchError, PeerError),
            "model.*theirs",
        ),
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


def test_release_never_raises(stack: ExitStack) -> None:
    ours = open_engine(stack)
    ours.release(Endpoint("x" * 70, 7100), TICKET)
    ours.release(Endpoint("127.0.0.1", 1), TICKET)


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


def test_keys_are_those_under_which_each_worker_offers_its_blocks() -> None:
    engine = reader.PeerEngine(TOLD.encode())
    for rank in range(2):
        assert engine.worker_keys(rank, PEER_KEYS) == reader.worker_keys(
            TOLD.at_rank(rank), PEER_KEYS
        )
    assert engine.worker_keys(0, PEER_KEYS) != engine.worker_keys(1, PEER_KEYS)


def test_an_engine_of_a_release_with_fewer_fields_offers_under_the_keys_that_are_asked_for() -> (
    None
):
    words = msgspec.msgpack.decode(TOLD.encode())
    del words["groups"][0]["has_states"], words["groups"][0]["boxes"][0]["encoding"]
    older = msgspec.msgpack.encode(words)
    engine = reader.PeerEngine(older)
    assert engine.description == TOLD
    offered = reader.worker_keys(Older(older), PEER_KEYS)  # type: ignore[arg-type] # as that release does
    assert engine.worker_keys(0, PEER_KEYS) == offered != reader.worker_keys(TOLD, PEER_KEYS)


class Older:
    """Description as another release encodes it."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    def encode(self) -> bytes:
        return self.encoded
