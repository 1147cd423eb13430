"""Transfer engine: one outcome per block, on any loop or thread, and on either side of a fork."""

import asyncio
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvxfer.errors import (
    BackendUnavailableError,
    BlockIdError,
    ClosedError,
    DuplicateError,
    EventLoopError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.kvcache.allocation import AttentionLayout, allocate_canonical
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.spec import FullAttentionSpec
from kvxfer.storage.backend import DONE, Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, GroupIdentity, Namespace, make_block_key
from kvxfer.storage.observed_backend import observed
from kvxfer.storage.observer import Reports
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.conformance.suite import make_keys, yield_to_loop
from kvxfer.transfer import PolledEngine, mover
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction, FinishedJob, describe_batch
from kvxfer.transfer.mover import Admission
from tests.clock import LIMIT_S
from tests.interpreter import run_python
from tests.recorder import Recorder

PAGE_BYTES = 1024


class Untouched(DictBackend):
    """Backend that must not be asked to move anything."""

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        pytest.fail("stored")

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        pytest.fail("loaded")


class Broken(DictBackend):
    """Backend whose loads leave unsafe memory, and which cannot be drained."""

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

    async def drain(self) -> None:
        raise OSError("completion queue is gone")


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[PAGE_BYTES - 24, 24]], num_blocks=64)


@pytest.fixture
async def engine(memory: BlockMemory) -> AsyncIterator[TransferEngine]:
    async with TransferEngine(memory.caches, make_backend(memory)) as engine:
        yield engine


def make_backend(memory: BlockMemory) -> Backend:
    return DictBackend(DictConfig(), memory.namespace())


def statuses(outcomes: Sequence[Outcome]) -> set[Status]:
    return {outcome.status for outcome in outcomes}


@pytest.mark.parametrize(
    ("keys", "block_ids", "error", "named"),
    [
        (make_keys(1), [[64]], BlockIdError, "64"),
        (make_keys(2), [[3, 3]], DuplicateError, "3"),
        (make_keys(1) * 2, [[3, 4]], DuplicateError, "block-0"),
        (make_keys(3), [[3, 4]], LengthMismatchError, "3"),
        (make_keys(1), [[3], [4]], InvalidArgumentError, "one entry for each of 1 groups"),
        (make_keys(1, group=1), [[3]], InvalidArgumentError, "a key of group 0"),
        ([b"abc"], [[3]], InvalidArgumentError, "abc"),
        ([], [[3]], InvalidArgumentError, "at least one key"),
        (make_keys(2), [[[1, 2]]], InvalidArgumentError, r"\[\[1, 2\]\]"),
    ],
)
async def test_a_wrong_batch_is_named_and_nothing_is_written(
    memory: BlockMemory,
    keys: list[BlockKey],
    block_ids: list[list[int]],
    error: type[Exception],
    named: str,
) -> None:
    backend = Untouched(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend) as engine:
        for call in (engine.store, engine.load):
            with pytest.raises(error, match=named):
                await call(keys, block_ids)
        for submit in (engine.submit_store, engine.submit_load):
            with pytest.raises(error, match=named):
                submit(keys, block_ids)


def test_a_step_loop_submits_calls_and_closes_the_engine_at_the_end_of_a_block_only(
    memory: BlockMemory,
) -> None:
    with TransferEngine(memory.caches, make_backend(memory)) as engine:
        (stored,) = engine.wait([engine.submit_store(make_keys(1), [[1]])], timeout_s=10)
        assert stored.done
        assert engine.submit_lookup(make_keys(2), timeout_s=10).result(10) == [True, False]
        with pytest.raises(InvalidArgumentError, match="keys"):
            engine.submit_lookup([]).result(10)

        async def deadlock() -> None:
            engine.close()

        with pytest.raises(EventLoopError, match=r"close\(\) would block"):
            engine.submit_call(deadlock()).result(10)
    with pytest.raises(ClosedError):
        engine.submit_lookup(make_keys(1))


