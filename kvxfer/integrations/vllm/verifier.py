"""Verifies blocks in host memory before vLLM is told that they are there."""

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from kvxfer.backends.host import HostPool
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey


@dataclass(slots=True, eq=False)
class Check:
    """One block under verification.

    Attributes:
        outcome: None until the block was verified.
        num_holders: Requests that want it to stay as it is.
    """

    key: BlockKey
    slot: int
    outcome: Outcome | None = None
    num_holders: int = 0


class Verifier:
    """Reads blocks of a pool on a thread of its own and compares them with their checksums.

    vLLM cannot recover from a load that fails, so a block is verified first, while it is pinned;
    its scheduler thread must not block, so that happens elsewhere.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._queue: SimpleQueue[Check | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvxfer-verify", daemon=True)
        self._thread.start()

    def submit(self, check: Check) -> None:
        """Verify a block; its slot must not be written until the check has an outcome."""
        self._queue.put(check)

    def stop(self) -> None:
        """End the thread after what was submitted; may be called again."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (check := self._queue.get()) is not None:
            try:
                check.outcome = self._pool.verify(check.slot, check.key)
            except Exception as exc:  # noqa: BLE001 - the scheduler must not wait for ever
                check.outcome = Outcome(Status.FAILED, reason=repr(exc))
