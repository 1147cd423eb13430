"""A host pool outlives the engines that are killed, and engines outlive the pool."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.backends.pool import PoolBackend, PoolConfig
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
EXACTLY_ENOUGH = "76KiB"  # for the blocks of `peers`, with their tags


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


async def require_room_for_all(path: Path) -> None:
    config = PoolConfig(path=str(path), timeout_s=30.0)
    async with PoolBackend(config, peers.namespace()) as last:
        assert all(each.done for each in await peers.store(last)), "every slot is free"
        assert await peers.load(last) == peers.PAYLOADS


@pytest.mark.timeout(120)
def test_no_byte_is_wrong_and_no_slot_is_lost_while_everything_is_killed(
    tmp_path: Path,
) -> None:
    path, before = tmp_path / "pool.sock", set(SHARED_MEMORY.glob("kvxfer-pool*"))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        engines = [stack.enter_context(other_engine(path, seed)) for seed in range(2)]
        kill(engines.pop(), pool)
        engines[0].send_signal(signal.SIGSTOP)
        engines.append(stack.enter_context(other_engine(path, 2)))
        engines[0].send_signal(signal.SIGCONT)
        pool.process.kill()
        pool.process.wait()
        assert set(SHARED_MEMORY.glob("kvxfer-pool*")) <= before, "nothing is left behind"
        assert path.exists(), "as a killed process leaves it"
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        for each in engines * 3:
            wait_for_a_line(each)
        kill(engines.pop(), pool)
        wait_for_a_line(engines[0])
        path.with_name("end").touch()
        engines[0].communicate(timeout=peers.LIMIT_S)
        assert engines[0].returncode == 0
        asyncio.run(require_room_for_all(path))
        assert pool.end() == 0
        assert not path.exists()
