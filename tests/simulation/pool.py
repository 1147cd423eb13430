"""Scenario of engines whose blocks are in the host pool of another process, `pool://`."""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from kvxfer import Backend, BlockKey, Namespace, TieredBackend, TransferEngine
from kvxfer.backends.host import HostBackend
from kvxfer.backends.pool import PoolBackend, PoolConfig, PoolServer
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.testing import DictBackend, DictConfig
from kvxfer.testing.simulation import FaultyTier, Opened, Simulation, Step, TierFault
from kvxfer.testing.simulation.engine_scenario import SLACK_S
from kvxfer.testing.simulation.faults import CALLS
from kvxfer.tiering.tiered_backend import preload, tiers_of
from tests.simulation.fleet_scenario import FleetScenario
from tests.simulation.memory import flip_bit
from tests.simulation.tiers import (
    ROOM,
    SLOT_BYTES,
    LateCopyEngine,
    join,
    leftovers_of_engine,
    leftovers_of_host,
    leftovers_of_tiers,
    open_host,
    watch_staging,
)

FAULTY = ((0, 0), (0, 0), (3, 0), (8, 0), (0, 3), (3, 3))
"""Numbers of faults of the tier below a pool and of blocks of the pool that rot, in a plan."""
PRELOAD_S, FAULTY_PRELOADS = 0.4, 0.5
"""Time for preloading, and share of the restarts at which the tier below a pool fails."""
CALM = 0.5
"""Share of these plans without other faults, so that every engine keeps its pool."""


