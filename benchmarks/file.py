"""Benchmark of files on a disk, against fio, vLLM's own file tier, and one call per block."""

import asyncio
import functools
import mmap
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import aiofiles
import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.batches import describe, make_keys, make_namespace, require_done
from benchmarks.disk import (
    bench_folder,
    block_path,
    drop_from_cache,
    empty_files,
    make_folders,
    settle,
)
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.file import FileBackend, FileConfig, Integrity
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.units import ByteSize

NUM_BLOCKS = 1024
NUM_BATCHES = 16
NUM_THREADS = 16
KIB = 1 << 10

FIO_GOALS = {256 * KIB: 0.7, 2048 * KIB: 0.9}
ONE_BATCH_GOALS = {64 * KIB: 1.3, 2048 * KIB: 1.0}
MANY_BATCHES_GOAL = 1.0
AIOFILES_GOAL = 3.0

INDEX_BLOCKS = 100_000
INDEX_GOAL_S = 10.0
INDEX_ROUNDS = 5


def run(*, quick: bool) -> list[BenchRow]:
    """Measure stores and loads of blocks in files, with checksums, and the index built at a start.

    All contenders take turns in one folder, named by the environment variable `KVXFER_BENCH_DIR`
    (`build/bench` by default), past the page cache where the file system allows it. Rows against
    fio are left out, with a note, where fio is not installed.
    """
    rows: list[BenchRow] = []
    with bench_folder("file") as folder:
        for block_bytes in (64 * KIB, 256 * KIB, 2048 * KIB):
            num_blocks = min(NUM_BLOCKS, (256 << 20) // block_bytes) if quick else NUM_BLOCKS
            rows += _Bench(folder, block_bytes, num_blocks).run(rounds=2 if quick else 5)
        rows.append(_measure_index(folder / "index", INDEX_BLOCKS // (10 if quick else 1)))
    return rows


class _Bench:
    """Contenders for blocks of one size, contiguous and page-aligned as in a host pool."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._total = block_bytes * num_blocks
        self._memory = np.frombuffer(mmap.mmap(-1, self._total), np.uint8)
        words = self._memory.view(np.uint64)
        words[:] = np.random.default_rng(block_bytes).integers(0, 1 << 63, len(words), np.uint64)
        self._nth = count()
        self._secret_file = folder / "secret"
        self._secret_file.touch(0o600)
        self._secret_file.write_bytes(bytes(32))

    def run(self, rounds: int) -> list[BenchRow]:
        """Run the contenders in turns, one round uncounted, and compare them."""
        contenders = self._contenders()
        seconds: dict[str, tuple[list[float], list[float]]] = {n: ([], []) for n in contenders}
        rng = random.Random(self._block_bytes)
        for nth in range(rounds + 1):
            # In another order each time, so that one's unwritten data burdens not always the same.
            for name in rng.sample(list(contenders), len(contenders)):
                stored, loaded = contenders[name]()
                if nth:
                    seconds[name][0].append(stored)
                    seconds[name][1].append(loaded)
        return self._rows(seconds)

    def _contenders(self) -> dict[str, Callable[[], tuple[float, float]]]:
        contenders = {
            "kvxfer": lambda: asyncio.run(self._kvxfer(1)),
            "kvxfer, no checksums": lambda: asyncio.run(self._kvxfer(1, Integrity.OFF)),
            "kvxfer, keyed": lambda: asyncio.run(self._kvxfer(1, Integrity.KEYED)),
            "kvxfer, sealed": lambda: asyncio.run(self._kvxfer(1, Integrity.SEALED)),
        }
        if self._block_bytes in FIO_GOALS:
            if shutil.which("fio"):
                contenders["fio"] = self._fio
            else:
                sys.stderr.write("fio is not installed: its rows are left out\n")
        if self._block_bytes in ONE_BATCH_GOALS:
            contenders["kvxfer, batches"] = lambda: asyncio.run(self._kvxfer(NUM_BATCHES))
            contenders["vLLM"] = lambda: self._vllm(1)
            contenders["vLLM, batches"] = lambda: self._vllm(NUM_BATCHES)
        if self._block_bytes == 64 * KIB:
            contenders["aiofiles"] = lambda: asyncio.run(self._aiofiles())
        return contenders

    def _rows(self, seconds: Mapping[str, tuple[list[float], list[float]]]) -> list[BenchRow]:
        size = f"{self._block_bytes // KIB} KiB"
        blocks, per_batch = f"{self._num_blocks} x {size}", self._num_blocks // NUM_BATCHES
        many = f"{NUM_BATCHES} batches of {per_batch} x {size}"
        one_goal, fio_goal = (each.get(self._block_bytes) for each in (ONE_BATCH_GOALS, FIO_GOALS))
        plain = "kvxfer, no checksums"
        comparisons: list[tuple[str, str, str, float | None]] = [
            ("kvxfer", plain, f"{blocks}, with checksums against without", None),
            ("kvxfer, keyed", "kvxfer", f"{blocks}, keyed against fast", None),
            ("kvxfer, sealed", "kvxfer", f"{blocks}, sealed against fast", None),
            ("kvxfer", "fio", f"{size} against fio", fio_goal),
            ("kvxfer", "vLLM", f"one batch of {blocks} against vLLM", one_goal),
            ("kvxfer, batches", "vLLM, batches", f"{many} against vLLM", MANY_BATCHES_GOAL),
            ("kvxfer", "aiofiles", f"{blocks} against a call of aiofiles per block", AIOFILES_GOAL),
        ]
        return [
            compare(
                f"{direction} {case}",
                seconds[ours][which],
                seconds[theirs][which],
                unit="ns/B",
                goal=f">= {goal}" if goal else "",
                scale=1e9 / self._total,
            )
            for ours, theirs, case, goal in comparisons
            if theirs in seconds
            for which, direction in enumerate(("store", "load"))
        ]

    async def _kvxfer(
        self, num_batches: int, integrity: Integrity = Integrity.FAST
    ) -> tuple[float, float]:
        keys = make_keys(self._num_blocks)
        namespace = make_namespace(self._block_bytes, model=f"bench-{integrity.value}")
        # A new folder, or the backend would still be indexing the files of all earlier rounds.
        config = self._config(integrity)
        per_batch = self._num_blocks // num_batches
        batches = [
            (keys[start : start + per_batch], self._describe(start, start + per_batch))
            for start in range(0, self._num_blocks, per_batch)
        ]
        async with FileBackend(config, namespace) as backend:
            # As in an engine that has run for a while: folders exist, threads are started.
            make_folders(Path(config.path, namespace.fingerprint))
            warm = make_keys(NUM_THREADS)
            for move in (backend.store, backend.load):
                each = (move([key], self._describe(n, n + 1)) for n, key in enumerate(warm))
                await asyncio.gather(*each)
            empty_files(block_path(config, namespace, key) for key in warm)
            settle()
            seconds = []
            for move in (backend.store, backend.load):
                began = time.perf_counter()
                outcomes = await asyncio.gather(*(move(*batch) for batch in batches))
                seconds.append(time.perf_counter() - began)
                require_done([outcome for batch in outcomes for outcome in batch])
        empty_files(block_path(config, namespace, key) for key in keys)
        return seconds[0], seconds[1]

    def _vllm(self, num_batches: int) -> tuple[float, float]:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
        from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

        root = self._folder / f"vllm {self._block_bytes} {next(self._nth)}"  # new, as ours
        paths = [root / key[:1].hex() / f"{key.hex()}.bin" for key in make_keys(self._num_blocks)]
        make_folders(root)
        view, per_batch = self._memory.data, self._num_blocks // num_batches
        pool = DualQueueThreadPool(NUM_THREADS, NUM_THREADS, thread_name_prefix="bench")
        for job in range(2 * NUM_THREADS):  # starts its threads, as for kvxfer
            pool.enqueue_load(job, 1, [lambda: None])
        pool.wait_idle()
        pool.get_finished()
        settle()
        seconds = []
        try:
            for move, enqueue in (
                (batch_store_block, pool.enqueue_store),
                (batch_load_block, pool.enqueue_load),
            ):
                began = time.perf_counter()
                for job, start in enumerate(range(0, self._num_blocks, per_batch)):
                    offsets = [
                        block * self._block_bytes for block in range(start, start + per_batch)
                    ]
                    some = [str(path) for path in paths[start : start + per_batch]]
                    task = functools.partial(move, some, view, offsets, self._block_bytes, True)
                    enqueue(job, 1, [task])
                pool.wait_idle()
                seconds.append(time.perf_counter() - began)
                if not all(success for _, success, _ in pool.get_finished()):
                    raise RuntimeError("vLLM's file tier failed")
        finally:
            pool.shutdown(wait=True)
        empty_files(paths)
        return seconds[0], seconds[1]

    def _fio(self) -> tuple[float, float]:
        folder = self._folder / "fio"
        folder.mkdir(exist_ok=True)
        settle()
        size, total = self._block_bytes, self._total
        stored = _fio_seconds(folder, direction="write", block_bytes=size, total_bytes=total)
        loaded = _fio_seconds(folder, direction="read", block_bytes=size, total_bytes=total)
        empty_files(folder.iterdir())
        return stored, loaded

    async def _aiofiles(self) -> tuple[float, float]:
        """Measure the obvious code: per block a file opened, written or read, and closed."""
        folder = self._folder / "aiofiles"
        folder.mkdir(exist_ok=True)
        paths = [folder / key.hex() for key in make_keys(self._num_blocks)]
        rows = self._memory.reshape(self._num_blocks, self._block_bytes)

        async def store(path: Path, row: NDArray[np.uint8]) -> None:
            async with aiofiles.open(path, "wb") as file:
                await file.write(row.data)

        async def load(path: Path, row: NDArray[np.uint8]) -> None:
            async with aiofiles.open(path, "rb") as file:
                row[:] = np.frombuffer(await file.read(), np.uint8)

        settle()
        seconds = []
        for move in (store, load):
            began = time.perf_counter()
            await asyncio.gather(*(move(*each) for each in zip(paths, rows, strict=True)))
            seconds.append(time.perf_counter() - began)
            for path in paths:
                drop_from_cache(path)
        empty_files(paths)
        return seconds[0], seconds[1]

    def _config(self, integrity: Integrity = Integrity.FAST) -> FileConfig:
        return FileConfig(
            path=str(self._folder / f"kvxfer {self._block_bytes} {next(self._nth)}"),
            capacity=ByteSize(1 << 40),  # the benchmark empties the files itself
            integrity=integrity,
            secret_file=str(self._secret_file) if integrity.needs_secret else "",
            read_threads=NUM_THREADS,
            write_threads=NUM_THREADS,
        )

    def _describe(self, start: int, stop: int) -> Descriptors:
        address, places = self._memory.ctypes.data, range(start, stop)
        return describe(address, self._block_bytes, places, owner=self._memory)


def _fio_seconds(folder: Path, *, direction: str, block_bytes: int, total_bytes: int) -> float:
    """Time the better of one file at depth 16 and 16 jobs with a file each; io_uring, O_DIRECT.

    The files of a read are written first, which does not count.
    """
    rates: list[int] = []
    for num_jobs, depth in ((1, 16), (16, 1)):
        command = [
            "fio",
            f"--name=kvxfer-{num_jobs}",
            f"--directory={folder}",
            f"--rw={direction}",
            f"--bs={block_bytes}",
            f"--size={total_bytes // num_jobs}",
            f"--numjobs={num_jobs}",
            f"--iodepth={depth}",
            "--ioengine=io_uring",
            "--direct=1",
            "--group_reporting",
            "--output-format=json",
        ]
        printed = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603 - of this machine
        (job,) = msgspec.json.decode(printed[printed.index(b"{") :])["jobs"]
        rates.append(job[direction]["bw_bytes"])
    return total_bytes / max(rates)


def _measure_index(root: Path, num_blocks: int) -> BenchRow:
    """Measure the rebuild of a backend's index, with every inode in the page cache."""
    namespace = make_namespace(64 * KIB)
    config = FileConfig(path=str(root), capacity=ByteSize(1 << 40))
    make_folders(root / namespace.fingerprint)
    for key in make_keys(num_blocks):
        block_path(config, namespace, key).touch(mode=0o600)

    async def rebuild() -> None:
        async with FileBackend(config, namespace):
            pass  # closing waits until the index is complete

    (rebuilt,) = time_in_turn([lambda: asyncio.run(rebuild())], rounds=INDEX_ROUNDS)
    limit_s = INDEX_GOAL_S * num_blocks / INDEX_BLOCKS
    case = f"index of {num_blocks} blocks rebuilt, against {limit_s:g} s"
    return compare(case, rebuilt, limit_s, unit="s", goal="<= 1.0")
