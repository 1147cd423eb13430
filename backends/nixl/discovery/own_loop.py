"""Own loop: the event loop of a process on which all of its discovery runs.

gRPC's asynchronous interface has one queue for all event loops of a process: what is left of the
calls of a loop that has ended arrives in another one, where it raises. So discovery uses one loop
that never ends. A lease is kept there, too, while an engine computes on a loop of its own.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvxfer.runtime import LoopThread

T = TypeVar("T")

_THREADS: dict[int, LoopThread] = {}
_LOCK = threading.Lock()


def own_loop() -> asyncio.AbstractEventLoop:
    """Get the loop, which begins with the first call, on a thread that ends with the process."""
    with _LOCK:
        pid = os.getpid()  # a forked process has none of the threads
        if pid not in _THREADS:
            _THREADS[pid] = LoopThread("kvxfer-etcd")
        return _THREADS[pid].loop


async def run_there(work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
    """Run a coroutine on that loop.

    Returns:
        Its result; None when it took too long: it is cancelled, and left behind.
    """
    running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, own_loop()))
    try:
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        return running.result() if done else None
    finally:
        running.cancel()
