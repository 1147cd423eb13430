"""Scenario of engines whose blocks are in the host pool of another process, `pool://`."""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from kvxfer.backends.pool import PoolBackend, PoolConfig, PoolServer
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing.dict_backend import DictBackend, DictConfig
from kvxfer.testing.simulation import Opened, Simulation, Step
from kvxfer.tiering import TieredBackend
from kvxfer.transfer import TransferEngine
from tests.simulation.fleet_scenario import FleetScenario
from tests.simulation.tiers import (
    ROOM,
    SLOT_BYTES,
    LateCopyEngine,
    join,
    leftovers_of_engine,
    leftovers_of_host,
    leftovers_of_tiers,
    open_host,
)


class PoolScenario(FleetScenario):
    """Engines that share a host pool; they and its holder are killed and stopped."""

    name = "pool"
    share: ClassVar[float] = 0.4
    num_holders: ClassVar[int] = 1
    faults: ClassVar[dict[str, int]] = {**FleetScenario.faults, "stop_holder": 4}

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`; the socket is in a temporary folder of the run."""
        copying = simulation.random("copies")
        make = partial(LateCopyEngine, copying) if copying.random() < 0.5 else CPUCopyEngine
        opened = patch.object(PoolConfig, "open_copy_engine", lambda _: make())
        suffix = f"-{os.getpid()}"
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
            host = open_host(num_slots, namespace, is_shared=True)
            if not has_tier:
                return host
            below = _Below(DictConfig(max_blocks=ROOM), namespace)
            return join([host, below], namespace)

        settled = namespace if simulation.random("settled").random() < 0.5 else None
        return PoolServer(self._path, num_slots * SLOT_BYTES, open_backend, namespace=settled)

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
                below = holder._tiers.backend.tiers[1]
                assert isinstance(below, _Below)
                known = below._blocks.keys() | below.deleted
                left += [f"{key.hex()}, not below" for key in there if key not in known]
        return left


class _Below(DictBackend):
    """Tier below a pool; a block deleted here may stay in the pool while it is being read."""

    def __init__(self, config: DictConfig, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.deleted = set[BlockKey]()

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.deleted.update(keys)
        return await super().delete(keys)


_FOLDER = "kvxfer-simulation-"


def _timeout_s(simulation: Simulation) -> float:
    return simulation.random("pool").choice((0.5, 2.0, 5.0))


def is_roomy(simulation: Simulation) -> bool:
    """Whether the holders of a run have room for all keys."""
    return simulation.random("room").random() < 0.6


def _has_tier(simulation: Simulation) -> bool:
    return simulation.random("tier").random() < 0.3