@pytest.mark.parametrize(
    ("num_bytes", "said"), [(0, "was freed"), (128, "was resized"), (1 << 20, "was resized")]
)
@pytest.mark.parametrize("name", ["store", "load"])
async def test_blocks_of_a_tensor_that_was_freed_or_resized_fail_by_its_name(
    memory: BlockMemory, name: str, num_bytes: int, said: str
) -> None:
    backend = Untouched(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend) as engine:
        memory.caches.tensors[1].tensor.untyped_storage().resize_(num_bytes)
        outcomes = await getattr(engine, name)(make_keys(2), [[1, 2]])
        assert statuses(outcomes) == {Status.FAILED}
        assert all("tensor 1 of the caches" in outcome.reason for outcome in outcomes)
        assert all(said in outcome.reason for outcome in outcomes)
        assert all(outcome.memory_safe for outcome in outcomes)


@pytest.mark.parametrize(("kind", "reached"), [("xpu", "cpu"), ("cuda", "xpu"), ("cpu", "cuda")])
def test_a_device_that_staging_is_not_for_is_refused(
    memory: BlockMemory, kind: str, reached: str
) -> None:
    class OnDevice(torch.Tensor):
        device = torch.device(kind, 0)

    class Reaching(DictBackend):
        memory_kinds = frozenset({reached})

    (each,) = memory.caches.tensors[:1]
    moved = replace(each, tensor=each.tensor.as_subclass(OnDevice))
    caches = CanonicalKVCaches([moved], [[CanonicalKVCacheRef(0, PAGE_BYTES - 24)]])
    with pytest.raises(InvalidArgumentError, match=rf"device of caches is \['{kind}'\]"):
        TransferEngine(caches, Reaching(DictConfig(), memory.namespace()))


CLOSE_AT_THE_END = """
import atexit, sys, threading

def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def close():
    if sys.argv[-1] == "without new threads":  # as Python 3.12 and later
        threading.Thread.start = refuse
    for each in opened:
        each.close()
    print("closed")

atexit.register(close)
"""
AT_THE_END = """
import sys, kvxfer
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload, write_payloads

folder, backend, _ = sys.argv[1:]
memory = BlockMemory([[4096]], num_blocks=64)
keys = [kvxfer.make_block_key(bytes([number]) * 8, 0) for number in range(40)]
write_payloads(memory.describe(0, range(40)), [make_payload(key, 4096) for key in keys])
files = f"file://{folder}?capacity=64MiB&min_free=1B"
urls = ["host://?capacity=64MiB", files] if backend == "tiers" else files
engine = kvxfer.connect(urls, memory.caches, namespace=kvxfer.Namespace(model="m", revision="1"))
if backend != "unused":
    engine.wait([engine.submit_store(keys, [range(40)])])
    assert all(job.done for job in engine.get_finished())
opened = [engine]
"""


