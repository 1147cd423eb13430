"""Benchmark of blocks at a peer, against NIXL itself, plain sockets, UCX over TCP, and kvcr."""

import asyncio
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

from kvxfer.bench.nixl_far import FarProcess
from kvxfer.bench.nixl_near import Contender, Near, in_turn
from kvxfer.bench.nixl_raw import TOTAL_BYTES
from kvxfer.bench.report import Row, compare

KIB = 1 << 10
BLOCK_BYTES = 2048 * KIB
RAW_GOALS = {BLOCK_BYTES: 0.95, 128 * KIB: 0.9}
LATENCY_GOAL = 1.3
SOCKET_GOAL = 0.8
UCX_GOAL = 1.0
KVCR_GOAL = 1.0
LAG_LIMIT_S = 5e-3
IDLE_LIMIT_CORES = 0.05

NUM_SINGLES = 20
TICK_S = 0.5e-3
IDLE_S = 2.0

MODELS = {
    "Llama-3.1-8B": (32 * KIB, 64),
    "Llama-3.2-1B": (16 * KIB, 32),
    "Qwen2.5-1.5B": (8 * KIB, 56),
}
"""Bytes of a page, and pages of a block: keys and values of every layer."""


def run(*, quick: bool) -> list[Row]:
    """Measure loads from and stores to another process, in batches of 64 MiB.

    Rows against kvcr are left out, with a note, where it is not installed.

    Raises:
        RuntimeError: A block did not arrive, or the other process failed.
    """
    return asyncio.run(_run(3 if quick else 15))


async def _run(rounds: int) -> list[Row]:
    rows: list[Row] = []
    with FarProcess() as far:
        for block_bytes, goal in RAW_GOALS.items():
            near = Near(far, block_bytes)
            async with near.holding():
                rows += await _against_raw(near, f">= {goal}", rounds)
        near = Near(far, BLOCK_BYTES)
        async with near.holding():
            rows += await _staged(near, rounds)
            rows += await _one_block(near, rounds)
            rows += await _disturbance(near, rounds)
            rows += await _against_sockets(near, rounds)
            rows += await _against_kvcr(near, rounds)
        for model, (page_bytes, num_pages) in MODELS.items():
            near = Near(far, page_bytes * num_pages)
            async with near.holding():
                rows += await _across_layers(near, model, page_bytes, rounds)
    return rows


async def _against_raw(near: Near, goal: str, rounds: int) -> list[Row]:
    """Compare whole batches with NIXL reading the same bytes on the side that reads."""
    async with near.raw() as raw, near.backend() as backend:
        cases = (
            (f"load {near.size}", near.loading(backend)),
            (f"load {near.size}, without a lookup,", near.loading(backend, looked_up=False)),
            (f"store {near.size}", near.storing(backend)),
        )
        return [
            _row(
                f"{case} against NIXL READ",
                *await in_turn([contender, raw.moving("READ")], rounds=rounds),
                goal=goal,
            )
            for case, contender in cases
        ]


async def _staged(near: Near, rounds: int) -> list[Row]:
    """Compare memory that was not attached, and needs staging buffers, with attached memory."""
    async with near.backend() as attached, near.backend(attached=False) as staged:
        return [
            _row(
                f"{name} {near.size}, memory not attached, against attached",
                *await in_turn([make(staged), make(attached)], rounds=rounds),
            )
            for name, make in (("load", near.loading), ("store", near.storing))
        ]


async def _one_block(near: Near, rounds: int) -> list[Row]:
    """Measure the median latency of single blocks."""
    rows = []
    async with near.raw() as raw, near.backend() as backend:
        for looked_up, how in ((True, ""), (False, ", without a lookup")):
            load = near.loading(backend, near.blocks.select(0, 1), looked_up=looked_up)
            case = f"load one block of 2048 KiB{how}, against NIXL READ"
            contenders = [load, raw.moving("READ", num_blocks=1)]
            rows.append(await _compare_singles(case, contenders, rounds))
    return rows


async def _compare_singles(case: str, contenders: Sequence[Contender], rounds: int) -> Row:
    times = await in_turn([_median(each) for each in contenders], rounds=rounds)
    return compare(case, *times, unit="us", goal=f"<= {LATENCY_GOAL}", scale=1e6)


