"""Command `make simulate`: seeds of the scenarios of this project."""

import sys

from kvxfer.testing.simulation import Scenario, main
from tests.simulation.files import FilesScenario
from tests.simulation.objects import ObjectsScenario
from tests.simulation.peers import PeersScenario
from tests.simulation.polled import PolledScenario
from tests.simulation.pool import PoolScenario
from tests.simulation.tiers import TiersScenario

SCENARIOS: list[Scenario] = [
    TiersScenario(),
    PolledScenario(),
    PoolScenario(),
    PeersScenario(),
    ObjectsScenario(),
    FilesScenario(),
]

ON_REQUEST = ("files",)
"""Scenarios that run where they are named alone, until thousands of their seeds have run."""

if __name__ == "__main__":
    is_named = "--scenario" in sys.argv
    sys.exit(main([each for each in SCENARIOS if is_named or each.name not in ON_REQUEST]))
