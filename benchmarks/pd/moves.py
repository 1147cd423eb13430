"""Blocks handed over between two engines without models, against NIXL itself."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import get_args

from benchmarks.nixl.contenders import in_turn
from benchmarks.nixl.far import FarProcess
from benchmarks.pd.decode import Decode
from benchmarks.pd.prefill import NUM_BYTES, Prefill
from benchmarks.report import BenchRow, compare
from benchmarks.shapes import HND, ROWS, EngineShape
from kvxfer.backends.nixl import IntegrityGrade

KIB = 1 << 10
GRADES: tuple[IntegrityGrade, ...] = get_args(IntegrityGrade)
ROW_GOAL = ">= 0.9"
SHAPE_GOAL = ">= 0.8"

LARGE_ROWS = EngineShape(order=ROWS)
SMALL_ROWS = EngineShape(order=ROWS, num_layers=2)
PAGES = EngineShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCase:
    """Case: shapes of a prefill and a decode engine; the baseline is two of the latter."""

    name: str
    theirs: EngineShape
    ours: EngineShape


def _of_the_cpu(tokens_per_block: int) -> EngineShape:
    return EngineShape(order=HND, packs_keys=True, tokens_per_block=tokens_per_block)


def _nhd(tokens_per_block: int) -> EngineShape:
    return EngineShape(tokens_per_block=tokens_per_block)


SHAPE_CASES = (
    ShapeCase(
        name="TP 2 -> 1, HND",
        theirs=EngineShape(order=HND, tp_size=2),
        ours=EngineShape(order=HND),
    ),
    ShapeCase(name="TP 2 -> 1, NHD", theirs=EngineShape(tp_size=2), ours=EngineShape()),
    ShapeCase(name="blocks of 128 -> 64 tokens, NHD", theirs=_nhd(128), ours=_nhd(64)),
    ShapeCase(name="blocks of 64 -> 128 tokens, NHD", theirs=_nhd(64), ours=_nhd(128)),
    ShapeCase(
        name="blocks of 128 -> 64 tokens, keys by dimensions",
        theirs=_of_the_cpu(128),
        ours=_of_the_cpu(64),
    ),
    ShapeCase(
        name="blocks of 64 -> 128 tokens, keys by dimensions",
        theirs=_of_the_cpu(64),
        ours=_of_the_cpu(128),
    ),
)


def measure_moves(*, rounds: int) -> list[BenchRow]:
    """Measure fetches of all blocks of an engine in another process.

    Raises:
        RuntimeError: Blocks did not arrive, or the other process failed.
    """
    return asyncio.run(_measure(rounds))


async def _measure(rounds: int) -> list[BenchRow]:
    with FarProcess(commands=Prefill) as far:
        decode = Decode(far)
        rows = []
        for shape in (LARGE_ROWS, SMALL_ROWS, PAGES):
            rows += await _against_raw(decode, shape, rounds)
        rows += await _rows_against_pages(decode, rounds)
        rows += await _one_block(decode, rounds)
        for case in SHAPE_CASES:
            rows.append(await _shapes(decode, case, rounds))
    return rows


async def _against_raw(decode: Decode, shape: EngineShape, rounds: int) -> list[BenchRow]:
    """Compare fetches with NIXL reading the same fragments."""
    rows = []
    async with decode.raw(shape) as raw:
        baseline = raw.moving("READ", fragment_bytes=shape.page_bytes)
        for grade in GRADES:
            async with decode.fetching(shape, shape, integrity=grade) as fetch:
                times = await in_turn([fetch, baseline], rounds=rounds)
            case = f"fetch {_size(shape)}, {grade}, against NIXL READ of them"
            goal = ROW_GOAL if shape.order == ROWS else ""
            rows.append(_row(case, *times, goal=goal))
    return rows


async def _rows_against_pages(decode: Decode, rounds: int) -> list[BenchRow]:
    """Compare the same bytes in a row for each block and in a page for each layer."""
    rows, case = [], f"{_size(LARGE_ROWS)}, against {_size(PAGES)}"
    for grade in GRADES:
        async with (
            decode.fetching(LARGE_ROWS, LARGE_ROWS, integrity=grade) as whole,
            decode.fetching(PAGES, PAGES, integrity=grade) as paged,
        ):
            times = await in_turn([whole, paged], rounds=rounds)
        rows.append(_row(f"fetch {case}, {grade}", *times))
    async with decode.raw(LARGE_ROWS) as raw:
        reads = [raw.moving("READ", fragment_bytes=each.page_bytes) for each in (LARGE_ROWS, PAGES)]
        times = await in_turn(reads, rounds=rounds)
    rows.append(_row(f"NIXL READ, {case}", *times))
    return rows


async def _one_block(decode: Decode, rounds: int) -> list[BenchRow]:
    """Measure what a fetch costs beside its bytes."""
    rows, shape = [], LARGE_ROWS
    async with decode.raw(shape) as raw:
        baseline = raw.moving("READ", num_blocks=1)
        for grade in GRADES:
            tokens = shape.tokens_per_block
            async with decode.fetching(shape, shape, integrity=grade, num_tokens=tokens) as fetch:
                ours, theirs = await in_turn([fetch, baseline], rounds=rounds)
            case = f"fetch one block of {shape.block_bytes // KIB} KiB, {grade}, against NIXL READ"
            rows.append(compare(case, ours, theirs, unit="us", of_time=True))
    return rows


async def _shapes(decode: Decode, case: ShapeCase, rounds: int) -> BenchRow:
    async with (
        decode.fetching(case.theirs, case.ours) as fetch,
        decode.fetching(case.ours, case.ours) as baseline,
    ):
        times = await in_turn([fetch, baseline], rounds=rounds)
    return _row(f"fetch, {case.name}, full, against equal engines", *times, goal=SHAPE_GOAL)


def _size(shape: EngineShape) -> str:
    """Number and size of the pieces that an engine's blocks lie in, in words."""
    what = "rows" if shape.order == ROWS else "pages"
    return f"{NUM_BYTES // shape.page_bytes} {what} of {shape.page_bytes // KIB} KiB"


_row = partial(compare, unit="ns/B", scale=1e9 / NUM_BYTES)
