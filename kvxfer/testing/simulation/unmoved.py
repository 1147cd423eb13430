"""Clock, threads and locks of modules that do not ask the runtime yet. To be deleted."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from kvxfer import runtime


class _Time(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Threading(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def _wait(futures: Any, timeout: float | None = None) -> Any:
    done, left = runtime.wait_futures(futures, timeout)
    return SimpleNamespace(done=done, not_done=left)


def move() -> None:
    """Let all modules that are imported ask the runtime."""
    clock = _Time(monotonic=runtime.monotonic, sleep=runtime.sleep, time=runtime.wall_time)
    threads = _Threading(Lock=runtime.lock, Condition=runtime.condition, Event=runtime.event)
    name: str
    module: Any
    for name, module in list(sys.modules.items()):
        if not name.startswith("kvxfer.") or name.startswith(("kvxfer.runtime", "kvxfer.testing")):
            continue
        if getattr(module, "time", None) is time:
            module.time = clock
        if getattr(module, "threading", None) is threading:
            module.threading = threads
        if hasattr(module, "wait_for_futures"):
            module.wait_for_futures = _wait
