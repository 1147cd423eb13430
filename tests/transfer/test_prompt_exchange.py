"""Exchanges of prompts: engines offer and fetch by tokens and blocks, on their own event loop."""

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import kvxfer
from kvxfer.backends.nixl import Exchange
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache import CanonicalKVCaches
from kvxfer.lending import Fetched, PromptExchange, handover
from kvxfer.storage import PromptKeys
from kvxfer.testing.conformance.suite import yield_to_loop
from kvxfer.transfer.cache_memory import CacheMemory
from tests.transfer.handover_engines import look_for_two

MODEL = kvxfer.Namespace(model="m", revision="1")
TOKENS = list(range(100, 122))
NUM_BLOCKS = 16


def caches() -> tuple[CanonicalKVCaches, torch.Tensor]:
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=4, num_kv_heads=3, head_dim=5, dtype=torch.int32
    )
    memory = torch.full((NUM_BLOCKS, 2, 4, 3, 5), -1, dtype=torch.int32)
    groups = (kvxfer.KVCacheGroup(spec, ("layers.0",)),)
    plan = kvxfer.KVCacheConfig(NUM_BLOCKS, groups, null_block_id=0)
    layouts = {"layers.0": "block kv token head dim"}
    return kvxfer.canonicalize({"layers.0": memory}, plan, layouts=layouts), memory


def compute(memory: torch.Tensor) -> None:
    memory.copy_(torch.arange(memory.numel(), dtype=torch.int32).view(memory.shape))


def opened(
    made: CanonicalKVCaches, *, lends: bool = True, query: str = "", **options: Any
) -> PromptExchange:
    listen = "listen=127.0.0.1:0&" if lends else ""
    url = f"nixl://?{listen}transport=socket&timeout_s=5{query}"
    return kvxfer.exchange(url, made, **{"namespace": MODEL} | options)


@contextmanager
def held_back(exchange: PromptExchange) -> Iterator[None]:
    """Keep an exchange from doing anything that is asked of it meanwhile."""
    may_go_on = threading.Event()

    async def hold_back() -> None:
        may_go_on.wait()

    exchange._handover.submit(hold_back())
    try:
        yield
    finally:
        may_go_on.set()


async def wait_until_ended(lender: PromptExchange, ticket: str) -> None:
    async with asyncio.timeout(10):
        while not (ended := lender.take_ended()):  # noqa: ASYNC110 - as an engine does
            await asyncio.sleep(0.001)
    assert ended == [ticket]


@pytest.mark.parametrize(
    ("block_0_is_null", "first_token"), [(True, 0), (False, 0), (False, 4), (False, 8), (False, 12)]
)
async def test_a_prompt_is_offered_fetched_and_released(
    *, block_0_is_null: bool, first_token: int
) -> None:
    """The beginning that is not fetched may have any block ids."""
    (lent, theirs), (read, ours) = caches(), caches()
    if not block_0_is_null:
        read = kvxfer.CanonicalKVCaches(
            read.tensors, read.group_data_refs, group_specs=read.group_specs
        )
    compute(theirs)
    skipped, blocks = first_token // 4, [3, 1, 4, 15, 9, 2]
    targets = [7 if block_0_is_null else 0, 8, 5, 4, 1, 6]
    async with opened(lent) as lender, opened(read, lends=False) as reader:
        ticket = await lender.offer(np.array(TOKENS), [[*blocks, 6]])
        assert await reader.ask(ticket, TOKENS) == len(TOKENS)
        assert await reader.ask(ticket, TOKENS, scope=b"salt") == 0
        fetched = await reader.fetch(ticket, TOKENS, [targets], first_token=first_token)
        assert not any(fetched.bad_blocks)
        assert fetched.num_verified == 6 - skipped
        assert not lender.take_ended()
        await reader.release(ticket)
        await wait_until_ended(lender, ticket)
    assert torch.equal(ours[targets[skipped:]], theirs[blocks[skipped:]])
    assert (ours[targets[:skipped]] == -1).all()