def _median(contender: Contender) -> Contender:
    async def median() -> float:
        return statistics.median([await contender() for _ in range(NUM_SINGLES)])

    return median


async def _disturbance(near: Near, rounds: int) -> list[Row]:
    """Measure the event loop's lag during batches, and the processor time of an idle backend."""
    async with near.backend() as backend:
        cases = {"load": near.loading(backend), "store": near.storing(backend)}
        rows = []
        for name, move in cases.items():
            (lags,) = await in_turn([partial(_longest_lag, move)], rounds=rounds)
            case = f"longest lag of the event loop in a {name} of {near.size}, against 5 ms"
            limits = [LAG_LIMIT_S] * rounds
            rows.append(compare(case, lags, limits, unit="ms", goal="<= 1.0", scale=1e3))
        near_began, far_began = time.process_time(), await near.far_cpu_seconds()
        await asyncio.sleep(IDLE_S)
        near_s, far_s = time.process_time() - near_began, await near.far_cpu_seconds() - far_began
    idle = ("an idle backend with one peer", near_s), ("an idle holder with one peer", far_s)
    for who, seconds in idle:
        case = f"processor time of {who}, against 0.05 cores"
        cores, limit = [seconds / IDLE_S], [IDLE_LIMIT_CORES]
        rows.append(compare(case, cores, limit, unit="cores", goal="<= 1.0"))
    return rows


async def _longest_lag(move: Contender) -> float:
    moving = asyncio.ensure_future(move())
    longest = 0.0
    while not moving.done():
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        longest = max(longest, time.perf_counter() - began - TICK_S)
    await moving
    return longest


async def _against_sockets(near: Near, rounds: int) -> list[Row]:
    """Compare blocks through sockets with one plain connection and with UCX over TCP."""
    rows = []
    async with (
        near.backend(transport="socket") as backend,
        near.plain() as (plain_load, plain_store),
        near.over_tcp() as ucx,
    ):
        for name, contenders, operation in (
            ("load", [near.loading(backend), plain_load, ucx["READ"]], "READ"),
            ("store", [near.storing(backend), plain_store, ucx["WRITE"]], "WRITE"),
        ):
            ours, plain, by_ucx = await in_turn(contenders, rounds=rounds)
            case = f"{name} {near.size} through sockets, against"
            goal = f">= {SOCKET_GOAL}"
            rows.append(_row(f"{case} one plain connection", ours, plain, goal=goal))
            ucx_case = f"{case} NIXL {operation} over TCP"
            rows.append(_row(ucx_case, ours, by_ucx, goal=f">= {UCX_GOAL}"))
    return rows


async def _against_kvcr(near: Near, rounds: int) -> list[Row]:
    """Compare with kvcr, which copies within one process and without checksums."""
    if not importlib.util.find_spec("kvcr"):
        sys.stderr.write("kvcr is not installed: its rows are left out\n")
        return []
    rows = []
    async with (
        near.kvcr() as kvcr,
        near.backend() as backend,
    ):
        for case, contenders in (
            (f"load {near.size} against kvcr's deliver", [near.loading(backend), kvcr.deliver]),
            (f"store {near.size} against kvcr's deposit", [near.storing(backend), kvcr.deposit]),
        ):
            times = await in_turn(contenders, rounds=rounds)
            rows.append(_row(case, *times, goal=f">= {KVCR_GOAL}"))
    return rows


async def _across_layers(near: Near, model: str, page_bytes: int, rounds: int) -> list[Row]:
    """Compare blocks in one piece with blocks in a page for each layer."""
    pages = near.described(page_bytes)
    counts = f"{len(near.blocks)} pieces against {len(pages)} pages of {page_bytes // KIB} KiB"
    async with (
        near.backend() as backend,
        near.raw() as raw,
    ):
        pairs = (
            ("load", [near.loading(backend), near.loading(backend, pages)]),
            ("NIXL READ", [raw.moving("READ"), raw.moving("READ", fragment_bytes=page_bytes)]),
        )
        return [
            _row(f"{name}, {model}, {counts}", *await in_turn(contenders, rounds=rounds))
            for name, contenders in pairs
        ]


def _row(case: str, ours: Sequence[float], theirs: Sequence[float], *, goal: str = "") -> Row:
    return compare(case, ours, theirs, unit="ns/B", goal=goal, scale=1e9 / TOTAL_BYTES)
