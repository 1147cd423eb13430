"""A host pool outlives the engines that are killed, and engines outlive the pool."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvxfer.backends.pool import PoolBackend, PoolConfig
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
EXACTLY_ENOUGH = "76KiB"  # for the blocks of `peers`, with their tags
NOTHING = [None] * len(peers.KEYS)


class Engine:
    """Engine of this process that is attached to a pool, for tests that wait for processes."""

    def __init__(self, path: Path) -> None:
        config = PoolConfig(path=str(path), timeout_s=30.0)
        self.backend = PoolBackend(config, peers.namespace())

    def lookup(self) -> list[bool]:
        return asyncio.run(self.backend.lookup(peers.KEYS))

    def num_stored(self) -> int:
        return sum(outcome.done for outcome in asyncio.run(peers.store(self.backend)))

    def load(self) -> list[bytes | None]:
        return asyncio.run(peers.load(self.backend))

    def retry(self) -> None:
        """Let the next call attach again."""
        self.backend._pause.reset()
        self.backend._silence.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.backend.aclose())


@contextlib.contextmanager
def other_engine(path: Path, seed: int) -> Iterator["subprocess.Popen[str]"]:
    """Run an engine, killed at the end, until it has moved blocks."""
    command = [sys.executable, "-m", "tests.backends.pool_engine_process", str(path), str(seed)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for_a_line(process)
            yield process
        finally:
            process.kill()


def wait_for_a_line(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"


def kill(process: "subprocess.Popen[str]", pool: ServeProcess) -> None:
    """Kill an engine, and wait until its holder has noticed."""
    process.kill()
    pool.wait_for(rf"engine \d+ \(process {process.pid}\) ended")


def test_when_the_pool_is_killed_engines_miss_and_attach_to_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with Engine(path) as engine:
        assert not any(engine.lookup()), "the engine starts first"
        before = set(SHARED_MEMORY.glob("kvxfer-pool*"))
        with serving("--capacity", "1MiB", pool=path) as first:
            engine.retry()
            assert engine.num_stored() == len(peers.KEYS)
            first.process.kill()
            first.process.wait()
        assert set(SHARED_MEMORY.glob("kvxfer-pool*")) <= before, "nothing is left behind"
        assert not any(engine.lookup())
        assert engine.num_stored() == 0
        assert engine.load() == NOTHING
        assert path.exists(), "as a killed process leaves it"
        with serving("--capacity", "1MiB", pool=path) as second:
            engine.retry()
            assert engine.num_stored() == len(peers.KEYS)
            assert engine.load() == peers.PAYLOADS
            assert second.end() == 0
        assert not path.exists()


@pytest.mark.timeout(120)
def test_no_byte_is_wrong_and_no_slot_is_lost_while_everything_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        engines = [stack.enter_context(other_engine(path, seed)) for seed in range(2)]
        kill(engines.pop(), pool)
        engines[0].send_signal(signal.SIGSTOP)
        engines.append(stack.enter_context(other_engine(path, 2)))
        engines[0].send_signal(signal.SIGCONT)
        pool.process.kill()
        pool.process.wait()
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        for each in engines * 3:
            wait_for_a_line(each)
        kill(engines.pop(), pool)
        wait_for_a_line(engines[0])
        path.with_name("end").touch()
        engines[0].communicate(timeout=peers.LIMIT_S)
        assert engines[0].returncode == 0
        with Engine(path) as last:
            assert last.num_stored() == len(peers.KEYS), "every slot is free"
            assert last.load() == peers.PAYLOADS
        assert pool.end() == 0
