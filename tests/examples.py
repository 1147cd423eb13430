"""Sizes of properties: `make test` tries enough to find faults, `make exhaustive` ten times that.

Their time is bounded by these numbers alone: a limit in seconds that strikes within an example is
reported by Hypothesis as a test that fails now and then (`FlakyFailure`).
"""

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("KVXFER_EXAMPLES", "1"))
LIMIT_S = 120 * FACTOR
"""Longest time of a property on the busiest machine: this one ends tests that hang."""

DEFAULT_EXAMPLES = 100


def load_profile() -> None:
    """Let no property depend on the speed of the machine; with `CI` set, try the same each time."""
    common = settings(
        deadline=None,
        max_examples=DEFAULT_EXAMPLES * FACTOR,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile("dev", common)
    settings.register_profile("ci", common, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")


def examples(number: int, *, steps: int = 50) -> settings:
    """Settings of a property with so many examples, each of so many steps of a state machine."""
    return settings(max_examples=number * FACTOR, stateful_step_count=steps)
