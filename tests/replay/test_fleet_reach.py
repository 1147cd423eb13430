"""Reaching a holder in simulation is reaching one by the connection that engines have."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import runtime
from kvxfer.backends.nixl import Endpoint, NixlConfig, retry_pause
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.reconnect import Reconnect
from kvxfer.errors import PeerClosedError
from kvxfer.replay.fleet import Fleet, HoldersTier, Outage, SimulatedHolders, place
from tests.clock import Clock
from tests.examples import examples

PEERS = NixlConfig(address="localhost:1")
Kind = Literal["lives", "is full", "ends", "falls silent"]
NUM_TICKS = 10
STEPS_S = (0.0, 0.05, 0.1, 0.5, 3.0, PEERS.lease_s, PEERS.handshake_timeout_s)
SHARE = 0.7
"""Share of each pause that chance leaves, in both."""


def draw(a: float, b: float) -> float:
    return a + SHARE * (b - a)


@dataclass
class World(Clock):
    """Holder, its clock, and what connects to it in place of `Connection`."""

    kind: Kind
    fails_at: float
    now: float = 0.0
    connection: Any = None
    attempts: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return self.kind in ("ends", "falls silent") and self.now >= self.fails_at

    def connect(self) -> Any:
        async def end() -> None:
            pass

        memory = SimpleNamespace(carrier="memory")
        self.connection = SimpleNamespace(is_open=True, memory=memory, tickets=set(), aclose=end)
        return self.connection

    async def open(self, *_: object) -> Any:
        if self.has_failed and self.kind == "falls silent":
            silence = asyncio.get_running_loop().create_future()
            self.attempts.append((self.now + PEERS.handshake_timeout_s, silence))
            await silence
        if self.has_failed or self.kind == "is full":
            raise PeerClosedError("holder", "refused")
        return self.connect()

    async def advance(self, now: float) -> None:
        """Let time pass: attempts end, and connections of holders that have failed."""
        due = sorted((each for each in self.attempts if each[0] <= now), key=lambda each: each[0])
        for at, silence in due:
            self.now = at
            silence.set_result(None)
            await tick()
        self.attempts = [each for each in self.attempts if each[0] > now]
        self.now = now
        lasts_s = PEERS.lease_s if self.kind == "falls silent" else 0.0
        if self.has_failed and now >= self.fails_at + lasts_s and self.connection is not None:
            self.connection.is_open = False


async def tick() -> None:
    for _ in range(NUM_TICKS):
        await asyncio.sleep(0)


async def reach_really(world: World, times: Sequence[float], *, connected: bool) -> list[str]:
    peer = Reconnect(cast("Any", None), Endpoint("holder", 7000))
    peer._pause = retry_pause(draw)
    if connected:
        peer._connection = world.connect()
    found = []
    for now in times:
        await world.advance(now)
        asked = asyncio.create_task(peer.open())
        await tick()
        if not asked.done():
            found.append("SILENT")
            asked.cancel()
            await asyncio.wait([asked])
        elif asked.exception() is not None:
            found.append("GONE")
        else:  # a connection that nobody answers on
            found.append("SILENT" if world.has_failed else "OPEN")
    peer.close()
    await peer.wait_closed()
    return found


def reach_in_simulation(
    kind: Kind, fails_at: float, times: Sequence[float], *, connected: bool
) -> list[str]:
    most = 0 if kind == "is full" else 1
    fleet = Fleet(holders=1, engines=1, rack=1, connections=2, max_connections=1 + most)
    placement = place(fleet, 1)
    fails = kind in ("ends", "falls silent")
    outage = Outage(fails_at, frozenset({0}), kind == "falls silent", placement) if fails else None
    mesh = np.full((1, 1), connected)
    holders = SimulatedHolders(fleet, 1, placement, mesh, outage=outage)
    holders.uniform = draw
    tier, found = HoldersTier(holders, 0), []
    for now in times:
        holders.now = now
        found.append(tier._reach(0).name)
    return found


@pytest.mark.property
@given(
    kind=st.sampled_from(["lives", "is full", "ends", "falls silent"]),
    fails_at=st.floats(0, 10),
    steps=st.lists(st.sampled_from(STEPS_S), min_size=1, max_size=30),
    connected=st.booleans(),
)
@examples(200)
def test_the_simulator_reaches_a_holder_as_an_engine_does(
    kind: Kind, fails_at: float, steps: list[float], *, connected: bool
) -> None:
    times = np.cumsum(steps).tolist()
    world = World(kind, fails_at)
    connected = connected and kind != "is full"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "open", world.open)
        with runtime.use(world):
            really = asyncio.run(reach_really(world, times, connected=connected))
    assert reach_in_simulation(kind, world.fails_at, times, connected=connected) == really
