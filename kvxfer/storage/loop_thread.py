"""Event loop on a thread of its own, for callers that block."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

END_OF_THREADS_S = 5.0
"""Time for calls on other threads that were given up to end, when their loop ends."""


class LoopThread:
    """Event loop on its own thread, from construction to `stop`; others make blocking calls."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._blocking = ThreadPoolExecutor(thread_name_prefix=f"{name}-blocking")
        self.loop.set_default_executor(self._blocking)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop and its threads; tasks must have ended before. May be called again.

        A call that blocks beyond `END_OF_THREADS_S` is left behind, with its thread.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # `shutdown_default_executor` of asyncio has no time limit before Python 3.12.
            ending = threading.Thread(target=self._blocking.shutdown, daemon=True)
            ending.start()
            ending.join(END_OF_THREADS_S)
            self.loop.close()
