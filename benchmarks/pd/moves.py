"""Blocks handed over between two engines without models, against NIXL alone."""

from dataclasses import replace
from functools import partial
from typing import get_args

from benchmarks.batches import KIB
from benchmarks.nixl.far import FarProcess
from benchmarks.pd.bare_engines import NUM_BYTES, Decode, Prefill
from benchmarks.report import BenchRow, compare, contend
from benchmarks.shapes import HND, ROWS, EngineShape
from kvxfer.backends.nixl import IntegrityGrade

GRADES: tuple[IntegrityGrade, ...] = get_args(IntegrityGrade)
ROW_GOAL = ">= 0.9"
SHAPE_GOAL = ">= 0.8"

LARGE_ROWS = EngineShape(order=ROWS)
SMALL_ROWS = EngineShape(order=ROWS, num_layers=2)
PAGES = EngineShape()

_hnd = partial(EngineShape, order=HND)
SHAPE_CASES = [
    ("TP 2 -> 1, HND", _hnd(tp_size=2), _hnd()),
    ("TP 2 -> 1, NHD", EngineShape(tp_size=2), EngineShape()),
] + [
    (
        f"blocks of {theirs} -> {ours} tokens, {form}",
        replace(shape, tokens_per_block=theirs),
        replace(shape, tokens_per_block=ours),
    )
    for form, shape in (("NHD", PAGES), ("keys by dimensions", _hnd(packs_keys=True)))
    for theirs, ours in ((128, 64), (64, 128))
]
"""Name, shapes of the prefill and the decode engine; the baseline is two of the latter."""


async def measure_moves(*, rounds: int) -> list[BenchRow]:
    """Measure fetches of all blocks of an engine in another process; raises like `run`."""
    with FarProcess(Prefill) as far:
        decode = Decode(far)
        rows = []
        for shape in (LARGE_ROWS, SMALL_ROWS, PAGES):
            rows += await _against_raw(decode, shape, rounds)
        rows += await _rows_against_pages(decode, rounds)
        for name, theirs, ours in SHAPE_CASES:
            async with (
                decode.fetching(theirs, ours) as fetch,
                decode.fetching(ours, ours) as baseline,
            ):
                times = await contend([fetch, baseline], rounds=rounds)
            case = f"fetch, {name}, full, against equal engines"
            rows.append(_row(case, *times, goal=SHAPE_GOAL))
    return rows


async def _against_raw(decode: Decode, shape: EngineShape, rounds: int) -> list[BenchRow]:
    """Compare fetches with NIXL READs of the same fragments; for large rows, also of one block."""
    rows = []
    async with decode.raw(shape) as raw:
        all_of_them = raw.moving("READ", fragment_bytes=shape.page_bytes)
        for grade in GRADES:
            fetching = partial(decode.fetching, shape, shape, integrity=grade)
            async with fetching() as fetch:
                times = await contend([fetch, all_of_them], rounds=rounds)
            case = f"fetch {_size(shape)}, {grade}, against NIXL READ of them"
            rows.append(_row(case, *times, goal=ROW_GOAL if shape.order == ROWS else ""))
            if shape is LARGE_ROWS:
                async with fetching(num_tokens=shape.tokens_per_block) as fetch:
                    one = raw.moving("READ", num_blocks=1)
                    times = await contend([fetch, one], rounds=rounds)
                size = f"{shape.block_bytes // KIB} KiB"
                case = f"fetch one block of {size}, {grade}, against NIXL READ"
                rows.append(compare(case, *times, unit="us", of_time=True))
    return rows


async def _rows_against_pages(decode: Decode, rounds: int) -> list[BenchRow]:
    """Compare the same bytes in a row for each block and in a page for each layer."""
    rows, case = [], f"{_size(LARGE_ROWS)}, against {_size(PAGES)}"
    for grade in GRADES:
        async with (
            decode.fetching(LARGE_ROWS, LARGE_ROWS, integrity=grade) as whole,
            decode.fetching(PAGES, PAGES, integrity=grade) as paged,
        ):
            times = await contend([whole, paged], rounds=rounds)
        rows.append(_row(f"fetch {case}, {grade}", *times))
    async with decode.raw(LARGE_ROWS) as raw:
        reads = [raw.moving("READ", fragment_bytes=each.page_bytes) for each in (LARGE_ROWS, PAGES)]
        times = await contend(reads, rounds=rounds)
    rows.append(_row(f"NIXL READ, {case}", *times))
    return rows


def _size(shape: EngineShape) -> str:
    """Describe the number and the size of the contiguous pieces of an engine's blocks."""
    what = "rows" if shape.order == ROWS else "pages"
    return f"{NUM_BYTES // shape.page_bytes} {what} of {shape.page_bytes // KIB} KiB"


_row = partial(compare, unit="ns/B", per=NUM_BYTES)
