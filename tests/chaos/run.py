"""`make chaos`: engines over tiers of host memory, files and peers, under random faults.

Workers use engines at random, holders keep blocks for them, and the conductor kills and stops both,
fills disks and flips bits. Every `DONE` block is compared with the bytes of its key, all memory is
watched, and every call must end. The seed decides the operations, the machine their timing.
"""

# ruff: noqa: T201 - it is a command line

import argparse
import contextlib
import heapq
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvxfer.cli import main as kvxfer_main
from tests.chaos import worker
from tests.chaos.disturbances import Disturber, small_disk
from tests.chaos.faults import Kind
from tests.chaos.memory import SHAPES
from tests.chaos.processes import ChaosProcess, Fault
from tests.ports import free_ports

NUM_WORKERS = 4
STEP_S = 0.05
TOLD_EVERY_S = 10.0
DISTURBED_EVERY_S = 0.4
END_S = 180.0
"""Seconds for the end of a run, in which processes end by themselves and all blocks are read."""

HOLDERS = ((0, False), (0, True), (1, True), (2, False))
"""Shape of the blocks of each holder, and whether it keeps them in files, too."""

SHOWN_FAULTS = 20


class Conductor:
    """Chaos run, from its start to its verdict."""

    def __init__(self, seed: int, folder: Path, disk: Path | None) -> None:
        self._rng = random.Random(seed)
        self._numbers = count()
        self._logs = folder / "logs"
        self._logs.mkdir()
        roots = [folder / "files", *([disk / "store"] if disk else [])]
        self._folders = tuple(
            f"file://{root}?capacity={capacity}MiB&min_free=1MiB"
            for root, capacity in zip(roots, (12, 64), strict=False)
        )
        self._ports = [free_ports() for _ in HOLDERS]
        self._holder_files = [folder / f"held-{number}" for number in range(len(HOLDERS))]
        roots += [
            path for path, (_, keeps) in zip(self._holder_files, HOLDERS, strict=True) if keeps
        ]
        for root in roots:
            root.mkdir(mode=0o700)
        workers = [self._start_worker() for _ in range(NUM_WORKERS)]
        holders = [self._start_holder(number) for number in range(len(HOLDERS))]
        self._disturber = Disturber(workers, holders, roots, disk, self._rng)
        self._undone: list[tuple[float, int, Any]] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []

    def run(self, seconds: float) -> None:
        """Disturb for some time, then let all processes end and read all blocks once more."""
        started = time.monotonic()
        told = next_at = started
        while (now := time.monotonic()) < started + seconds:
            if now >= next_at:
                next_at = now + self._rng.expovariate(1 / DISTURBED_EVERY_S)
                if undo := self._disturber.disturb():
                    delay_s, act = undo
                    heapq.heappush(self._undone, (now + delay_s, next(self._numbers), act))
            while self._undone and self._undone[0][0] <= now:
                heapq.heappop(self._undone)[2]()
            self._look_after()
            if now >= told + TOLD_EVERY_S:
                told = now
                print(f"{now - started:5.0f} s  {self._summary()}", flush=True)
            time.sleep(STEP_S)
        self._end()

    def print_table(self) -> None:
        for numbers in (self.counts, self._disturber.counts):
            print()
            for name, number in sorted(numbers.items()):
                print(f"  {name:<36}{number:>9}")
        for fault in self.faults[:SHOWN_FAULTS]:
            print(f"{fault.kind} in {fault.where}: {fault.text:.600}")
        print(f"\n{self._summary()}")

    def close(self) -> None:
        for process in [*self._disturber.workers, *self._disturber.holders]:
            process.kill()

    @property
    def verdict(self) -> int:
        """Compute the exit status: 0 without faults, if blocks were loaded."""
        return 1 if self.faults or not self.counts["checked DONE"] else 0

    def _summary(self) -> str:
        found = Counter(fault.kind for fault in self.faults)
        return (
            f"{self.counts['checked DONE']} loads DONE and checked, "
            f"{self._disturber.counts.total()} disturbances, {found[Kind.WRONG]} wrong, "
            f"{found[Kind.HANG]} hangs, {found[Kind.EXCEPTION]} exceptions"
        )

    def _look_after(self) -> None:
        """Read all logs, and restart processes that have ended."""
        for processes, start in (
            (self._disturber.workers, lambda _: self._start_worker()),
            (self._disturber.holders, self._start_holder),
        ):
            for index, process in enumerate(processes):
                self.faults += process.read_log(self.counts)
                if process.ended:
                    self.faults += process.judge_end(self.counts)
                    processes[index] = start(index)

    def _end(self) -> None:
        """Let workers and holders end by themselves, and read all blocks in between."""
        end_limit = time.monotonic() + END_S
        while self._undone:
            heapq.heappop(self._undone)[2]()
        self._look_after()
        self._let_end(self._disturber.workers, end_limit)
        plan = self._plan()
        self._disturber.workers[:] = [
            self._start(f"sweep-{shape.number}", worker.sweep, plan, shape) for shape in SHAPES
        ]
        self._let_end(self._disturber.workers, end_limit, ask=False)
        self._let_end(self._disturber.holders, end_limit)

    def _let_end(
        self, processes: list[ChaosProcess], end_limit: float, *, ask: bool = True
    ) -> None:
        for process in processes:
            process.may_end = True
            if ask:
                process.signal(signal.SIGTERM)
        while time.monotonic() < end_limit and not all(each.ended for each in processes):
            time.sleep(STEP_S)
        for process in processes:
            if not process.ended:
                process.signal(signal.SIGABRT)  # with all stacks in the log
                self.faults.append(Fault(Kind.HANG, "process does not end", process.name))
            else:
                self.faults += process.judge_end(self.counts)
        processes.clear()

    def _start_worker(self) -> ChaosProcess:
        return self._start("worker", worker.main, self._plan())

    def _plan(self) -> worker.Plan:
        holders: list[tuple[str, ...]] = [()] * len(SHAPES)
        for port, (shape, _) in zip(self._ports, HOLDERS, strict=True):
            holders[shape] += (f"127.0.0.1:{port}",)
        return worker.Plan(self._rng.getrandbits(64), self._folders, tuple(holders))

    def _start_holder(self, number: int) -> ChaosProcess:
        listen = f"127.0.0.1:{self._ports[number]}"
        options = ["--listen", listen, "--capacity", "6MiB", "--drain-timeout", "5s"]
        if HOLDERS[number][1]:
            files = f"file://{self._holder_files[number]}?capacity=12MiB&min_free=1MiB"
            options += ["--tier", files]
        return self._start(f"holder{number}", kvxfer_main, ("serve", *options))

    def _start(self, name: str, main: Any, *arguments: Any) -> ChaosProcess:
        return ChaosProcess(f"{name}-{next(self._numbers):04}", self._logs, main, *arguments)


def main(argv: Sequence[str]) -> int:
    """Run; return 1 when there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long things are disturbed")
    parser.add_argument("--seed", type=int, help="what is drawn; a new one by default, printed")
    arguments = parser.parse_args(argv)
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    again = f"make chaos SECONDS={arguments.seconds:g} SEED={seed}"
    print(f"seed {seed}; again: {again}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-chaos-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = 1
    try:
        with small_disk(folder) as disk:
            conductor = Conductor(seed, folder, disk)
            with contextlib.closing(conductor):
                conductor.run(arguments.seconds)
            conductor.print_table()
            status = conductor.verdict
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        if status:
            print(f"logs: {folder / 'logs'}; again: {again}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
