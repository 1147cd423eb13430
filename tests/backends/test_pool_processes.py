"""A host pool outlives the engines that are killed, and engines outlive the pool."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from kvxfer.backends.pool import PoolBackend, PoolConfig
from tests.backends.outages import start
from tests.backends.worker_processes import move_blocks
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving

pytestmark = pytest.mark.processes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
EXACTLY_ENOUGH = "76KiB"  # for the blocks of `peers`, with their tags


class Engine:
    """Engine in a process of its own, that has moved blocks."""

    def __init__(self, path: Path, seed: int) -> None:
        self.told, told = multiprocessing.Pipe()
        self.process = start(move_blocks, path, seed, told)
        told.close()
        self.require_moves()

    def require_moves(self) -> None:
        """Wait until it has loaded blocks once more."""
        assert self.told.recv() == "done"

    def send_signal(self, sent: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, sent)

    def kill(self, pool: ServeProcess) -> None:
        """Kill it, and wait until its holder has noticed."""
        self.process.kill()
        pool.wait_for(rf"engine \d+ \(process {self.process.pid}\) ended")


async def require_room_for_all(path: Path) -> None:
    config = PoolConfig(path=str(path), timeout_s=30.0)
    async with PoolBackend(config, peers.namespace()) as last:
        assert all(each.done for each in await peers.store(last)), "every slot is free"
        assert await peers.load(last) == peers.PAYLOADS


@pytest.mark.timeout(120)
def test_no_byte_is_wrong_and_no_slot_is_lost_while_everything_is_killed(tmp_path: Path) -> None:
    path, before = tmp_path / "pool.sock", set(SHARED_MEMORY.glob("kvxfer-pool*"))
    with contextlib.ExitStack() as stack:

        def open_engine(seed: int) -> Engine:
            engine = Engine(path, seed)
            stack.callback(engine.process.kill)
            return engine

        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        engines = [open_engine(0), open_engine(1)]
        engines.pop().kill(pool)
        engines[0].send_signal(signal.SIGSTOP)
        engines.append(open_engine(2))
        engines[0].send_signal(signal.SIGCONT)
        pool.process.kill()
        pool.process.wait()
        assert set(SHARED_MEMORY.glob("kvxfer-pool*")) <= before, "nothing is left behind"
        assert path.exists(), "as a killed process leaves it"
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        for engine in engines * 3:
            engine.require_moves()
        engines.pop().kill(pool)
        (engine,) = engines
        engine.require_moves()
        engine.told.send("end")
        engine.process.join(peers.LIMIT_S)
        assert engine.process.exitcode == 0
        asyncio.run(require_room_for_all(path))
        assert pool.end() == 0
        assert not path.exists()
