"""Number of examples per property: `make exhaustive` tries ten times as many as `make test`.

Only these numbers bound the time: Hypothesis reports a time limit that strikes within an example as
a flaky test (`FlakyFailure`).
"""

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("KVXFER_EXAMPLES", "1"))
LIMIT_S = 120 * FACTOR
"""Maximum time of a property on the busiest machine, to end tests that hang."""

DEFAULT_EXAMPLES = 100


def load_profile() -> None:
    """Make properties independent of the machine's speed and, with `CI` set, repeatable."""
    common = settings(
        deadline=None,
        max_examples=DEFAULT_EXAMPLES * FACTOR,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile("dev", common)
    settings.register_profile("ci", common, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")


def examples(number: int, *, steps: int = 50) -> settings:
    """Make settings of a property: number of examples, and steps of a state machine in each."""
    return settings(max_examples=number * FACTOR, stateful_step_count=steps)
