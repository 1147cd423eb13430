"""Command: `python -m kvxfer.testing.simulation my.module:MyScenario --seeds 100`."""

import sys

from kvxfer.testing.simulation.campaign import main, scenario_named

if __name__ == "__main__":
    sys.exit(main([scenario_named(sys.argv[1])], sys.argv[2:]))
