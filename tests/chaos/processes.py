"""Processes of a chaos run, and their logs."""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.faults import COUNTS, FAULT, Kind

# Forked from a process that has imported everything and started no thread: that takes no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.chaos.worker", "tests.chaos.processes"])


@dataclass(frozen=True)
class Fault:
    """Fault found in a log: an event that must not happen."""

    kind: Kind
    text: str
    where: str


class ChaosProcess:
    """Process to disturb, whose log is read as it grows; any end without an order is a fault."""

    def __init__(self, name: str, logs: Path, main: Callable[..., int], *arguments: Any) -> None:
        self.name, self._log = name, logs / f"{name}.log"
        self._read = 0
        self.may_end = self.killed = self.stopped = self._is_faulty = False
        self._process = _CONTEXT.Process(
            target=_enter, args=(self._log, main, arguments), daemon=True
        )
        self._process.start()

    @property
    def ended(self) -> bool:
        return not self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)
            self.stopped = number is signal.SIGSTOP
            self.killed |= number is signal.SIGKILL

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(20)

    def read_log(self, counts: Counter[str]) -> list[Fault]:
        """Read new lines of the log: add to the counts, and return the faults."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # not begun yet
            return []
        self._read += len(whole + end)
        faults: list[Fault] = []
        for line in whole.decode(errors="replace").splitlines():
            if found := FAULT.match(line):
                kind = Kind(found["kind"] or (Kind.HANG if found["timeout"] else Kind.EXCEPTION))
                text = found["text"] or found["error"] or found["timeout"]
                faults.append(Fault(kind, text, self._log.name))
            elif " INFO " + COUNTS in line:
                counts.update(json.loads(line.partition(COUNTS)[2]))
        self._is_faulty |= bool(faults)
        return faults

    def judge_end(self, counts: Counter[str]) -> list[Fault]:
        """Read the rest of an ended process's log; add a fault if its exit status is unexpected."""
        faults, status = self.read_log(counts), self._process.exitcode
        if not (self.killed or self._is_faulty or (self.may_end and status == 0)):
            faults.append(Fault(Kind.EXCEPTION, f"ended with status {status}", self._log.name))
        return faults


def _enter(log: Path, main: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # Ctrl-C is for the conductor alone
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.exit(main(*arguments))


def _end_with(parent: Any) -> None:
    """Make the kernel end this process when the conductor is killed."""
    parent.join()
    os._exit(1)
