"""Object storage in a plan: prices, requests and what they cost."""

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay import Machine, Prices, Trace, make_trace, parse_prices, plan_list
from kvxfer.telemetry.trace_recorder import TraceLine

BUCKET = "s3://bucket/prefix"
GIB = 1 << 30
FIRST = {"PUT": 3, "LIST": 1, "GET": 1}
"""Requests of the first store: `namespace.json`, and the kinds of pages beside it."""
OBJECT_BYTES = 16 * 4096 + 4096
"""Bytes of the object of a block: 16 tokens of a page each, and a header."""


def make(*requests: tuple[float, list[int]]) -> Trace:
    """Make a trace of requests: the second that each comes in, and its blocks."""
    lines = [
        TraceLine(
            timestamp=1000 * second, input_length=16 * len(ids), output_length=0, hash_ids=ids
        )
        for second, ids in requests
    ]
    return make_trace("test", lines, tokens_per_block=16)


def requests_of(trace: Trace, *urls: str) -> dict[str, int]:
    row = plan_list(trace, Machine(bytes_per_token=4096), urls)
    use = row.tiers[-1].objects
    assert use is not None
    assert use.costs is None
    return use.requests


def expected(**requests: int) -> dict[str, int]:
    """Add the requests of the first store."""
    return {kind: number + FIRST.get(kind, 0) for kind, number in ({"GET": 0} | requests).items()}


def test_a_new_block_is_asked_for_once_and_sent_once() -> None:
    trace = make((0, [1, 2, 3]))
    assert requests_of(trace, BUCKET) == expected(PUT=3, LIST=1, HEAD=3)


def test_what_is_known_is_not_asked_for_until_its_time_is_over() -> None:
    soon, late = make((0, [1]), (299, [1])), make((0, [1]), (301, [1]))
    assert requests_of(soon, BUCKET) == expected(PUT=1, LIST=1, GET=1, HEAD=1)
    assert requests_of(late, BUCKET) == expected(PUT=1, LIST=1, GET=1, HEAD=2)
    assert requests_of(late, f"{BUCKET}?found_ttl_s=400")["HEAD"] == 1


def test_what_was_missing_soon_after_the_list_is_not_asked_for() -> None:
    assert requests_of(make((0, [1]), (4, [2])), BUCKET)["HEAD"] == 1
    assert requests_of(make((0, [1]), (6, [2])), BUCKET)["HEAD"] == 2
    assert requests_of(make((0, [1]), (6, [2])), f"{BUCKET}?missing_ttl_s=10")["HEAD"] == 1


def test_a_hit_of_a_tier_above_is_no_request() -> None:
    trace = make((0, [1, 2]), (1, [1, 2]), (400, [1, 2]))
    assert requests_of(trace, "host://?capacity=1GiB", BUCKET)["GET"] == 1


def test_costs_are_those_of_the_requests_and_bytes() -> None:
    trace = make((0, [1, 2]), (8640, [1, 2]))
    prices = Prices(put=5.0, get=3.0, gib_egress=7.0 * GIB, gib_month=2.0 * GIB)
    row = plan_list(trace, Machine(bytes_per_token=4096, prices=prices), [BUCKET])
    (tier,) = row.tiers
    assert tier.policy == "none"
    assert tier.num_slots == 2
    use = tier.objects
    assert use is not None
    assert use.requests == expected(PUT=2, LIST=1, GET=2, HEAD=4)
    assert use.bytes_sent == use.bytes_received == use.bytes_kept == 2 * OBJECT_BYTES
    assert use.requests_per_s == pytest.approx(14 / 8640)
    costs = use.costs
    assert costs is not None
    assert costs.puts == pytest.approx(5.0 * 7 / 1000)
    assert costs.gets == pytest.approx(3.0 * 7 / 1000)
    assert costs.egress == pytest.approx(7.0 * 2 * OBJECT_BYTES)
    total = costs.puts + costs.gets + costs.egress
    assert costs.per_1000_prompts == pytest.approx(total * 500)
    assert costs.per_day == pytest.approx(total * 10)
    assert costs.kept_per_month == pytest.approx(2.0 * 2 * OBJECT_BYTES)


def test_prices_are_read_by_their_names() -> None:
    assert parse_prices("put=0.005,gib-month=0.02") == Prices(put=0.005, gib_month=0.02)


@pytest.mark.parametrize(
    "text", ["", "put", "put=", "put=dear", "put=-1", "put=inf", "put=nan", "put=1,put=2", "x=1"]
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"prices is .*put=PRICE"):
        parse_prices(text)
