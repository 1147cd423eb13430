"""Command: `python -m kvxfer.testing.simulation my.module:MyScenario --seeds 100`."""

import argparse
import sys

from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.simulation.campaign import main, scenario_named

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m kvxfer.testing.simulation", description="Run seeds of a scenario of your own."
    )
    parser.add_argument("scenario", metavar="MODULE:CLASS", help="such as my.module:Mine")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="such as --seeds 1000; MODULE:CLASS -h lists them"
    )
    given = parser.parse_args()
    try:
        scenario = scenario_named(given.scenario)
    except (ImportError, AttributeError, TypeError, InvalidArgumentError) as exc:
        parser.error(f"{given.scenario}: {exc}")
    sys.exit(main([scenario], given.options))
