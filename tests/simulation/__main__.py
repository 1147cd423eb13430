"""Command `make simulate`: seeds of the scenarios of this project."""

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from random import Random
from typing import ClassVar
from unittest.mock import patch

from kvxfer.testing.simulation import Scenario, Simulation, Step, main
from kvxfer.testing.simulation.campaign import scenario_named
from tests.simulation.files import FilesScenario
from tests.simulation.isolation import IsolationScenario
from tests.simulation.lending import LendingScenario
from tests.simulation.memory import MemoryScenario
from tests.simulation.objects import ObjectsScenario
from tests.simulation.peers import PeersScenario
from tests.simulation.polled import PolledScenario
from tests.simulation.pool import PoolScenario
from tests.simulation.proxy import ProxyScenario
from tests.simulation.rows import RowsScenario
from tests.simulation.storage import StorageScenario
from tests.simulation.tiers import TiersScenario


class LateScenario(Scenario):
    """Scenario that imports its engine only when it runs, since that takes seconds."""

    place: ClassVar[str]

    def plan(self, random: Random) -> list[Step]:
        return scenario_named(self.place).plan(random)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        scenario_named(self.place).run(simulation, steps)


class LMCacheScenario(LateScenario):
    """See `tests.simulation.lmcache`."""

    name, share = "lmcache", 1.0
    place = "tests.simulation.lmcache:LMCacheScenario"


class VLLMScenario(LateScenario):
    """Scenario that imports vLLM."""

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        with (
            patch("importlib.metadata.entry_points", _entry_points),
            patch("importlib.metadata.version", _version),
        ):
            super().run(simulation, steps)


_entry_points, _version = cache(metadata.entry_points), cache(metadata.version)
"""Entry points and version of the installation, cached instead of read for each engine."""


class OffloadingScenario(VLLMScenario):
    """See `tests.simulation.offloading`."""

    name, share = "offloading", 0.3
    place = "tests.simulation.offloading:OffloadingScenario"


class HandoverScenario(VLLMScenario):
    """See `tests.simulation.handover`."""

    name, share = "handover", 0.2
    place = "tests.simulation.handover:HandoverScenario"


SCENARIOS: list[Scenario] = [
    TiersScenario(),
    IsolationScenario(),
    PolledScenario(),
    RowsScenario(),
    MemoryScenario(),
    PoolScenario(),
    PeersScenario(),
    LendingScenario(),
    ObjectsScenario(),
    StorageScenario(),
    FilesScenario(),
    ProxyScenario(),
    *([LMCacheScenario()] if find_spec("lmcache") else []),
    *([OffloadingScenario(), HandoverScenario()] if find_spec("vllm") else []),
]

if __name__ == "__main__":  # the classes have to be of a module that other processes can import
    sys.exit(main(import_module("tests.simulation.__main__").SCENARIOS))
