"""Pins: how long a holder keeps blocks in place for a peer that reads them."""

import asyncio
from typing import Any

import pytest

from kvxfer.backends.nixl.session import ClientSession
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.messages import Message, Pinned
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import read_payloads
from tests.backends.nixl_pair import KEYS, Pair, open_pair


def served(pair: Pair) -> ClientSession:
    assert pair.holder.server is not None
    [peer] = pair.holder.server.sessions
    return peer


async def until_nothing_is_pinned(peer: ClientSession) -> None:
    async with asyncio.timeout(5):
        while peer.num_pins:  # noqa: ASYNC110 - a served peer has no event for it
            await asyncio.sleep(0)


async def test_what_was_read_is_let_go_although_nothing_else_is_asked_for() -> None:
    async with open_pair() as pair:
        [outcome] = await pair.client.load(KEYS[:1], pair.memory.describe(0, [8]))
        assert outcome.done
        await until_nothing_is_pinned(served(pair))


async def test_what_was_read_is_let_go_before_the_next_request_is_done() -> None:
    async with open_pair(release_within_s=3600.0) as pair:
        target = pair.memory.describe(0, [8, 9])
        outcomes = await pair.client.load(KEYS[:2], target)
        assert all(outcome.done for outcome in outcomes)
        assert served(pair).num_pins == 1, "the holder was told at once, so this proves nothing"
        assert read_payloads(target) == pair.payloads[:2]
        assert await pair.client.delete(KEYS[:2]) == [True, True]
        assert served(pair).num_pins == 0


async def test_what_was_pinned_for_a_load_that_was_cancelled_meanwhile_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned, answer = asyncio.Event(), asyncio.Event()

    async def pin(self: ClientSession, request: object) -> object:
        result = await original(self, request)  # type: ignore[arg-type]
        pinned.set()
        await answer.wait()
        return result

    original = ClientSession._pin
    async with open_pair() as pair:
        monkeypatch.setattr(ClientSession, "_pin", pin)
        load = asyncio.create_task(pair.client.load(KEYS[:1], pair.memory.describe(0, [8])))
        await pinned.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await until_nothing_is_pinned(served(pair))


async def test_what_is_pinned_is_let_go_however_often_the_end_of_the_session_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = asyncio.Event()  # such as the end of a connection to an engine that was stopped

    async def aclose(self: FrameChannel) -> None:
        await slow.wait()
        await original(self)

    original = FrameChannel.aclose
    async with open_pair(release_within_s=3600.0) as pair:
        [outcome] = await pair.client.load(KEYS[:1], pair.memory.describe(0, [8]))
        assert outcome.done
        peer, server = served(pair), pair.holder.server
        assert peer.num_pins == 1
        assert server is not None
        monkeypatch.setattr(FrameChannel, "aclose", aclose)
        server.close()
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(server.wait_closed())  # cancels the session once more
        await asyncio.sleep(0.01)
        assert not closing.done()
        slow.set()
        await closing
        assert peer.num_pins == 0


class Racing(dict[int, "asyncio.Future[Any]"]):
    """Requests that wait for an answer; the task is cancelled when the next one arrives."""

    task: "asyncio.Task[Any] | None" = None

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        if self.task is not None and found is not None:
            task, self.task = self.task, None
            asyncio.get_running_loop().call_soon(task.cancel)  # before the answer wakes it up
        return found


@pytest.mark.parametrize("stores", [False, True])
async def test_what_was_pinned_is_let_go_when_the_cancellation_meets_the_answer(
    *, stores: bool
) -> None:
    async with open_pair() as pair:
        [client] = pair.client._exchange.clients.values()
        connection = await client.open()
        connection._waiting = racing = Racing(connection._waiting)
        target = pair.memory.describe(0, [8])
        new = make_keys(1, first=50)
        moving = pair.client.store(new, target) if stores else pair.client.load(KEYS[:1], target)
        racing.task = asyncio.create_task(moving)
        with pytest.raises(asyncio.CancelledError):
            await racing.task
        await until_nothing_is_pinned(served(pair))
        assert statuses(await pair.client.store(new, target)) == [Status.DONE]


async def test_an_answer_too_large_for_a_message_is_a_failure_and_pins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair() as pair:
        peer = served(pair)
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
