"""Suspension: a tier that missed a deadline is not used for a while, and the log says so once."""

import pytest

from kvxfer.storage.suspension import Suspension
from kvxfer.tiering import TierTimeouts


def test_a_tier_is_not_used_for_5_s_after_the_last_deadline_that_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    suspension = Suspension("tier 1", TierTimeouts().pause_s)
    assert not suspension.is_on(0.0)
    suspension.begin(0.0, "lookup of 2 blocks", 2.0)
    suspension.begin(3.0, "lookup of 4 blocks", 2.0)
    assert suspension.is_on(7.9)
    assert not suspension.is_on(8.0)
    suspension.begin(9.0, "moving 8 blocks", 10.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "tier 1: lookup of 2 blocks took longer than 2 s; the tier is not used for 5 s",
        "tier 1: moving 8 blocks took longer than 10 s; the tier is not used for 5 s",
    ]
