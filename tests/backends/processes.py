"""Processes that obey the orders of a test, forked from one that has imported everything."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Forked from a process that has imported everything and started no thread: that takes no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = "nixl_holders", "agent_process", "worker_processes"
_CONTEXT.set_forkserver_preload(
    [*(f"tests.backends.{name}" for name in _PRELOADED), "tests.transfer.handover_engines"]
)


def start(work: Callable[..., None], *arguments: object) -> BaseProcess:
    process = _CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


class ObedientProcess:
    """Process that obeys orders; its `pid` is valid for signals until `end` or `close`."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self._orders, theirs = _CONTEXT.Pipe()
        self._process = start(serve, theirs, *arguments)
        theirs.close()
        self.pid: int = self._process.pid  # type: ignore[assignment]
        self.said: Any = self._orders.recv()

    def tell(self, order: Any) -> Any:
        self._orders.send(order)
        return self._orders.recv()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; wait until it has stopped each thread, if it is `SIGSTOP`."""
        os.kill(self.pid, number)
        tasks = Path(f"/proc/{self.pid}/task")
        while number is signal.SIGSTOP and any(map(_is_running, tasks.glob("*/stat"))):
            pass

    def end(self) -> None:
        """Kill the process, even if it is stopped or has ended; may be called again."""
        with contextlib.suppress(ValueError):  # it is closed
            self._process.kill()
            self.close()

    def close(self) -> int | None:
        """Let the process end by itself; return its exit status."""
        self._orders.close()
        self._process.join(20)
        status = self._process.exitcode
        self._process.close()
        return status


def _is_running(stat: Path) -> bool:
    return not stat.read_text().rpartition(")")[2].startswith(" T")


def answer(orders: Connection, greeting: Any, obey: Callable[[Any], Any]) -> None:
    orders.send(greeting)
    with contextlib.suppress(EOFError):
        while True:
            orders.send(obey(orders.recv()))