async def test_blocks_of_a_device_are_lent_once_it_has_computed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, memory = caches()

    class Computing:
        event = 0

        def has_passed(self) -> bool:
            compute(memory)
            return True

    monkeypatch.setattr(CacheMemory, "mark", lambda *_: Computing())
    async with opened(made) as lender:
        await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 2]])
        assert (memory >= 0).all()


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_fetch_that_is_cancelled_ends_when_nothing_touches_its_blocks_any_more(
    monkeypatch: pytest.MonkeyPatch, cancelled: int
) -> None:
    """Also after a fetch whose result would have said that a read goes on."""
    submitted: list[Future[Any]] = []

    def submit(call: Coroutine[Any, Any, Any]) -> Future[Any]:
        call.close()
        submitted.append(Future())
        return submitted[-1]

    found = SimpleNamespace(wanted=lambda *_, **__: SimpleNamespace())
    async with opened(caches()[0]) as exchange:
        monkeypatch.setattr(exchange._handover, "submit", submit)
        ticket = "127.0.0.1:9/0123456789abcdef"
        fetching = asyncio.ensure_future(exchange.fetch(ticket, TOKENS, [[3, 1, 4, 15, 9, 2]]))
        for number, result in enumerate((found, Fetched([], memory_safe=False), None, None)):
            await yield_to_loop(5)
            if number == cancelled:
                fetching.cancel()
                await yield_to_loop(5)
            assert not fetching.done()
            submitted[number].set_result(result)  # of the question, the fetch, the end, the wait
        with pytest.raises(asyncio.CancelledError):
            await fetching


async def test_an_exchange_that_is_closed_has_ended_its_tickets() -> None:
    """Otherwise the engine would keep their blocks for ever."""
    async with opened(caches()[0]) as lender:
        tickets = [await lender.offer(TOKENS, [ids]) for ids in ([1, 2], [3, 4])]
        tickets.append(await lender.offer(TOKENS, [[5, 6]], num_computed_tokens=8))
        lender.give_up(tickets[0])
    assert sorted(lender.take_ended()) == sorted(tickets)
    assert lender.take_ended() == []


async def test_an_exchange_that_cannot_be_closed_in_time_has_ended_its_tickets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = Exchange.aclose

    async def close_for_ever(exchange: Exchange) -> None:
        await close(exchange)
        await asyncio.Event().wait()

    monkeypatch.setattr(Exchange, "aclose", close_for_ever)
    monkeypatch.setattr(handover, "CLOSE_S", 0.1)
    async with opened(caches()[0]) as lender:
        ticket = await lender.offer(TOKENS, [[1, 2]])
    assert lender.take_ended() == [ticket]


async def test_a_ticket_that_is_given_up_twice_ends_once() -> None:
    async with opened(caches()[0]) as lender:
        ticket = await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 2]])
        async with asyncio.timeout(10):
            for num_ended in (1, 2):
                lender.give_up(ticket)
                while len(lender._handover._ended) < num_ended:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.001)
        assert lender.take_ended() == [ticket]


@pytest.mark.parametrize(
    "ticket",
    ["", "x", "a/b", "127.0.0.1:7100", "127.0.0.1:99999/x", "10.0.0.1:7100/x", "h:1/" * 99],
)
async def test_what_is_no_ticket_is_refused(ticket: str) -> None:
    async with opened(caches()[0], lends=False) as reader:
        with pytest.raises(InvalidArgumentError, match="ticket"):
            await reader.fetch(ticket, TOKENS, [[1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("moved", ["lender", "reader"])
async def test_blocks_of_caches_that_were_moved_are_neither_lent_nor_fetched(moved: str) -> None:
    """The old addresses hold other memory, whose bytes would be taken for those of the tokens."""
    (lent, theirs), (read, ours) = caches(), caches()
    blocks, refusal = [[3, 1, 4, 15, 9, 2]], r"^caches is .*\(layers.0\): its storage was resized"
    async with opened(lent) as lender, opened(read, lends=False) as reader:
        (theirs if moved == "lender" else ours).share_memory_()  # type: ignore[no-untyped-call]
        compute(theirs)
        if moved == "lender":
            with pytest.raises(InvalidArgumentError, match=refusal):
                await lender.offer(TOKENS, blocks)
        else:
            ticket = await lender.offer(TOKENS, blocks)
            with pytest.raises(InvalidArgumentError, match=refusal):
                await reader.fetch(ticket, TOKENS, blocks)


async def test_no_ticket_names_a_port_that_nobody_listens_at() -> None:
    """Nobody could read under such a ticket, and `take_ended` would return another text."""
    lender = opened(caches()[0])
    with pytest.raises(InvalidArgumentError, match=r"listen is '127\.0\.0\.1:0'.*port 0"):
        await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 2]])
    await lender.aclose()
    assert lender.take_ended() == []


