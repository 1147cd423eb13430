"""Programs that hang, end and come back, and checks of any backend over them."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from kvxfer.storage import Backend, BlockKey, Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import assert_done_are, make_keys, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}
"""Limits so long that a busy machine keeps them, for tests of other things."""
BACK_S = 60.0
START_LIMIT_S = 60.0

_numbers = itertools.count(10**6, 8)


async def require_back(backend: Backend, memory: BlockMemory) -> None:
    keys = make_keys(4, first=next(_numbers))
    stop = time.monotonic() + BACK_S
    blocks, target = memory.describe(0, range(4)), memory.describe(0, range(4, 8))
    payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in keys]
    write_payloads(blocks, payloads)
    for move, moved in ((backend.store, blocks), (backend.load, target)):
        while not all(outcome.done for outcome in await move(keys, moved)):
            assert time.monotonic() < stop
            await asyncio.sleep(0.2)
    assert read_payloads(target) == payloads
    assert await backend.lookup(keys) == [True] * 4


async def move_until_one_fails(
    backend: Backend,
    memory: BlockMemory,
    keys: Sequence[BlockKey],
    payloads: Sequence[bytes],
    allowed: Collection[Status] = (Status.FAILED, Status.TIMED_OUT),
) -> dict[BlockKey, bytes]:
    """Load blocks and store others until a call fails; return those that were stored meanwhile."""
    num_keys, stop = len(keys), time.monotonic() + BACK_S
    source, target = memory.describe(0, range(8)), memory.describe(0, range(8, 8 + num_keys))
    done: dict[BlockKey, bytes] = {}
    while True:
        others = make_keys(8, first=next(_numbers))
        made = [make_payload(key, memory.chunk_size_bytes(0)) for key in others]
        write_payloads(source, made)
        stored, loaded = await asyncio.gather(
            backend.store(others, source), backend.load(keys, target)
        )
        assert_done_are(loaded, target, payloads)
        assert set(statuses([*stored, *loaded])) <= {Status.DONE, *allowed}, [*stored, *loaded]
        pairs = zip(others, made, stored, strict=True)
        done |= {key: payload for key, payload, outcome in pairs if outcome.done}
        if not all(each.done for each in [*stored, *loaded]):
            return done
        assert time.monotonic() < stop


class Program:
    """Program in a process group of its own, in a folder that has its log; started at once.

    As a context it is killed at the end.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._log = folder / "log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def freeze(self) -> None:
        """Stop it: its connections stay open, but nothing answers."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self, sent: signal.Signals = signal.SIGKILL) -> None:
        """Kill it by a signal; may be called again."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sent)
        self.process.wait()

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        stop = time.monotonic() + START_LIMIT_S
        while not is_ready():
            ok = self.process.poll() is None and time.monotonic() < stop
            assert ok, self._log.read_text()[-2000:]
            time.sleep(0.05)
