"""Page boxes against index arithmetic, element by element."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import PageMappingError
from kvxfer.kvcache.page_box import Digit, PageBox


def box_of(*digits: Digit, first: int = 0) -> PageBox:
    return PageBox(
        layer_name="a",
        part="k",
        dtype=torch.int8,
        digits=digits,
        first=(("token", first),) if first else (),
    )


def places(box: PageBox) -> dict[int, int]:
    """List each element's index along `token`, and its offset."""
    found = {}
    for values in product(*(range(digit.size) for digit in box.digits)):
        pairs = list(zip(values, box.digits, strict=True))
        index = box.first_index("token") + sum(value * digit.step for value, digit in pairs)
        found[index] = box.offset_bytes + sum(value * d.stride_bytes for value, d in pairs)
    return found


def narrow(box: PageBox, start: int, stop: int) -> dict[int, int] | None:
    """List the places of the tokens from `start` to `stop`; None where they are not a box."""
    try:
        narrowed = box.narrowed("token", start, stop)
    except PageMappingError:
        return None
    return places(narrowed) if narrowed else {}


@st.composite
def boxes(draw: st.DrawFn) -> PageBox:
    """Draw any box of tokens: up to three digits, with other tokens between their steps."""
    digits: list[Digit] = []
    step = extent = 1
    for _ in range(draw(st.integers(1, 3))):
        step = extent + draw(st.integers(0, 3)) if digits else 1
        size = draw(st.integers(1, 4))
        digits.insert(0, Digit("token", size, draw(st.integers(1, 99)) * 10 ** len(digits), step))
        extent += (size - 1) * step
    return box_of(*digits, first=draw(st.integers(-9, 9)))


@given(box=boxes(), start=st.integers(-12, 60), count=st.integers(0, 60))
def test_a_narrowed_box_has_the_elements_that_are_asked_for(
    box: PageBox, start: int, count: int
) -> None:
    wanted = {i: place for i, place in places(box).items() if start <= i < start + count}
    found = narrow(box, start, start + count)
    if found is None:
        assert len(box.digits) > 1, "steps of one size are a box"
    else:
        assert found == wanted


def test_a_narrowed_box_may_begin_between_two_turns() -> None:
    turns = box_of(Digit("token", 2, 40, 8), Digit("token", 4, 10), first=4)
    narrowed = turns.narrowed("token", 8, 16)
    assert narrowed is not None
    assert places(narrowed) == {12: 40, 13: 50, 14: 60, 15: 70}


def test_parts_of_several_steps_are_no_box() -> None:
    with pytest.raises(PageMappingError, match="steps of 6; expected 8 to 16") as caught:
        box_of(Digit("token", 4, 60, 6), Digit("token", 6, 10)).narrowed("token", 8, 16)
    assert caught.value.axis == "token"


@pytest.mark.parametrize("run", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kernel_tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rank", [0, 2])
def test_workers_take_turns_whatever_their_kernel_blocks(
    run: int, kernel_tokens: int, rank: int
) -> None:
    digits = (
        Digit("token", 16 // kernel_tokens, 100, kernel_tokens),
        Digit("token", kernel_tokens, 1),
    )
    box = box_of(*digits)
    taken = box.interleaved("token", run=run, rank=rank, num_ranks=3)
    expected = {}
    for index, place in places(box).items():
        turn, within = divmod(index, run)
        expected[(turn * 3 + rank) * run + within] = place
    assert places(taken) == expected


@pytest.mark.parametrize(
    ("run", "digits"), [(32, [(16, 1)]), (6, [(16, 1)]), (4, [(2, 6), (6, 1)])]
)
def test_turns_end_where_digits_do(run: int, digits: list[tuple[int, int]]) -> None:
    box = box_of(*(Digit("token", size, step, step) for size, step in digits))
    with pytest.raises(PageMappingError) as caught:
        box.interleaved("token", run=run, rank=0, num_ranks=2)
    assert caught.value.axis == "token"
