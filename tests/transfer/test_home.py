"""Event loop of an engine: no call waits for an event loop that does not run."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from kvxfer.errors import ClosedError, EventLoopError
from kvxfer.storage.backend import DONE
from kvxfer.storage.keys import make_block_key
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
    DictConfig,
)
from kvxfer.testing.payloads import make_payload, write_payloads
from kvxfer.transfer.engine import TransferEngine

LIMIT_S = 10.0
KEYS = [make_block_key(bytes([n + 1]), 0) for n in range(4)]


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[1000, 24]], num_blocks=16)


def open_engine(memory: BlockMemory) -> TransferEngine:
    return TransferEngine(memory.caches, DictBackend(DictConfig(), memory.namespace()))


def fill(memory: BlockMemory) -> list[bytes]:
    payloads = [make_payload(key, 1024) for key in KEYS]
    write_payloads(memory.describe(0, range(4)), payloads)
    return payloads


@pytest.fixture
def stopped() -> asyncio.AbstractEventLoop:
    """Event loop that no thread runs."""
    return asyncio.new_event_loop()


# An engine that was first used on a loop that stopped


def test_an_engine_entered_on_a_loop_that_stopped_says_so(
    memory: BlockMemory, stopped: asyncio.AbstractEventLoop
) -> None:
    engine = open_engine(memory)
    stopped.run_until_complete(engine.__aenter__())
    for call in (
        lambda: engine.submit_load(KEYS[:1], [[1]]),
        lambda: asyncio.run(engine.load(KEYS[:1], [[1]])),
        engine.close,
    ):
        with pytest.raises(EventLoopError, match="does not run"):
            call()
    stopped.run_until_complete(asyncio.sleep(0))
    stopped.close()


# Blocking calls on the engine's own loop


async def test_blocking_the_loop_that_one_waits_for_is_refused(memory: BlockMemory) -> None:
    fill(memory)
    async with open_engine(memory) as engine:
        job = engine.submit_store(KEYS, [range(4)])
        with pytest.raises(EventLoopError, match=r"wait\(\) would block"):
            engine.wait([job])
        with pytest.raises(EventLoopError, match=r"close\(\) would block"):
            engine.close()
        while not engine.get_finished():  # noqa: ASYNC110 - turns of this loop are all it takes
            await asyncio.sleep(0)
        assert await engine.lookup(KEYS) == [True] * 4, "it is as open as before"


def test_no_thread_is_left_and_later_calls_say_that_it_is_closed(memory: BlockMemory) -> None:
    before = set(threading.enumerate())
    engine = open_engine(memory)
    fill(memory)
    assert asyncio.run(engine.store(KEYS, [range(4)])) == [DONE] * 4
    engine.close()
    assert not {each.name for each in set(threading.enumerate()) - before}
    with pytest.raises(ClosedError):
        engine.submit_load(KEYS[:1], [[1]])
    with pytest.raises(ClosedError):
        asyncio.run(engine.lookup(KEYS[:1]))


# Deadlines of lookups, of flushing, and of closing


# Fork

FORK = """
    import asyncio, os, sys, faulthandler
    import numpy as np, torch, kvxfer
    faulthandler.dump_traceback_later(60, exit=True)
    kv_caches = {"layer": torch.zeros(16, 2, 16, 4, 8)}
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=16, num_kv_heads=4, head_dim=8, dtype=torch.float32
    )
    config = kvxfer.KVCacheConfig(
        num_blocks=16, groups=(kvxfer.KVCacheGroup(spec, ("layer",)),)
    )
    caches = kvxfer.canonicalize(kv_caches, config)
    engine = kvxfer.connect(
        "host://?capacity=1MiB", caches, namespace=kvxfer.Namespace(model="m")
    )
    key = kvxfer.make_block_key(b"k", 0)
    if sys.argv[1] == "used":
        job = engine.submit_store([key], [[1]])
        assert engine.wait([job], timeout_s=10)
    elif sys.argv[1] == "awaited":
        asyncio.run(engine.store([key], [[1]]))
    child = os.fork()
    if not child:
        backend = engine.backend
        calls = [
            lambda: engine.submit_load([key], [[1]]),
            lambda: engine.wait([]),
            lambda: engine.get_finished(),
            lambda: engine.cancel(0),
            lambda: engine.may_touch(0),
            lambda: engine.close(),
            lambda: asyncio.run(engine.load([key], [[1]])),
            lambda: asyncio.run(engine.lookup([key])),
            lambda: asyncio.run(engine.drain()),
            lambda: asyncio.run(engine.flush()),
            lambda: asyncio.run(engine.aclose()),
            lambda: asyncio.run(backend.lookup([key])),
            lambda: asyncio.run(backend.load([key], kvxfer.describe(caches, 0, [1]))),
        ]
        for number, call in enumerate(calls):
            try:
                call()
            except kvxfer.errors.ForkedError as exc:
                assert "fork" in str(exc), exc
            else:
                print("call", number, "did not raise", flush=True)
                os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    engine.close()
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("use", ["unused", "used", "awaited"])
@pytest.mark.processes
def test_a_forked_process_is_told_that_it_cannot_use_the_engine_of_its_parent(use: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), use],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path.cwd(),
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_call_on_the_private_loop_cannot_wait_for_it(memory: BlockMemory) -> None:
    engine = open_engine(memory)

    async def deadlock() -> None:
        engine.close()

    with pytest.raises(EventLoopError, match=r"close\(\) would block"):
        engine.submit_call(deadlock()).result(LIMIT_S)
    engine.close()
