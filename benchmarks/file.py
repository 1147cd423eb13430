"""Benchmark of files on a disk, against fio, vLLM's own file tier, and one call per block."""

import asyncio
import contextlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiofiles
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.batches import KIB, Batch, bench_folder, make_keys, make_namespace, make_secret
from benchmarks.report import BenchRow, compare, time_in_turn
from kvxfer.backends.file import FileBackend, FileConfig, Integrity
from kvxfer.units import ByteSize

NUM_BLOCKS = 1024
NUM_BATCHES = 16
NUM_THREADS = 16

SMALL, MEDIUM, LARGE = SIZES = 64 * KIB, 256 * KIB, 2048 * KIB
NO_GOALS = dict.fromkeys(SIZES, "")
COMPARISONS: tuple[tuple[str, str, str, dict[int, str]], ...] = (
    ("kvxfer", "no checksums", "{blocks}, with checksums against without", NO_GOALS),
    ("keyed", "kvxfer", "{blocks}, keyed against fast", NO_GOALS),
    ("sealed", "kvxfer", "{blocks}, sealed against fast", NO_GOALS),
    ("kvxfer", "fio", "{size} against fio", {MEDIUM: ">= 0.7", LARGE: ">= 0.9"}),
    ("kvxfer", "vLLM", "one batch of {blocks} against vLLM", {SMALL: ">= 1.3", LARGE: ">= 1.0"}),
    ("batches", "vLLM, batches", "{many} against vLLM", {SMALL: ">= 1.0", LARGE: ">= 1.0"}),
    ("kvxfer", "aiofiles", "{blocks} against a call of aiofiles per block", {SMALL: ">= 3.0"}),
)
"""Contender, baseline, case, and goals by block size; each runs for the sizes in its goals."""

INDEX_BLOCKS = 100_000
CAPACITY = ByteSize(1 << 40)
"""Capacity that evicts nothing: the benchmark empties the files itself."""

Moves = Iterator[Callable[[], float | None]]
"""Store and load of a contender, between unmeasured steps; each call may return its seconds."""