class PoolScenario(FleetScenario):
    """Engines that share a host pool; they and its holder are killed and stopped."""

    name = "pool"
    share: ClassVar[float] = 0.4
    num_holders: ClassVar[int] = 1
    faults: ClassVar[dict[str, int]] = {
        **FleetScenario.faults,
        "stop_holder": 4,
        **dict.fromkeys(("tier", "rot"), 0),  # drawn apart, by `plan`
    }

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`; in some plans, the tier below the pool fails, or blocks rot."""
        plan = super().plan(random)  # drawn first, so that these faults do not change other plans
        length_s, num_faults, num_rotten = plan[-1].at_s, *random.choice(FAULTY)
        if random.random() < CALM * bool(num_faults or num_rotten):
            plan = [step for step in plan if step.what not in (*FleetScenario.faults, "close")]
        for _ in range(num_faults):
            fault = {
                "fault": random.choice(list(TierFault)),
                "for_s": random.choice((0.2, 1.0, 4.0)),
                "share": random.choice((0.2, 1.0)),
                "calls": random.choice((CALLS, ("load",), ("store",), ("delete",), ("lookup",))),
            }
            plan.append(Step(random.random() * length_s, "tier", {"engine": 0, **fault}))
        for _ in range(num_rotten):
            given = {"engine": 0, "holder": 0, "number": random.randrange(1 << 20)}
            plan.append(Step(random.random() * length_s, "rot", given))
        return sorted(plan, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`; the socket is in a temporary folder of the run."""
        copying = simulation.random("copies")
        make = partial(LateCopyEngine, copying) if copying.random() < 0.5 else CPUCopyEngine
        opened = patch.object(PoolConfig, "open_copy_engine", lambda _: make())
        suffix = f"-{os.getpid()}"
        self._below: FaultyTier | None = None
        self._kept: dict[BlockKey, Any] = {}  # blocks below, which outlive the holder of the pool
        self._deleted: dict[BlockKey, None] = {}
        self._is_prepared = False
        self._stays = {step.what for step in steps}.isdisjoint((*FleetScenario.faults, "close"))
        with opened, tempfile.TemporaryDirectory(prefix=_FOLDER, suffix=suffix) as folder:
            self._path = Path(folder) / "pool.sock"
            super().run(simulation, steps)

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        config = PoolConfig(path=str(self._path), timeout_s=_timeout_s(simulation))
        return Opened(
            backend=PoolBackend(config, namespace),
            is_roomy=is_roomy(simulation),
            may_delete_late=True,
        )

    def open_holder(self, simulation: Simulation, namespace: Namespace, number: int) -> PoolServer:
        num_slots = ROOM if is_roomy(simulation) else simulation.random("slots").choice((2, 6))
        has_tier = _has_tier(simulation)

        def open_backend(namespace: Namespace) -> Backend:
            self._is_prepared, host = False, open_host(num_slots, namespace, is_shared=True)
            if not has_tier:
                return host
            below = _Below(DictConfig(max_blocks=ROOM), namespace)
            below._blocks, below.deleted = self._kept, self._deleted
            self._below = _FaultyBelow(below, simulation, "below")
            joined = join([host, self._below], namespace)
            watch_staging(simulation, joined._staging)
            return joined

        settled = namespace if simulation.random("settled").random() < 0.5 else None
        prepare, num_bytes = partial(self._prepare, simulation), num_slots * SLOT_BYTES
        return PoolServer(self._path, num_bytes, open_backend, namespace=settled, prepare=prepare)

    async def _prepare(self, simulation: Simulation, backend: Backend) -> None:
        """Preload a pool that was started again, whatever the tier below does meanwhile."""
        random, began = simulation.random(f"preload {simulation.now}"), simulation.now
        if self._kept and self._below is not None and random.random() < FAULTY_PRELOADS:
            self._below.begin_fault(random.choice(list(TierFault)), 2.0, random.choice((0.2, 1.0)))
        host = tiers_of(backend)[0].provide(HostBackend)
        assert host is not None
        num_found = await preload(backend, host.num_slots, PRELOAD_S)
        if simulation.now - began > PRELOAD_S + SLACK_S:
            simulation.fail("late", f"preloading took {simulation.now - began:.3f} s")
        if num_found > len(there := host._index.keys()):
            simulation.fail("preloaded", f"{num_found}, and {len(there)} are there")
        self._is_prepared = True

    def is_strict(self, simulation: Simulation, steps: Sequence[Step]) -> bool:
        """See `FleetScenario.is_strict`: without its holder, an engine finds nothing at first."""
        limit_s = _timeout_s(simulation)
        has_faults = any(
            "holder" in step.what
            or (step.what == "stop_engine" and step.arguments["for_s"] >= limit_s)
            for step in steps
        )
        return not (has_faults or _has_tier(simulation))

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        left = leftovers_of_engine(engine)
        assert isinstance(opened.backend, PoolBackend)
        if users := sum(opened.backend._users.values()):
            left.append(f"{users} users of attachments")
        return left

    def look(self, simulation: Simulation, backends: Sequence[Any], holders: Sequence[Any]) -> None:
        """See `FleetScenario.look`: whatever the tier below does, the pool answers its engines."""
        if not self._is_prepared and any(holder._sessions for holder in holders):
            simulation.fail("served before it was prepared")
        for backend in backends if self._stays else ():
            attachment = backend._attachment
            if attachment is None or attachment.error:
                simulation.fail("lost its pool", attachment and attachment.error)

    def begin_fault(self, simulation: Simulation, step: Step) -> None:
        """See `FleetScenario.begin_fault`: the tier below the pool fails."""
        if self._below is not None:
            given = {name: each for name, each in step.arguments.items() if name != "engine"}
            self._below.begin_fault(**given)

    def is_healed(self, steps: Sequence[Step]) -> bool:
        """See `FleetScenario.is_healed`: other engines may pin a block until it is hidden."""
        return self._stays and len({step.arguments["engine"] for step in steps}) == 1

    def rot(self, holder: Any, number: int) -> BlockKey | None:
        assert isinstance(holder, PoolServer)
        return flip_bit(holder._tiers.host, number) if holder._tiers.is_open else None

    def num_pins(self, holder: Any) -> int:
        assert isinstance(holder, PoolServer)
        return sum(each.num_pins + len(each._rooms) for each in holder._sessions)

    def leftovers_of_holder(self, holder: Any) -> list[str]:
        assert isinstance(holder, PoolServer)
        left = [f"{session} is attached" for session in holder._sessions]
        if holder._tiers.is_open:
            left += leftovers_of_host(holder._tiers.host)
            if isinstance(holder._tiers.backend, TieredBackend):
                left += leftovers_of_tiers(holder._tiers.backend)
                there = holder._tiers.host._index.keys()
                tier = holder._tiers.backend.tiers[1]
                assert isinstance(tier, FaultyTier)
                below = tier.inner
                assert isinstance(below, _Below)
                known = below._blocks.keys() | below.deleted
                left += [f"{key.hex()}, not below" for key in there if key not in known]
        return left


class _Below(DictBackend):
    """Tier below a pool; a block deleted here may stay in the pool while it is being read."""

    deleted: dict[BlockKey, None]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.deleted |= dict.fromkeys(keys)
        return await super().delete(keys)

    async def aclose(self) -> None:
        self._blocks = {}  # those of the next holder stay
        await super().aclose()


class _FaultyBelow(FaultyTier):
    """Tier that knows which of its blocks were stored last."""

    async def recently_used(self, num_blocks: int) -> list[BlockKey]:
        assert isinstance(self.inner, _Below)
        latest = [*reversed(self.inner._blocks)][:num_blocks]
        return latest if not latest or any(await self.lookup(latest)) else []


_FOLDER = "kvxfer-simulation-"


def _timeout_s(simulation: Simulation) -> float:
    return simulation.random("pool").choice((0.5, 2.0, 5.0))


def is_roomy(simulation: Simulation) -> bool:
    """Whether the holders of a run have room for all keys."""
    return simulation.random("room").random() < 0.6


def _has_tier(simulation: Simulation) -> bool:
    return simulation.random("tier").random() < 0.3