def check_that_it_is_closed_at_the_end(script: str, *arguments: str) -> None:
    """Run a script in an interpreter that closes at its end what the script has `opened`."""
    done = run_python("-c", script + CLOSE_AT_THE_END, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


@pytest.mark.processes
@pytest.mark.parametrize("how", ["", "without new threads"])
@pytest.mark.parametrize("backend", ["tiers", "files", "unused"])
def test_an_engine_that_is_closed_when_the_interpreter_ends_loses_nothing(
    tmp_path: Path, backend: str, how: str
) -> None:
    check_that_it_is_closed_at_the_end(AT_THE_END, str(tmp_path), backend, how)
    assert len(list(tmp_path.rglob("*.safetensors"))) == (40 if backend != "unused" else 0)
    assert list(tmp_path.glob("*.claim")) == []


async def test_an_engine_whose_backend_cannot_be_drained_ends_and_says_what_it_left(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    async with TransferEngine(memory.caches, Broken(DictConfig(), memory.namespace())) as engine:
        job = engine.submit_load(make_keys(1), [[1]])
        while not engine.get_finished():  # noqa: ASYNC110 - polled, as an engine does
            await asyncio.sleep(0)
    assert "closed, but 1 transfers may still touch the caches" in caplog.text
    assert engine.may_touch(job)


async def test_memory_of_a_call_that_its_caller_did_not_cancel_is_not_safe(
    memory: BlockMemory,
) -> None:
    class Cancelled(DictBackend):
        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            raise asyncio.CancelledError

    async with TransferEngine(memory.caches, Cancelled(DictConfig(), memory.namespace())) as engine:
        [outcome] = await engine.load(make_keys(1), [[1]])
        assert outcome.status is Status.FAILED
        assert not outcome.memory_safe


async def test_an_engine_whose_backend_does_not_close_in_time_does_not_say_that_it_is_closed(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(memory)
    with patch.object(backend, "aclose", side_effect=asyncio.Event().wait):
        async with TransferEngine(memory.caches, backend, close_timeout_s=0.1):
            pass
    assert "not closed after 0.1 s: 0 transfers may still touch the caches" in caplog.text


async def test_a_job_whose_submission_a_close_overtakes_is_refused(memory: BlockMemory) -> None:
    backend, is_closing, closes = make_backend(memory), threading.Event(), threading.Event()
    engine = TransferEngine(memory.caches, backend)

    async def close_late() -> None:
        is_closing.set()
        await asyncio.to_thread(closes.wait)

    def close_meanwhile(_: object) -> None:
        threading.Thread(target=engine.close).start()
        assert is_closing.wait(LIMIT_S)

    with (
        patch.object(backend, "aclose", close_late),
        patch.object(engine._memory, "mark", close_meanwhile),
    ):
        try:
            with pytest.raises(ClosedError):
                engine.submit_store(make_keys(1), [[1]])
        finally:
            closes.set()
            engine.close()


class Unsafe(DictBackend):
    """Backend whose loads end when told to, and whose memory is quiet when told to."""

    def __init__(self, config: DictConfig, namespace: Namespace) -> None:
        super().__init__(config, namespace)
        self.asked, self.answers, self.is_quiet = (asyncio.Event() for _ in range(3))

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        self.asked.set()
        await self.answers.wait()
        return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

    async def drain(self) -> None:
        await self.is_quiet.wait()


async def test_a_drain_waits_for_memory_that_proves_unsafe_while_it_waits(
    memory: BlockMemory,
) -> None:
    backend = Unsafe(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend) as engine:
        loading = asyncio.create_task(engine.load(make_keys(1), [[1]]))
        await backend.asked.wait()
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        backend.answers.set()
        await loading
        for _ in range(20):
            await asyncio.sleep(0)
        has_ended = draining.done()
        backend.is_quiet.set()
        await draining
    assert not has_ended


async def test_memory_is_safe_once_a_drain_succeeds_after_one_that_failed(
    memory: BlockMemory,
) -> None:
    class FailsOnce(Broken):
        failed = False

        async def drain(self) -> None:
            if not self.failed:
                self.failed = True
                await super().drain()

    backend = FailsOnce(DictConfig(), memory.namespace())
    async with TransferEngine(memory.caches, backend) as engine:
        job = engine.submit_load(make_keys(1), [[1]])
        while not backend.failed:  # noqa: ASYNC110 - polled, as an engine does
            await asyncio.sleep(0)
        await engine.drain()
        assert not engine.may_touch(job)


async def test_a_close_waits_for_a_load_that_ends_after_its_backend(memory: BlockMemory) -> None:
    class Stubborn(DictBackend):
        has_loaded = False

        async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
            while not closed.is_set():
                with suppress(asyncio.CancelledError):
                    await closed.wait()
            await yield_to_loop(20)
            self.has_loaded = True
            return await super().load(keys, blocks)

        async def aclose(self) -> None:
            closed.set()

    closed, backend = asyncio.Event(), Stubborn(DictConfig(), memory.namespace())
    engine = TransferEngine(memory.caches, backend, close_timeout_s=1.0)
    async with engine:
        engine.submit_load(make_keys(1), [[1]])
        await yield_to_loop(20)
    assert backend.has_loaded


@contextmanager
def at_each_instruction(call: Callable[[], object]) -> Iterator[None]:
    """Call something before each instruction of the mover of jobs on this thread."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != mover.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            call()
        return trace

    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces lines only
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)


async def test_memory_that_cannot_be_drained_may_be_touched_at_each_instant_of_the_end(
    memory: BlockMemory,
) -> None:
    asked: list[bool] = []
    async with TransferEngine(memory.caches, Broken(DictConfig(), memory.namespace())) as engine:
        job = engine.submit_load(make_keys(1), [[1]])
        while not engine.get_finished():  # noqa: ASYNC110 - polled, as an engine does
            await asyncio.sleep(0)
        with at_each_instruction(lambda: asked.append(engine.may_touch(job))):
            await engine.aclose()
    assert asked
    assert all(asked)


def test_memory_that_cannot_be_drained_may_be_touched_though_the_end_comes_as_a_thread_asks(
    memory: BlockMemory,
) -> None:
    def end_before(index: int) -> bool:
        indices, backend = count(), Broken(DictConfig(), memory.namespace())
        with PolledEngine(memory.caches, backend) as polled:
            job = polled.submit_load(make_keys(1), [[1]])
            polled.wait([job])
            with at_each_instruction(lambda: polled.close() if next(indices) == index else None):
                assert polled.may_touch(job)
        return next(indices) > index

    assert all(map(end_before, range(20)))
    assert not all(map(end_before, count(20)))


@pytest.mark.parametrize("is_observed", [False, True])
def test_what_a_backend_raises_or_answers_wrongly_is_an_error_that_names_it(
    memory: BlockMemory, *, is_observed: bool
) -> None:
    class Foreign(DictBackend):
        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            if len(keys) == 1:
                raise TimeoutError("the cluster is slow")
            return [True]

        async def flush(self) -> None:
            raise ValueError("no cluster")

    backend: Backend = Foreign(DictConfig(), memory.namespace())
    if is_observed:
        backend = observed(backend, Reports([Recorder()]))
    with TransferEngine(memory.caches, backend) as engine:
        for num_keys, said in ((1, "the cluster is slow"), (2, "shorter")):
            with pytest.raises(BackendUnavailableError, match=f"Foreign: .*{said}"):
                engine.submit_lookup(make_keys(num_keys)).result(10)
        with pytest.raises(BackendUnavailableError, match=r"Foreign: .*no cluster"):
            asyncio.run(engine.flush())


def test_memory_whose_drain_never_ends_may_still_be_touched_after_the_end(
    memory: BlockMemory,
) -> None:
    class Hanging(Broken):
        async def drain(self) -> None:
            await asyncio.Event().wait()

    backend = Hanging(DictConfig(), memory.namespace())
    with PolledEngine(memory.caches, backend, close_timeout_s=0.1) as engine:
        job = engine.submit_load(make_keys(1), [[1]])
        engine.wait([job])
    assert engine.may_touch(job)


def test_an_engine_entered_on_a_loop_that_stopped_says_so(memory: BlockMemory) -> None:
    stopped, engine = asyncio.new_event_loop(), TransferEngine(memory.caches, make_backend(memory))
    stopped.run_until_complete(engine.__aenter__())
    for call in (
        lambda: engine.submit_load(make_keys(1), [[1]]),
        lambda: asyncio.run(engine.load(make_keys(1), [[1]])),
        engine.close,
    ):
        with pytest.raises(EventLoopError, match="is not running"):
            call()
    stopped.run_until_complete(asyncio.sleep(0))
    stopped.close()


def test_an_engine_for_which_no_thread_can_be_started_says_so_and_works_later(
    memory: BlockMemory,
) -> None:
    backend, keys = DictBackend(DictConfig(), memory.namespace()), make_keys(1)
    with TransferEngine(memory.caches, backend) as engine:
        no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
        for call in (
            lambda: engine.submit_store(keys, [[1]]),
            lambda: engine.submit_lookup(keys),
            lambda: asyncio.run(engine.lookup(keys)),
        ):
            with no_thread, pytest.raises(EventLoopError, match="its thread cannot be started"):
                call()
        [stored] = engine.wait([engine.submit_store(keys, [[1]])])
        assert stored.done
        assert engine.submit_lookup(keys).result() == [True]


async def test_a_job_is_reported_once_though_memory_was_short_as_it_ended(
    memory: BlockMemory,
) -> None:
    reported, errors, set_result = list[FinishedJob](), [MemoryError()], Future.set_result
    opened = TransferEngine(memory.caches, make_backend(memory))

    def fail_once(future: Future[None], value: None) -> None:
        reported.extend(opened.get_finished())
        if errors:
            raise errors.pop()
        set_result(future, value)

    async with opened:
        with patch("kvxfer.transfer.engine.Future.set_result", fail_once):
            job_id = opened.submit_store(make_keys(4), [range(4)])
            while errors:  # noqa: ASYNC110 - turns of this loop are all it takes
                await asyncio.sleep(0)
            await yield_to_loop(4)
        reported += opened.get_finished()
    assert [each.job_id for each in reported] == [job_id]


async def test_blocking_the_loop_that_one_waits_for_is_refused(memory: BlockMemory) -> None:
    async with TransferEngine(memory.caches, make_backend(memory)) as engine:
        job = engine.submit_store(make_keys(4), [range(4)])
        with pytest.raises(EventLoopError, match=r"wait\(\) would block"):
            engine.wait([job])
        with pytest.raises(EventLoopError, match=r"close\(\) would block"):
            engine.close()
        while not engine.get_finished():  # noqa: ASYNC110 - turns of this loop are all it takes
            await asyncio.sleep(0)
        answer = engine.submit_lookup(asked := make_keys(4))
        asked.clear()
        for ask in (answer.result, answer.exception):
            with pytest.raises(EventLoopError, match=rf"{ask.__name__}\(\) would block"):
                ask(0.1)
            with pytest.raises(TimeoutError):
                ask(0)
        assert await asyncio.wrap_future(answer) == [True] * 4, "it is as open as before"
        assert answer.result() == [True] * 4


def test_no_thread_is_left_and_later_calls_say_that_it_is_closed(memory: BlockMemory) -> None:
    before = set(threading.enumerate())
    engine = TransferEngine(memory.caches, make_backend(memory))
    assert asyncio.run(engine.store(make_keys(4), [range(4)])) == [DONE] * 4
    assert asyncio.run(engine.load(make_keys(4), [range(8, 12)])) == [DONE] * 4, (
        "it outlives a loop"
    )
    job_id = engine.submit_load(make_keys(1), [[1]])
    engine.close()
    engine.cancel(job_id)
    assert [each.job_id for each in engine.get_finished()] == [job_id]
    assert not {each.name for each in set(threading.enumerate()) - before}
    with pytest.raises(ClosedError):
        engine.submit_load(make_keys(1), [[1]])
    with pytest.raises(ClosedError):
        asyncio.run(engine.lookup(make_keys(1)))


def test_an_event_loop_that_ends_as_work_is_given_to_it_is_said_to_be_closed(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    engine = TransferEngine(memory.caches, make_backend(memory))
    with engine, monkeypatch.context() as patched:
        patched.setattr(engine._loop, "_open", lambda: ended)
        with pytest.raises(ClosedError):
            engine.submit_load(make_keys(1), [[1]])
        with pytest.raises(ClosedError):
            asyncio.run(engine.lookup(make_keys(1)))


def test_a_call_that_hangs_while_the_engine_is_closed_is_refused_and_not_cancelled(
    memory: BlockMemory,
) -> None:
    class Hanging(DictBackend):
        async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
            asks.set()
            await asyncio.Event().wait()
            return [False] * len(keys)

    def ask() -> None:
        with pytest.raises(ClosedError):
            asyncio.run(engine.lookup(make_keys(1)))
        refused.set()

    asks, refused = threading.Event(), threading.Event()
    backend = Hanging(DictConfig(), memory.namespace())
    engine = TransferEngine(memory.caches, backend, close_timeout_s=0.1)
    asking = threading.Thread(target=ask)
    asking.start()
    assert asks.wait(LIMIT_S)
    engine.close()
    asking.join()
    assert refused.is_set()


async def enter(admission: Admission, priority: int, num_bytes: int, log: list[int]) -> None:
    async with admission.admit(priority, num_bytes):
        log.append(priority)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("held", "waiting", "entered"),
    [
        (10, [(3, 10), (1, 10), (2, 10), (1, 10)], [1, 1, 2, 3]),
        (5, [(1, 10), (2, 1)], [1, 2]),  # a small job does not overtake a large one
    ],
)
async def test_those_who_wait_enter_by_priority_and_then_in_order(
    held: int, waiting: list[tuple[int, int]], entered: list[int]
) -> None:
    admission, log = Admission(10), list[int]()
    async with asyncio.TaskGroup() as group, admission.admit(0, held):
        for priority, num_bytes in waiting:
            group.create_task(enter(admission, priority, num_bytes, log))
        cancelled = group.create_task(enter(admission, 9, 10, log))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert admission.num_waiting == len(waiting)
        assert log == []
    assert log == entered
    assert admission.bytes_in_flight == 0


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_transfer_that_is_cancelled_before_it_enters_lets_the_next_one_enter(
    *, is_admitted: bool
) -> None:
    admission, log = Admission(10), list[int]()
    async with asyncio.TaskGroup() as group, AsyncExitStack() as held:
        await held.enter_async_context(admission.admit(0, 5))
        cancelled = group.create_task(enter(admission, 1, 10, log))
        group.create_task(enter(admission, 2, 5, log))
        await asyncio.sleep(0)
        if is_admitted:
            await held.aclose()
        cancelled.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert log == [2]


# Fork

FORK = """
    import asyncio, os, sys, faulthandler
    import numpy as np, torch, kvxfer
    faulthandler.dump_traceback_later(60, exit=True)
    kv_caches = {"layer": torch.zeros(16, 2, 16, 4, 8)}
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=16, num_kv_heads=4, head_dim=8, dtype=torch.float32
    )
    config = kvxfer.KVCacheConfig(num_blocks=16, groups=(kvxfer.KVCacheGroup(spec, ("layer",)),))
    caches = kvxfer.canonicalize(kv_caches, config)
    engine = kvxfer.connect("host://?capacity=1MiB", caches, namespace=kvxfer.Namespace(model="m"))
    key = kvxfer.make_block_key(b"k", 0)
    if sys.argv[1] == "used":
        job = engine.submit_store([key], [[1]])
        assert engine.wait([job], timeout_s=10)
    elif sys.argv[1] == "awaited":
        asyncio.run(engine.store([key], [[1]]))
    child = os.fork()
    if not child:
        backend = engine.backend
        blocking = [lambda: engine.submit_load([key], [[1]]), lambda: engine.wait([])]
        blocking += [lambda: engine.cancel(0), lambda: engine.may_touch(0)]
        awaited = [engine.drain, engine.flush, engine.aclose, lambda: engine.lookup([key])]
        awaited += [lambda: engine.load([key], [[1]]), lambda: backend.lookup([key])]
        awaited += [lambda: backend.load([key], kvxfer.describe(caches, 0, [1]))]
        calls = [*blocking, engine.get_finished, engine.close]
        calls += [lambda call=call: asyncio.run(call()) for call in awaited]
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
    ended = run_python("-c", textwrap.dedent(FORK), use)
    assert ended.returncode == 0, ended.stdout + ended.stderr


SPEC = FullAttentionSpec(tokens_per_block=4, num_kv_heads=3, head_dim=8, dtype=torch.float32)
GROUPS = (KVCacheGroup(SPEC, ("a",)), KVCacheGroup(SPEC, ("b",)))
LAYOUT = AttentionLayout("block kv token head dim", "block layer kv token head dim")
NUM_BLOCKS = 16
K0, K1 = make_block_key(b"first", 0), make_block_key(b"second", 1)


def overlaid(*, null_block_id: int | None = None) -> CanonicalKVCaches:
    config = KVCacheConfig(NUM_BLOCKS, GROUPS, (("a", "b"),), null_block_id=null_block_id)
    return allocate_canonical(config, [LAYOUT, LAYOUT]).caches


def three_groups() -> CanonicalKVCaches:
    """Make three groups; group 1 shares a tensor with either neighbour, which share none."""
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(NUM_BLOCKS, 8, dtype=torch.int8), 8) for _ in range(2)
    ]
    first, second = (CanonicalKVCacheRef(index, 8) for index in range(2))
    return CanonicalKVCaches(tensors, [[first], [first, second], [second]])