def run(*, quick: bool) -> list[BenchRow]:
    """Measure stores and loads of blocks in files, with checksums, and a rebuild of the index.

    All contenders take turns in one folder, named by the environment variable `KVXFER_BENCH_DIR`
    (`build/bench` by default), and bypass the page cache where the file system allows it. If fio
    is not installed, its rows are left out with a note.
    """
    rows: list[BenchRow] = []
    with bench_folder("file") as folder, asyncio.Runner() as runner:
        for block_bytes in SIZES:
            num_blocks = min(NUM_BLOCKS, (256 << 20) // block_bytes) if quick else NUM_BLOCKS
            rows += _Bench(folder, runner, block_bytes, num_blocks).run(rounds=2 if quick else 5)
        rows.append(_measure_index(folder / "index", INDEX_BLOCKS // (10 if quick else 1)))
    return rows


class _Bench:
    """Contenders for blocks of one size, contiguous and page-aligned as in a host pool."""

    def __init__(
        self, folder: Path, runner: asyncio.Runner, block_bytes: int, num_blocks: int
    ) -> None:
        self._folder, self._runner = folder, runner
        self._block_bytes, self._num_blocks = block_bytes, num_blocks
        self._total = block_bytes * num_blocks
        self._memory = np.frombuffer(mmap.mmap(-1, self._total), np.uint8)
        words = self._memory.view(np.uint64)
        words[:] = np.random.default_rng(block_bytes).integers(0, 1 << 63, len(words), np.uint64)
        self._nth = count()
        self._secret_file = make_secret(folder)

    def run(self, rounds: int) -> list[BenchRow]:
        """Run the contenders in turns, one round uncounted, and compare them."""
        compared = [each for each in COMPARISONS if self._block_bytes in each[-1]]
        if not shutil.which("fio"):
            sys.stderr.write("fio is not installed: its rows are left out\n")
            compared = [each for each in compared if each[1] != "fio"]
        seconds: dict[str, list[list[float]]] = {n: [] for each in compared for n in each[:2]}
        contenders, rng = self._contenders(), random.Random(self._block_bytes)
        for nth in range(rounds + 1):
            # Shuffled each round: unwritten data of one should not always slow the same other one.
            for name in rng.sample(sorted(seconds), len(seconds)):
                taken = _time(contenders[name]())
                if nth:
                    seconds[name].append(taken)
        size = f"{self._block_bytes // KIB} KiB"
        many = f"{NUM_BATCHES} batches of {self._num_blocks // NUM_BATCHES} x {size}"
        words = {"size": size, "blocks": f"{self._num_blocks} x {size}", "many": many}
        return [
            compare(
                f"{direction} {case.format(**words)}",
                *([each[which] for each in seconds[name]] for name in (ours, theirs)),
                unit="ns/B",
                goal=goals[self._block_bytes],
                per=self._total,
            )
            for ours, theirs, case, goals in compared
            for which, direction in enumerate(("store", "load"))
        ]

    def _contenders(self) -> dict[str, Callable[[], Moves]]:
        return {
            "kvxfer": self._kvxfer,
            "batches": partial(self._kvxfer, NUM_BATCHES),
            "no checksums": partial(self._kvxfer, integrity=Integrity.OFF),
            "keyed": partial(self._kvxfer, integrity=Integrity.KEYED),
            "sealed": partial(self._kvxfer, integrity=Integrity.SEALED),
            "vLLM": self._vllm,
            "vLLM, batches": partial(self._vllm, NUM_BATCHES),
            "fio": self._fio,
            "aiofiles": self._aiofiles,
        }

    def _new_folder(self, name: str) -> Path:
        """Name a new folder for this round, since one that was filled before fills faster."""
        return self._folder / f"{name} {self._block_bytes} {next(self._nth)}"

    def _kvxfer(self, num_batches: int = 1, *, integrity: Integrity = Integrity.FAST) -> Moves:
        root = self._new_folder("kvxfer")
        namespace = make_namespace(self._block_bytes, model=f"bench-{integrity.value}")
        config = FileConfig(
            path=str(root),
            capacity=CAPACITY,
            integrity=integrity,
            secret_file=self._secret_file if integrity.needs_secret else "",
            read_threads=NUM_THREADS,
            write_threads=NUM_THREADS,
        )
        backend = FileBackend(config, namespace)
        make_batch = partial(Batch, self._runner, backend, self._block_bytes)
        memory = torch.from_numpy(self._memory)
        self._runner.run(backend.start())
        with contextlib.closing(make_batch(memory, memory, num_batches=num_batches)) as batch:
            # As in an engine that has run for a while: folders exist, threads are started.
            make_folders(root / namespace.fingerprint)
            some = memory[: NUM_THREADS * self._block_bytes]
            warm = make_batch(some, some, num_batches=NUM_THREADS)
            warm.store()
            warm.load()
            empty_files(root.rglob("*.safetensors"))
            yield batch.store
            yield batch.load
        empty_files(root.rglob("*.safetensors"))

    def _vllm(self, num_batches: int = 1) -> Moves:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
        from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

        root, size = self._new_folder("vllm"), self._block_bytes
        paths = [root / key[:1].hex() / f"{key.hex()}.bin" for key in make_keys(self._num_blocks)]
        make_folders(root)
        view, per_batch = self._memory.data, self._num_blocks // num_batches
        pool = DualQueueThreadPool(NUM_THREADS, NUM_THREADS, thread_name_prefix="bench")
        for job in range(2 * NUM_THREADS):  # starts its threads, as for kvxfer
            pool.enqueue_load(job, 1, [lambda: None])
        pool.wait_idle()
        pool.get_finished()

        def move(call: Callable[..., Any], enqueue: Callable[..., Any]) -> None:
            for job, start in enumerate(range(0, self._num_blocks, per_batch)):
                offsets = [block * size for block in range(start, start + per_batch)]
                some = [str(path) for path in paths[start : start + per_batch]]
                enqueue(job, 1, [partial(call, some, view, offsets, size, True)])
            pool.wait_idle()
            if not all(success for _, success, _ in pool.get_finished()):
                raise RuntimeError("vLLM's file tier failed")

        try:
            yield partial(move, batch_store_block, pool.enqueue_store)
            yield partial(move, batch_load_block, pool.enqueue_load)
        finally:
            pool.shutdown(wait=True)
        empty_files(paths)

    def _fio(self) -> Moves:
        folder = self._folder / "fio"
        folder.mkdir(exist_ok=True)
        for direction in ("write", "read"):
            yield partial(_fio_seconds, folder, direction, self._block_bytes, self._total)
        empty_files(folder.iterdir())

    def _aiofiles(self) -> Moves:
        """Yield the obvious code: for each block, open a file, write or read it, and close it."""
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

        async def move_all(move: Callable[..., Any]) -> None:
            await asyncio.gather(*map(move, paths, rows))

        for move in (store, load):
            yield partial(self._runner.run, move_all(move))
            for path in paths:
                drop_from_cache(path)
        empty_files(paths)


def _time(moves: Moves) -> list[float]:
    """Measure the seconds of a store and a load, once the data of the last contender is written."""
    seconds: list[float] = []
    for move in moves:
        if not seconds:
            os.sync()
            time.sleep(0.5)
        began = time.perf_counter()
        returned = move()
        seconds.append(time.perf_counter() - began if returned is None else returned)
    return seconds


def make_folders(parent: Path) -> None:
    """Make all folders for block files."""
    for byte in range(256):
        (parent / f"{byte:02x}").mkdir(mode=0o700, parents=True, exist_ok=True)


def empty_files(paths: Iterable[Path]) -> None:
    """Truncate files instead of removing them.

    Without a journal, ext4 searches past every inode freed in the last minutes when it creates a
    file, which would slow the next contender.
    """
    for path in paths:
        os.truncate(path, 0)


def drop_from_cache(path: Path) -> None:
    """Sync a file, and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fio_seconds(folder: Path, direction: str, block_bytes: int, total_bytes: int) -> float:
    """Time fio (io_uring, O_DIRECT): the faster of one job at depth 16 and 16 jobs, a file each.

    fio first writes the files that it reads, which does not count.
    """
    rates: list[int] = []
    for num_jobs, depth in ((1, 16), (16, 1)):
        options = f"--name=kvxfer-{num_jobs} --rw={direction} --bs={block_bytes} --direct=1"
        options += f" --size={total_bytes // num_jobs} --numjobs={num_jobs} --iodepth={depth}"
        options += " --ioengine=io_uring --group_reporting --output-format=json"
        command = ["fio", f"--directory={folder}", *options.split()]
        printed = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603 - of this machine
        (job,) = msgspec.json.decode(printed[printed.index(b"{") :])["jobs"]
        rates.append(job[direction]["bw_bytes"])
    return total_bytes / max(rates)


def _measure_index(root: Path, num_blocks: int) -> BenchRow:
    """Measure the rebuild of a backend's index, with every inode cached."""
    namespace = make_namespace(64 * KIB)
    config = FileConfig(path=str(root), capacity=CAPACITY)
    folder = root / namespace.fingerprint
    make_folders(folder)
    for name in (key.hex() for key in make_keys(num_blocks)):
        (folder / name[:2] / f"{name}.safetensors").touch(mode=0o600)

    async def rebuild() -> None:
        async with FileBackend(config, namespace):
            pass  # closing waits until the index is complete

    (rebuilt,) = time_in_turn([lambda: asyncio.run(rebuild())], rounds=5)
    limit_s = 10.0 * num_blocks / INDEX_BLOCKS
    case = f"index of {num_blocks} blocks rebuilt, against {limit_s:g} s"
    return compare(case, rebuilt, limit_s, unit="s", goal="<= 1.0")
