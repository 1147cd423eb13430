"""Benchmark of blocks at a peer, against NIXL itself, plain sockets, and UCX over TCP."""

import asyncio
import statistics
import time
from functools import partial
from typing import get_args

from benchmarks.batches import KIB
from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.near import Near
from benchmarks.nixl.raw import TOTAL_BYTES
from benchmarks.report import BenchRow, Contender, beyond, compare, contend
from kvxfer.backends.nixl import IntegrityGrade

BLOCK_BYTES = 2048 * KIB
GRADES: tuple[IntegrityGrade, ...] = get_args(IntegrityGrade)
LOAD_GOALS = {
    BLOCK_BYTES: {"full": ">= 0.7", "fenced": ">= 0.9"},
    128 * KIB: {"full": ">= 0.7", "fenced": ">= 0.85"},
}
STORE_GOAL = ">= 0.65"
PAGES_GOALS = {("full", 32 * KIB): ">= 0.6", ("fenced", 32 * KIB): ">= 0.85"}

NUM_SINGLES = 20
IDLE_S = 2.0

MODELS = {
    "Llama-3.1-8B": (32 * KIB, 64),
    "Llama-3.2-1B": (16 * KIB, 32),
    "Qwen2.5-1.5B": (8 * KIB, 56),
}
"""Bytes of a page, and pages of a block: keys and values of every layer."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure loads from and stores to another process, in batches of 64 MiB.

    Raises:
        RuntimeError: A block did not arrive, or the other process failed.
    """
    return asyncio.run(_run(3 if quick else 15))


async def _run(rounds: int) -> list[BenchRow]:
    rows: list[BenchRow] = []
    with FarProcess() as far:
        for block_bytes in LOAD_GOALS:
            near = Near(far, block_bytes)
            async with near.holding():
                rows += await _against_raw(near, rounds)
        near = Near(far, BLOCK_BYTES)
        async with near.holding():
            rows += await _one_block(near, rounds)
            rows += await _idle(near)
            rows += await _against_sockets(near, rounds)
        for model, (page_bytes, num_pages) in MODELS.items():
            near = Near(far, page_bytes * num_pages)
            async with near.holding():
                rows += await _across_layers(near, model, page_bytes, rounds)
    return rows


async def _against_raw(near: Near, rounds: int) -> list[BenchRow]:
    """Compare whole batches with NIXL READs of the same bytes by the near process."""
    rows = []
    async with near.raw() as raw:
        for grade in GRADES:
            async with near.backend(integrity=grade) as backend:
                for name, contender, goal in (
                    ("load", near.loading(backend), LOAD_GOALS[near.block_bytes][grade]),
                    ("store", near.storing(backend), STORE_GOAL),
                ):
                    case = f"{name}, {near.size}, {grade}, against NIXL READ"
                    times = await contend([contender, raw.moving("READ")], rounds=rounds)
                    rows.append(_row(case, *times, goal=goal))
    return rows


async def _one_block(near: Near, rounds: int) -> list[BenchRow]:
    """Measure the median latency of single blocks, and the part of it that is not NIXL's."""
    rows = []
    async with near.raw() as raw:
        for grade in GRADES:
            async with near.backend(integrity=grade) as backend:
                load = near.loading(backend, near.blocks.select(0, 1))
                contenders = [_median(load), _median(raw.moving("READ", num_blocks=1))]
                ours, theirs = await contend(contenders, rounds=rounds)
            case = f"load one block of 2048 KiB behind a lookup, {grade},"
            against = f"{case} against NIXL READ"
            rows.append(compare(against, ours, theirs, unit="us", goal="<= 3"))
            case = f"{case} beyond NIXL's own, against 0.4 ms"
            longer = beyond(ours, theirs)
            rows.append(compare(case, longer, 0.4e-3, unit="us", goal="<= 1.0"))
    return rows


def _median(contender: Contender) -> Contender:
    async def median() -> float:
        return statistics.median([await contender() for _ in range(NUM_SINGLES)])

    return median


async def _idle(near: Near) -> list[BenchRow]:
    """Measure the processor time of an idle backend, and of its holder."""
    async with near.backend():
        began = time.process_time(), await near.far.ask("cpu_seconds")
        await asyncio.sleep(IDLE_S)
        ended = time.process_time(), await near.far.ask("cpu_seconds")
    rows = []
    for who, *times in zip(("backend", "holder"), began, ended, strict=True):
        case = f"processor time of an idle {who} with one peer, against 0.05 cores"
        cores = [(times[1] - times[0]) / IDLE_S]
        rows.append(compare(case, cores, 0.05, unit="cores", goal="<= 1.0"))
    return rows


async def _against_sockets(near: Near, rounds: int) -> list[BenchRow]:
    """Compare blocks through sockets with one plain connection and with UCX over TCP."""
    rows = []
    async with (
        near.backend(transport="socket") as backend,
        near.plain() as (plain_load, plain_store),
        near.over_tcp() as ucx,
    ):
        for name, contenders, operation in (
            ("load", [near.loading(backend), plain_load, ucx("READ")], "READ"),
            ("store", [near.storing(backend), plain_store, ucx("WRITE")], "WRITE"),
        ):
            ours, plain, by_ucx = await contend(contenders, rounds=rounds)
            case = f"{name} {near.size} through sockets, against"
            rows.append(_row(f"{case} one plain connection", ours, plain, goal=">= 0.85"))
            rows.append(_row(f"{case} NIXL {operation} over TCP", ours, by_ucx, goal=">= 1.0"))
    return rows


async def _across_layers(near: Near, model: str, page_bytes: int, rounds: int) -> list[BenchRow]:
    """Compare blocks in one piece with blocks that have a page for each layer."""
    pages, rows = near.described(page_bytes), []
    counts = f"{len(near.blocks)} pieces against {len(pages)} pages of {page_bytes // KIB} KiB"
    async with near.raw() as raw:
        paged = raw.moving("READ", fragment_bytes=page_bytes)
        for grade in GRADES:
            case = f"load {len(pages)} pages of {page_bytes // KIB} KiB, {grade}, against NIXL READ"
            case, goal = f"{case} of them, {model}", PAGES_GOALS.get((grade, page_bytes), "")
            async with near.backend(integrity=grade) as backend:
                times = await contend([near.loading(backend, pages), paged], rounds=rounds)
            rows.append(_row(case, *times, goal=goal))
        async with near.backend() as backend:
            loads = near.loading(backend), near.loading(backend, pages)
            times = await contend(loads, rounds=rounds)
        rows.append(_row(f"load, {model}, {counts}", *times))
    return rows


_row = partial(compare, unit="ns/B", per=TOTAL_BYTES)
