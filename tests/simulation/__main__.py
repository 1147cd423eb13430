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

if __name__ == "__main__":
    sys.exit(main(SCENARIOS))