async def cancel_first_offer(lender: PromptExchange, ids: list[list[int]]) -> str:
    """Cancel the first offer of a ticket before it is lent; return the ticket."""
    ticket = f"127.0.0.1:{lender._handover.port}/lease"
    with held_back(lender):
        offering = asyncio.ensure_future(lender.offer(TOKENS, ids, ticket=ticket))
        await yield_to_loop(1)
        offering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await offering
    return ticket


async def test_a_ticket_that_is_offered_again_does_not_end_with_its_first_end() -> None:
    """Even if its end is asked for before it is lent; it is told later, once."""
    async with opened(caches()[0]) as lender:
        ids = [[3, 1, 4, 15, 9, 2]]
        ticket = await cancel_first_offer(lender, ids)
        while not lender._handover._ended:  # noqa: ASYNC110 - until the blocks are free again
            await asyncio.sleep(0.001)
        submit, told = lender._handover.submit, list[list[str]]()

        def submit_late(call: Coroutine[Any, Any, Any]) -> Future[Any]:
            told.append(lender.take_ended())
            return submit(call)

        with patch.object(lender._handover, "submit", submit_late):
            assert await lender.offer(TOKENS, ids, ticket=ticket) == ticket
        lender.give_up(ticket)
        while not (ended := lender.take_ended()):  # noqa: ASYNC110 - as an engine does
            await asyncio.sleep(0.001)
        assert [*told, ended] == [[], [ticket]]


async def test_a_ticket_is_offered_again_as_soon_as_its_first_offer_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "LOOK_S", 60.0)  # nobody finds out that the first one has ended
    async with opened(caches()[0]) as lender, opened(caches()[0], lends=False) as reader:
        ids = [[3, 1, 4, 15, 9, 2]]
        ticket = await cancel_first_offer(lender, ids)
        assert await lender.offer(TOKENS, ids, ticket=ticket) == ticket
        assert await reader.ask(ticket, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_an_offer_that_ends_early_takes_back_nothing_that_another_one_lent(
    *, is_cancelled: bool
) -> None:
    """It is cancelled, or refused since the other one was the last of its ticket."""
    async with opened(caches()[0]) as lender, opened(caches()[0], lends=False) as reader:
        ticket, ids = f"127.0.0.1:{lender._handover.port}/lease", [[3, 1, 4, 15, 9, 2]]
        num_computed = 8 if is_cancelled else len(TOKENS)
        with held_back(lender):
            offers = [
                asyncio.ensure_future(
                    lender.offer(TOKENS, ids, ticket=ticket, num_computed_tokens=end)
                )
                for end in (num_computed, len(TOKENS))
            ]
            await yield_to_loop(1)
            if is_cancelled:
                offers[0].cancel()
        await asyncio.wait(offers)
        early, other = offers if is_cancelled else reversed(offers)
        assert other.result() == ticket
        assert early.cancelled() is is_cancelled
        assert is_cancelled or isinstance(early.exception(), InvalidArgumentError)
        assert await reader.ask(ticket, TOKENS) == len(TOKENS)
        await reader.release(ticket)
        await wait_until_ended(lender, ticket)


def prompts_in_memory() -> list[PromptKeys]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is PromptKeys]