@pytest.fixture
async def overlaid_engine() -> AsyncIterator[TransferEngine]:
    caches = overlaid()
    sizes = [tuple(ref.page_size_bytes for ref in refs) for refs in caches.group_data_refs]
    groups = tuple(GroupIdentity(page_sizes_bytes=pages) for pages in sizes)
    backend = DictBackend(DictConfig(), Namespace(model="m", groups=groups))
    async with TransferEngine(caches, backend) as engine:
        yield engine


async def test_a_block_of_two_groups_is_neither_loaded_nor_stored(
    overlaid_engine: TransferEngine,
) -> None:
    assert await overlaid_engine.store([K0, K1], [[1], [2]]) == [DONE, DONE]
    for call in (overlaid_engine.load, overlaid_engine.store):
        with pytest.raises(DuplicateError, match=r"block_ids\[1\] is 5; .* group 0"):
            await call([K0, K1], [[5], [5]])
    assert await overlaid_engine.load([K0, K1], [[5], [6]]) == [DONE, DONE]


def keys_in(*groups: int) -> list[BlockKey]:
    return [make_block_key(bytes([65 + index]), group) for index, group in enumerate(groups)]


@pytest.mark.parametrize("ids", [[[3], [3], []], [[], [1, 3], [3]], [[1], [2, 3], [3]]])
def test_each_pair_of_groups_that_shares_a_tensor_is_compared(ids: list[list[int]]) -> None:
    keys = keys_in(*(group for group, of_one in enumerate(ids) for _ in of_one))
    with pytest.raises(DuplicateError, match="is 3"):
        describe_batch(BlockDescriber(three_groups()), keys, ids, None)


@pytest.mark.parametrize("null_block_id", [0, 7])
def test_nothing_is_loaded_into_the_null_block(null_block_id: int) -> None:
    describer = BlockDescriber(overlaid(null_block_id=null_block_id))
    ids = [[1, null_block_id], [2]]
    with pytest.raises(InvalidArgumentError, match=rf"block_ids\[0\] is {null_block_id}; .*null"):
        describe_batch(describer, keys_in(0, 0, 1), ids, None, direction=Direction.LOAD)
    stored = describe_batch(describer, keys_in(0, 0, 1), ids, None, direction=Direction.STORE)
    assert stored.num_blocks == 3
    null = [[null_block_id]] * 2
    stored = describe_batch(describer, keys_in(0, 1), null, None, direction=Direction.STORE)
    assert stored.num_blocks == 2
