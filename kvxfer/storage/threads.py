"""Threads for calls that block, as an event loop wants them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import aiofiles.os

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A bounded pool of threads that blocking functions run on, to their end.

    Args:
        name: Prefix of the threads' names.
        num_threads: Calls that run at one time; the others wait.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func` on a thread; when cancelled, wait for the thread before raising.

        A thread cannot be interrupted: returning earlier would leave it writing to memory that
        its owner believes to be free.

        Raises:
            asyncio.CancelledError: The caller was cancelled; `func` has ended all the same, or
                never began.
        """
        call = aiofiles.os.wrap(func)(*args, executor=self._executor, **kwargs)
        future = asyncio.ensure_future(call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            if not future.cancelled():
                future.exception()  # fetched, or asyncio reports it as never retrieved
            raise

    async def aclose(self) -> None:
        """Wait for what runs and let the threads end; may be called again."""
        while self._running:
            await asyncio.wait(self._running)
        self._executor.shutdown(wait=False)
