"""Traces for tests, made up by Hypothesis."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvxfer.replay import Trace, make_trace
from kvxfer.telemetry.trace_recorder import TraceLine


def trace_of(requests: Sequence[Sequence[int]], *, seconds_apart: float = 1) -> Trace:
    """Make a trace of blocks of 16 tokens, a request every second."""
    lines = [
        TraceLine(
            timestamp=1000 * seconds_apart * index,
            input_length=16 * len(blocks),
            output_length=1,
            hash_ids=list(blocks),
            tokens_per_block=16,
        )
        for index, blocks in enumerate(requests)
    ]
    return make_trace("made up", lines)


def request_lists() -> st.SearchStrategy[list[list[int]]]:
    """Draw requests of any blocks, also such as no chain of hashes would give."""
    blocks = st.lists(st.integers(0, 19), max_size=12, unique=True)
    return st.lists(blocks, min_size=1, max_size=30).filter(any)


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    """Draw requests, each of which continues some block of an earlier one."""
    requests: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 30))):
        head: list[int] = []
        goes_on = draw(st.booleans())
        if requests and goes_on:
            earlier = requests[draw(st.integers(0, len(requests) - 1))]
            head = earlier[: draw(st.integers(0, len(earlier)))]
        more = draw(st.integers(0 if head else 1, 6))
        requests.append([*head, *range(fresh, fresh + more)])
        fresh += more
    return requests
