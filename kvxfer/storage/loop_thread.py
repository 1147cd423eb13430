"""Event loop on a thread of its own, for callers that block."""

import asyncio
import threading

from kvxfer.storage.threads import DaemonThreads

END_OF_THREADS_S = 5.0
"""Time for calls on other threads that were given up to end, when their loop ends."""

NUM_BLOCKING = 32
"""Most threads for calls that block, as many as asyncio has at most."""


class LoopThread:
    """Event loop on its own thread, from construction to `stop`; others make blocking calls.

    Raises:
        RuntimeError: No thread can be started, as at the end of the interpreter.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._blocking = DaemonThreads(f"{name}-blocking", NUM_BLOCKING)
        self.loop.set_default_executor(self._blocking)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

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
            self._blocking.shutdown()
            self._blocking.join(END_OF_THREADS_S)
            self.loop.close()
