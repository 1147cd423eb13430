"""Scenario of engines whose blocks are at peers, `nixl://`."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from kvxfer import Namespace, TransferEngine
from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer, discovery, reads
from kvxfer.backends.nixl import client as nixl_client
from kvxfer.backends.nixl import server as nixl_server
from kvxfer.backends.nixl.client import ASKED_AT_A_PEER
from kvxfer.backends.nixl.discovery import LEASE_S
from kvxfer.backends.nixl.server import MAX_REQUESTS
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.simulation import Opened, ProcessRun, Simulation, Step
from kvxfer.testing.simulation.world import draw_parts
from kvxfer.units import ByteSize
from tests.simulation.etcd import EtcdFault, SimulatedEtcd
from tests.simulation.fleet_scenario import FleetScenario
from tests.simulation.lending import forget, mend
from tests.simulation.pool import is_roomy
from tests.simulation.tiers import (
    ROOM,
    SLOT_BYTES,
    leftovers_of_engine,
    leftovers_of_host,
    open_host,
)

BURSTS = 0.08
NUM_ASKED = 5
FEW = 8
"""Maximum requests of an engine that a holder answers at a time, in plans with a burst of more."""
CALL_LIMITS = ("timeout_s", "cancel_s")
FIRST_PORT = 9000
REPLICAS = (1, 1, 2)
ETCD_SHARE = 0.4
"""Share of the seeds in which engines find holders by etcd."""
DELAYS_S = (0.0, 0.001, 0.3)
LONG_DELAYS_S = (2.0, 8.0)
LAGS = ("partition", "cut", "starve", "stop_engine", "stop_holder", "lost_reads")
"""Faults after which a holder may learn late that nobody awaits an answer, or a read may run on."""
GOES_ON_S = 0.5
"""Virtual time for which an abandoned read may outlast its run in flight."""
QUEUE_S = 2.0
"""Virtual time that a store may take while it waits for others, each of which takes 0.3 s."""
LOST_S = 120.0
"""Virtual time after which a lost read ends; until then its memory may change, and drains wait."""


class PeersScenario(FleetScenario):
    """Engines and holders of `nixl://`, over sockets or agents whose reads are late or fail."""

    name = "peers"
    share: ClassVar[float] = 0.22
    rest_s: ClassVar[float] = 15.0
    num_holders: ClassVar[int] = 2
    quiet_s: ClassVar[float] = 15.0
    num_engines: ClassVar[int] = 2
    faults: ClassVar[dict[str, int]] = {
        "kill_engine": 2,
        "crash_engine": 2,
        "stop_engine": 1,
        "kill_holder": 2,
        "end_holder": 1,
        "stop_holder": 2,
        "partition": 3,
        "cut": 3,
        "refuse": 1,
        "starve": 1,
        "late_reads": 3,
        "failing_reads": 2,
        "lost_reads": 2,
        "etcd": 4,
    }
    lasting: ClassVar[tuple[str, ...]] = ("kvxfer-etcd",)
    gone_s: ClassVar[float] = LEASE_S + 1.0

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`; some plans are bursts beyond what a holder answers at a time."""
        plan = super().plan(random)  # drawn first, so that bursts do not change the other plans
        if random.random() > BURSTS:
            return plan
        calls: dict[str, Any] = {"engine": 0, "timeout_s": None, "cancel_s": None}
        stores = [Step(0.0, "store", calls | {"parts": draw_parts(random)}) for _ in range(4)]
        asked = [
            Step(2.0, what, calls | {"parts": draw_parts(random)})
            for what in ["lookup", "lookup", "delete"] * NUM_ASKED
        ]
        return stores + asked + [Step(4.0, "lookup", calls | {"parts": draw_parts(random)})]

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        self._agents: list[tuple[Any, FakeNixlAgent]] = []
        self._unwanted: dict[tuple[int, int], float] = {}
        self._longest_s = 0.0
        self._is_mended = False
        self._may_lag = any(step.what in LAGS for step in steps)
        self._etcd = SimulatedEtcd(simulation)
        ends = {step.arguments.get(limit, 0.0) for step in steps for limit in CALL_LIMITS}
        is_burst = ends == {None}  # without abandoned requests, which would still be answered
        hash_run = simulation.random("hash run").choice((256, 256, reads.HASH_RUN_BYTES))
        with (
            patch.object(discovery, "open_session", self._etcd.open_session),
            patch.object(discovery, "own_loop", self._etcd.own_loop),
            patch.object(reads, "HASH_RUN_BYTES", hash_run),
            patch.object(nixl_server, "MAX_REQUESTS", FEW if is_burst else MAX_REQUESTS),
            patch.object(nixl_client, "ASKED_AT_A_PEER", FEW // 2 if is_burst else ASKED_AT_A_PEER),
        ):
            super().run(simulation, steps)

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        random = simulation.random("peers")
        addresses = ",".join(f"127.0.0.1:{FIRST_PORT + at}" for at in range(self.num_holders))
        config = NixlConfig(
            address="" if _has_etcd(simulation) else addresses,
            replicas=random.choice(REPLICAS),
            timeout_s=random.choice((1.0, 3.0)),
            lookup_timeout_s=random.choice((0.3, 1.0)),
            staging=ByteSize(1 << 16),
            quarantine=ByteSize(random.choice((0, 1 << 20))),
            **self._both(simulation),
        )
        backend = NixlBackend(config, namespace, make_agent=lambda: self._make_agent(simulation))
        return Opened(
            backend=backend,
            is_roomy=is_roomy(simulation),
            may_delete_late=True,
            may_time_out=config.timeout_s < QUEUE_S,
        )

    def open_holder(
        self, simulation: Simulation, namespace: Namespace, number: int
    ) -> StandalonePeer:
        num_slots = ROOM if is_roomy(simulation) else simulation.random("slots").choice((2, 6))
        capacity = ByteSize(num_slots * SLOT_BYTES)
        config = NixlConfig(
            listen=f"127.0.0.1:{FIRST_PORT + number}", capacity=capacity, **self._both(simulation)
        )
        return StandalonePeer(
            config,
            lambda namespace: open_host(num_slots, namespace),
            namespace=namespace if simulation.random("settled").random() < 0.5 else None,
            make_agent=lambda: self._make_agent(simulation),
        )

    def is_strict(self, simulation: Simulation, steps: Sequence[Step]) -> bool:
        """See `FleetScenario.is_strict`: with faults, a cut-off call may take effect late.

        If one of two replicas evicts and restores a block, the other one keeps the first store.
        """
        num_replicas = simulation.random("peers").choice(REPLICAS)  # as the first draw of `open`
        is_orderly = num_replicas == 1 or is_roomy(simulation)
        return is_orderly and not any(step.what in self.faults for step in steps)

    def known_holders(self, backend: Any) -> list[int] | None:
        if not isinstance(backend._discovery, discovery.EtcdDiscovery):
            return None
        roster = backend._discovery._roster
        return sorted(each.port - FIRST_PORT for each in roster.endpoints)

    def note_killed(self, process: ProcessRun) -> None:
        """See `FleetScenario.note_killed`: its memory can no longer be read."""
        forget(self._agents, process)

    def look(self, simulation: Simulation, backends: Sequence[Any], holders: Sequence[Any]) -> None:
        """See `FleetScenario.look`: abandoned reads and requests end with their run in flight."""
        if self._may_lag:
            return
        wanted: dict[bytes, list[int]] = {}
        unwanted: dict[tuple[int, int], str] = {}
        for backend in backends:
            exchange = backend._exchange
            for client in exchange.clients.values():
                if (connection := client._connection) is not None:
                    wanted[connection._session.session_id] = [*connection._waiting]
            unwanted |= {(id(read), 0): "a read" for read in exchange._quarantine._held}
        for session in (each for holder in holders for each in holder._server.sessions):
            waiting = wanted.get(session.session.session_id)
            gone = [] if waiting is None else [*session._jobs.keys() - set(waiting)]
            unwanted |= {(id(session), number): "a request" for number in sorted(gone)}
        now = simulation.now
        self._unwanted = {each: self._unwanted.get(each, now) for each in unwanted}
        for each, since in self._unwanted.items():
            grace_s = GOES_ON_S if each[1] else GOES_ON_S - reads.GRACE_S
            if now - since > self._longest_s + grace_s:
                simulation.fail("goes on", f"{unwanted[each]} that nobody waits for")

    def begin_fault(self, simulation: Simulation, step: Step) -> None:
        """See `FleetScenario.begin_fault`: etcd fails, or reads of an engine or holder do."""
        given, random = step.arguments, simulation.random(str(step))
        if step.what == "etcd":
            fault = random.choice(list(EtcdFault))
            self._etcd.begin_fault(fault, given["for_s"], given["share"])
            return
        for owner, agent in self._agents:
            if owner.name in (f"engine {given['engine']}", f"holder {given['holder']}"):
                if random.random() > given["share"]:
                    continue
                if step.what == "late_reads":
                    agent.delay_s = random.choice(LONG_DELAYS_S)
                    self._longest_s = max(self._longest_s, agent.delay_s)
                elif step.what == "failing_reads":
                    agent.failing = not agent.failing
                else:
                    agent.hold()
                    asyncio.get_running_loop().call_later(LOST_S, agent.release)

    def end_faults(self, simulation: Simulation) -> None:
        self._etcd.end_faults()
        mend(self._agents)
        self._is_mended = True  # also for agents that engines create later

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        left = leftovers_of_engine(engine)
        assert isinstance(opened.backend, NixlBackend)
        exchange = opened.backend._exchange
        counts = {
            "bytes in quarantine": exchange._quarantine.num_bytes,
            "missing staging buffers": exchange.staging.num_buffers - len(exchange.staging._idle),
            "late lookups": opened.backend._calls.num_late,
            "requests that wait": sum(
                len(client._connection._waiting)
                for client in exchange.clients.values()
                if client._connection is not None
            ),
        }
        return left + [f"{count} {what}" for what, count in counts.items() if count]

    def num_pins(self, holder: Any) -> int:
        assert isinstance(holder, StandalonePeer)
        return sum(each.num_pins for each in holder._server.sessions)

    def leftovers_of_holder(self, holder: Any) -> list[str]:
        assert isinstance(holder, StandalonePeer)
        left = [f"a session of {each._channel.peer}" for each in holder._server.sessions]
        if holder._server._listener.unproven:
            left.append(f"{len(holder._server._listener.unproven)} connections without proof")
        if holder._tiers.is_open:
            left += leftovers_of_host(holder._tiers.host)
        return left

    def _both(self, simulation: Simulation) -> dict[str, Any]:
        """Settings that engines and holders share."""
        random = simulation.random("both")
        return {
            "transport": random.choice(("auto", "auto", "socket")),
            "integrity": random.choice(("full", "fenced")),
            "lease_s": random.choice((3.0, 9.0)),
            "heartbeat_s": random.choice((1.0, 1.5)),
            "handshake_timeout_s": random.choice((1.0, 5.0)),
            "discover": "etcd://127.0.0.1:2379/kvxfer" if _has_etcd(simulation) else "",
        }

    def _make_agent(self, simulation: Simulation) -> FakeNixlAgent:
        agent = FakeNixlAgent()
        if not self._is_mended:
            agent.delay_s = simulation.random(f"agent {len(self._agents)}").choice(DELAYS_S)
        self._longest_s = max(self._longest_s, agent.delay_s)
        self._agents.append((simulation.runtime.scheduler.current.process, agent))
        return agent


def _has_etcd(simulation: Simulation) -> bool:
    return simulation.random("has etcd").random() < ETCD_SHARE
