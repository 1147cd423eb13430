"""Fake transfer agent: holds transfers in flight, fails them and loses peers, as tests order."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvxfer.errors import PeerLostError, TransferFailedError
from kvxfer.testing import FakeNixlAgent
from tests.backends.agent_contract import LocalPeer, Pool, random_bytes, read, words


class Sides:
    """Agent, a peer added to it, and a transfer of two fragments between them."""

    def __init__(self) -> None:
        self.agent, self.pool = FakeNixlAgent(), Pool()
        self.agent.register(self.pool.regions())
        self.peer = LocalPeer(FakeNixlAgent())

    async def connect(self) -> str:
        await self.peer.fill(1)
        return await self.agent.add_peer(self.peer.metadata)

    async def read(self, name: str) -> None:
        here, there = self.pool.address, self.peer.address
        await read(self.agent, name, words(here, here + 8), words(there, there + 8), words(8, 8))

    def num_moved(self) -> int:
        return int(np.sum(self.pool.bytes[:16] == random_bytes(1)[:16]))


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    sides = Sides()
    yield sides
    await sides.agent.aclose()
    await sides.peer.agent.aclose()


async def test_what_is_held_moves_when_released_even_if_nobody_wants_it_any_more(
    sides: Sides,
) -> None:
    name = await sides.connect()
    sides.agent.hold()
    task = asyncio.create_task(sides.read(name))
    await sides.agent.until_held()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.01)
    assert not done
    assert (sides.num_moved(), sides.agent.in_flight) == (0, 1)
    sides.agent.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sides.num_moved(), sides.agent.in_flight) == (16, 0)
    await sides.read(name)


async def test_a_failing_transfer_moves_half(sides: Sides) -> None:
    name = await sides.connect()
    sides.agent.failing = True
    with pytest.raises(TransferFailedError):
        await sides.read(name)
    assert sides.num_moved() == 8


async def test_a_delayed_transfer_arrives(sides: Sides) -> None:
    name = await sides.connect()
    sides.agent.delay_s = 0.001
    await sides.read(name)
    assert sides.num_moved() == 16


async def test_a_lost_peer_ends_what_is_held(sides: Sides) -> None:
    name = await sides.connect()
    sides.agent.hold()
    task = asyncio.create_task(sides.read(name))
    await sides.agent.until_held()
    sides.agent.make_unreachable(name)
    for lost in (task, sides.read(name)):
        with pytest.raises(PeerLostError):
            await lost
    assert sides.num_moved() == 0


async def test_removing_a_peer_waits_for_what_is_held(sides: Sides) -> None:
    name = await sides.connect()
    sides.agent.hold()
    reading = asyncio.create_task(sides.read(name))
    await sides.agent.until_held()
    removing = asyncio.create_task(sides.agent.remove_peer(name))
    await asyncio.sleep(0)
    assert not removing.done()
    sides.agent.release()
    await removing
    with pytest.raises(PeerLostError):
        await reading


async def test_nothing_is_held_in_time(sides: Sides) -> None:
    with pytest.raises(TimeoutError):
        await sides.agent.until_held(timeout_s=0.001)