async def test_an_offer_keeps_no_copy_of_its_prompt() -> None:
    """Each part of a long prompt is offered with all tokens."""
    of_other_tests = prompts_in_memory()
    async with opened(caches()[0]) as lender:
        ticket = ""
        for num_computed in (4, 8):
            ticket = await lender.offer(
                TOKENS, [[3, 1, 4, 15, 9, 2]], ticket=ticket, num_computed_tokens=num_computed
            )
        assert not [each for each in prompts_in_memory() if each not in of_other_tests]


async def test_arguments_of_no_use_are_refused_by_name() -> None:
    async with opened(caches()[0]) as lender, opened(caches()[0], lends=False) as reader:
        ticket = await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 2]])
        with pytest.raises(InvalidArgumentError, match=r"number of block_ids\[0\] is 5"):
            await reader.fetch(ticket, TOKENS, [[1, 2, 3, 4, 5]])
        with pytest.raises(InvalidArgumentError, match=r"block_ids is .*1 groups"):
            await reader.fetch(ticket, TOKENS, [])
        with pytest.raises(InvalidArgumentError, match="listen"):
            await reader.offer(TOKENS, [[1, 2, 3, 4, 5, 6]])
        with pytest.raises(InvalidArgumentError, match=r"block_ids\[0\] is 99"):
            await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 99]])
        with pytest.raises(InvalidArgumentError, match="new, open or over"):
            await lender.offer(TOKENS, [[3, 1, 4, 15, 9, 2]], ticket=ticket)


@pytest.mark.parametrize(
    ("url", "rank", "advertise", "named"),
    [
        ("host://?capacity=64KiB", 0, "", "backend is .*nixl"),
        ("nixl://127.0.0.1:7100", 0, "", "address"),
        ("nixl://?listen=127.0.0.1:0", 0, "", "listen"),
        ("nixl://?listen=127.0.0.1:65535", 1, "", "listen"),
        ("nixl://?listen=127.0.0.1:7100", 0, "10.0.0.7:7100", "advertise is '10.0.0.7:7100'"),
        ("nixl://?listen=0.0.0.0:7100", 0, "[::]", "advertise"),
        ("nixl://?listen=127.0.0.1:7100", 0, "node\0", "advertise"),
    ],
)
def test_what_cannot_be_an_exchange_is_refused(
    url: str, rank: int, advertise: str, named: str
) -> None:
    shard = kvxfer.WorkerShard(num_kv_heads=6, tp_size=2, rank=rank)
    with pytest.raises(InvalidArgumentError, match=named):
        kvxfer.exchange(url, caches()[0], namespace=MODEL, shard=shard, advertise=advertise)


async def test_tickets_of_a_host_with_a_long_name_are_tickets(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    lent, _ = caches()
    host = f"prefill-0.{'p' * 60}.serving-namespace.svc.cluster.local"
    async with opened(lent, query=f"&secret_file={secret}", advertise=host) as lender:
        ticket = await lender.offer(TOKENS, [[1, 2, 3, 4, 5, 6]], num_computed_tokens=8)
        lender.give_up(ticket)
        await wait_until_ended(lender, ticket)


async def test_a_prompt_is_fetched_while_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look for its next blocks asks for a few of them, however many there are."""
    asked = look_for_two(monkeypatch)
    (lent, theirs), (read, ours) = caches(), caches()
    compute(theirs)
    blocks, targets = [3, 1, 4, 15, 9, 2], [1, 2, 3, 4, 5, 6]
    async with opened(lent) as lender, opened(read, lends=False) as reader:
        ticket = await lender.offer(TOKENS, [blocks], num_computed_tokens=10)
        assert await reader.ask(ticket, TOKENS) == len(TOKENS)
        loading = asyncio.create_task(reader.fetch(ticket, TOKENS, [targets]))
        async with asyncio.timeout(10):
            while not torch.equal(ours[[1, 2]], theirs[[3, 1]]):  # noqa: ASYNC110 - memory tells nobody
                await asyncio.sleep(0.001)
        assert not loading.done()
        assert await lender.offer(TOKENS, [blocks], ticket=ticket) == ticket
        assert not any((await loading).bad_blocks)
    assert torch.equal(ours[targets], theirs[blocks])
    assert {2} <= set(asked[2:]) <= {1, 2}, "beside the two questions of the reader"
