"""Every step of an operation may be interrupted: nothing leaks, hangs or is lost.

In the manner of SQLite: an operation runs again and again, and its next step is interrupted each
time: a call of a function of kvxfer fails for want of memory, the caller is cancelled, or what it
calls is closed. Not failed is what nothing could undo: clean-up (`except`, `finally`, `__exit__`),
callbacks, which have nobody to raise to, looks at a transfer that was begun, steps of eviction
policies, and reports to observers. Source: <https://sqlite.org/testing.html>.
"""

import ast
import asyncio
import dis
import functools
import hashlib
import inspect
import operator
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import numpy as np
import pytest

from kvxfer import Backend, BlockKey, Outcome, Status, runtime
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostBackend
from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer, discovery
from kvxfer.backends.nixl.client import ASKED_AT_A_PEER, PIECES_AT_A_PEER
from kvxfer.backends.object import S3Backend
from kvxfer.backends.pool import PoolBackend, PoolConfig, PoolServer
from kvxfer.errors import ClosedError
from kvxfer.face import RowPool, RowStore
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.lending import PromptExchange, prompt_exchange
from kvxfer.lending.handover import Handover
from kvxfer.runtime import Threads, run_aside
from kvxfer.storage import Namespace
from kvxfer.storage.backend import DONE, MISSING
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import make_block_key
from kvxfer.storage.lending import BlockParts
from kvxfer.testing import BlockMemory, DictBackend, DictConfig, FakeNixlAgent
from kvxfer.testing.simulation import Scenario, Simulation, Step, run_seed
from kvxfer.testing.simulation.event_loop import _Ready
from kvxfer.tiering import TieredBackend
from kvxfer.transfer import FinishedJob, JobId, TransferEngine
from kvxfer.transfer.job import Direction
from kvxfer.units import ByteSize
from tests.simulation.etcd import SimulatedEtcd
from tests.simulation.files import FILE_BYTES, ROOT, leftovers_of_files
from tests.simulation.fleet_scenario import require_no_sockets
from tests.simulation.object_storage import SimulatedBucket
from tests.simulation.objects import leftovers_of_bucket
from tests.simulation.peers import FIRST_PORT
from tests.simulation.tiers import (
    SLOT_BYTES,
    _leftovers_of_staging,
    join,
    leftovers_of_engine,
    leftovers_of_host,
    leftovers_of_tiers,
    open_host,
)
from tests.transfer import handover_engines
from tests.transfer.handover_engines import Engine, prompt

PACKAGE = Path(sys.modules["kvxfer"].__file__ or "").parent
OURS = (f"{PACKAGE}/", f"{PACKAGE.parent}/backends/")
NOT_FAILED = (f"{PACKAGE}/testing/", f"{PACKAGE}/storage/eviction/", f"{PACKAGE}/storage/observer")
LOOKS = (
    *("wait_for_begun", "ask_until_answered", "Begun.wait", "Begun.poll", "Begun._end"),
    *("wait_despite_cancel", "wait_for_all", "_as_future"),
)
CLEAN_UP = (
    "__exit__",
    "__aexit__",
    "aclose",
    "close",
    "leave",
    "_end_hashing",
    "_release",
    "_unpin",
)
CALLERS = ("/asyncio/", "/concurrent/", "/simulation/", "/threading.py")
"""Files whose code calls callbacks and begins tasks."""
ENDS = ("DaemonThreads._call_if_ended", "Server._serve")
"""Last calls of threads, which have nobody to raise to, and of a socket that Python then closes."""
FOUND_BY_WALKS = ("FileIndex._note_gone", "FileIndex._add", "key_in", "Space._evict")
"""Calls whose failure leaves a file unknown until the next walk; not failed, either."""
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
PAGE_BYTES = 64
NUM_BLOCKS = 4
KEYS = 6
PROMPT_BLOCKS = 3
START_S = 1.0
"""Virtual time in which a holder is found."""
REST_S = 30.0
MOST_S = 600.0
MOST_RUNS = {"shortage": 2, "cancellation": 2, "close": 1}
"""Maximum steps that are interrupted in turn, evenly spread; all in `make exhaustive`."""
SEED = 2
"""Seed whose threads switch often, so that a thread also goes on after its caller."""
LIMIT_S = 1_200


class Interruption(ABC):
    """Interruption of one step of an operation; counts the steps while it `is_on`.

    Attributes:
        interrupts_events: Whether events of loops are steps.
        closing: Close of the subject, once it has begun.
        was_cancelled: Whether the operation was cancelled.
        where: Step that was interrupted.
    """

    interrupts_events: ClassVar[bool] = False

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.num_calls = 0
        self.is_on = False
        self.where = ""
        self.closing: asyncio.Task[None] | None = None
        self.was_cancelled = False
        self._running: asyncio.Task[Any] | None = None
        self._subject: Any = None

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call of a function, and perhaps interrupt it; to be a profiler."""
        if 0 < self.fails_at <= self.num_calls:
            sys.setprofile(None)  # of this thread: nothing more is to be counted
        elif event == "call" and self.is_on and self._is_step(frame):
            assert frame.f_back is not None
            self._count(f"{frame.f_code.co_qualname} in line {frame.f_back.f_lineno}")

    def note_event(self, where: object) -> None:
        """Count an event of a loop, just before it, and the begin of the operation."""
        if self.is_on and self.interrupts_events and not 0 < self.fails_at <= self.num_calls:
            self._count(where)

    def begin(self, running: asyncio.Task[Any], subject: Any) -> None:
        """Take note of the operation, before its first step, and of what it calls."""
        self._running, self._subject = running, subject

    @abstractmethod
    def _is_step(self, frame: FrameType) -> bool:
        """Whether a call is a step."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Interrupt the step that has just been counted."""

    def _count(self, where: object) -> None:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            self.where = str(where)
            self._interrupt()

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        sys.setprofile(self.note)  # of this thread; others have it from their start
        self.note_event("the begin")
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_on = False


class Shortage(Interruption):
    """Shortage of memory, for want of which a call fails."""

    def _is_step(self, frame: FrameType) -> bool:
        return _may_fail(frame)

    def _interrupt(self) -> None:
        raise MemoryError  # without a text, as Python raises it


class _Asynchronous(Interruption):
    """Interruption from outside: before an event of a loop, or during a call on another thread."""

    interrupts_events = True

    def _is_step(self, frame: FrameType) -> bool:
        return asyncio._get_running_loop() is None and _is_ours(frame.f_code)

    def _interrupt(self) -> None:
        assert self._running is not None
        loop = self._running.get_loop()
        if asyncio._get_running_loop() is loop:
            self._interrupt_on(loop)
        else:
            loop.call_soon_threadsafe(self._interrupt_on, loop)

    @abstractmethod
    def _interrupt_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Interrupt the operation, on its loop."""


class Cancellation(_Asynchronous):
    """Cancellation of the caller."""

    def _interrupt_on(self, loop: asyncio.AbstractEventLoop) -> None:
        del loop
        assert self._running is not None
        self.was_cancelled = self._running.cancel()


class Close(_Asynchronous):
    """Close of what is called."""

    def _interrupt_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closing = loop.create_task(self._subject.aclose())


def _may_fail(frame: FrameType) -> bool:
    if not _is_ours(frame.f_code) or frame.f_code.co_qualname in LOOKS + ENDS + FOUND_BY_WALKS:
        return False
    at, code = frame.f_lasti, frame.f_code.co_code
    begins = code[at] == dis.opmap["RESUME"] and not code[at + 1] & 3
    if frame.f_code.co_flags & GENERATORS and not begins:
        return False  # goes on after a `yield` or `await`, or is closed
    caller = frame.f_back
    if caller is None or any(part in caller.f_code.co_filename for part in CALLERS):
        return False
    while caller is not None:
        code_of = caller.f_code
        is_ours = code_of.co_filename.startswith(OURS)
        if code_of.co_name in CLEAN_UP or code_of.co_name in LOOKS[:2]:
            return False
        if is_ours and caller.f_lineno in _lines_of_clean_up(code_of.co_filename):
            return False
        caller = caller.f_back
    return True


@functools.cache
def _is_ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(OURS) and not name.startswith(NOT_FAILED) and code.co_name != "<module>"


@functools.cache
def _lines_of_clean_up(path: str) -> set[int]:
    tried = [each for each in ast.walk(ast.parse(Path(path).read_text())) if type(each) is ast.Try]
    bodies = [body for each in tried for body in (each.finalbody, *(h.body for h in each.handlers))]
    return {
        line
        for body in bodies
        for each in body
        for line in range(each.lineno, (each.end_lineno or 0) + 1)
    }


class Polled:
    """Engine over a backend, whose jobs are polled."""

    def __init__(self, world: "World", backend: Backend) -> None:
        self.backend = backend
        self.engine = TransferEngine(world.caches, backend)

    async def start(self) -> None:
        await self.backend.start()
        await self.engine.__aenter__()

    async def move(
        self, submit: Callable[..., JobId], keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> Sequence[Outcome]:
        job_id = submit(keys, [block_ids])
        cancelled: asyncio.CancelledError | None = None
        while True:
            finished: Sequence[FinishedJob] = []
            with suppress(MemoryError):  # of one poll: the next one finds what has ended
                finished = self.engine.get_finished()
            for each in finished:
                if each.job_id != job_id:
                    continue
                if cancelled is not None:
                    raise cancelled
                return each.outcomes
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError as exc:
                cancelled = exc
                self.engine.cancel(job_id)

    async def aclose(self) -> None:
        await self.engine.aclose()


class World:
    """Memory and blocks of a run; block `n` of a store has the bytes of key `n`."""

    def __init__(self, simulation: Simulation, shortage: Interruption) -> None:
        self._simulation = simulation
        self.folder = ""
        self.opened: list[str] = []  # addresses
        self._memory = BlockMemory([(PAGE_BYTES, PAGE_BYTES)], num_blocks=2 * KEYS)
        self.caches, self.namespace = self._memory.caches, self._memory.namespace()
        self.shortage = shortage
        self.keys = [make_block_key(hashlib.sha256(bytes([n])).digest(), 0) for n in range(KEYS)]
        self._pages = [each.tensor.numpy() for each in self.caches.tensors]

    async def store(self, subject: Any, numbers: Sequence[int]) -> Sequence[Outcome]:
        keys, blocks = [self.keys[n] for n in numbers], self._memory.describe(0, numbers)
        with self.shortage.on(), self.filled():
            if isinstance(subject, Polled):
                return await subject.move(subject.engine.submit_store, keys, numbers)
            outcomes: Sequence[Outcome] = await subject.store(keys, blocks)
        return outcomes

    async def load(self, subject: Any, numbers: Sequence[int]) -> Sequence[Outcome]:
        ids = [KEYS + n for n in numbers]
        keys, blocks = [self.keys[n] for n in numbers], self._memory.describe(0, ids)
        try:
            with self.shortage.on():
                if isinstance(subject, Polled):
                    outcomes = await subject.move(subject.engine.submit_load, keys, ids)
                else:
                    outcomes = await subject.load(keys, blocks)
            self.judge(numbers, outcomes)
        finally:
            self.clear()
        return outcomes

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Fill the blocks of a store, which has read them once it has ended."""
        for page in self._pages:
            page[:KEYS] = [[n + 1] for n in range(KEYS)]
        try:
            yield
        finally:
            self.clear()

    def put(self, key: BlockKey, page: Any) -> None:
        """Take a page that was loaded."""
        for each in self._pages:
            each[KEYS + self.keys.index(key), :PAGE_BYTES] = page

    def clear(self) -> None:
        for page in self._pages:
            page[:] = 0

    def judge(self, numbers: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Check the bytes that were loaded."""
        for number, outcome in zip(numbers, outcomes, strict=True):
            found = [page[KEYS + number, :PAGE_BYTES] for page in self._pages]
            if outcome.done and any((each != number + 1).any() for each in found):
                self._simulation.fail("wrong bytes", f"of key {number}")

    def require_done(self, outcomes: Sequence[Outcome]) -> None:
        """Check the outcomes of a call that was not interrupted."""
        if not all(each.done for each in outcomes):
            self._simulation.fail("another call fails", outcomes)

    def require_untouched(self) -> None:
        """Check that nothing has written to the blocks since the last call ended."""
        if any(page.any() for page in self._pages):
            self._simulation.fail("blocks were touched after a call")


class Held:
    """Backend whose blocks another process holds; to be opened once that one listens.

    If it `looks_late`, it notices with its next call that the holder has ended the connection.
    """

    def __init__(
        self, holder: Any, open_backend: Callable[[], Backend], *, looks_late: bool = False
    ) -> None:
        self.holder, self.open, self.looks_late = holder, open_backend, looks_late
        self.backend: Any = None

    async def start(self) -> None:
        await self.holder.start()
        self.backend = await run_aside("open", self.open)
        await self.backend.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    async def aclose(self) -> None:
        await self.backend.aclose()
        await self.holder.aclose()


class Exchanged:
    """Two engines that exchange prompts, each of which encodes its tokens in its blocks."""

    tokens = prompt(4 * PROMPT_BLOCKS)
    ids = (list(range(1, PROMPT_BLOCKS + 1)),)

    def __init__(self, port: int, **config: Any) -> None:
        self.port, self._config = port, config

    async def start(self) -> None:
        self.p, self._worker_p, self.lender = self._open(lends=True)
        self.d, self._worker_d, self.reader = self._open(lends=False)
        self._worker_p.compute(self.tokens, self.ids)

    def _open(self, *, lends: bool) -> tuple[PromptExchange, Engine, Handover]:
        opened = functools.partial(Handover, make_agent=FakeNixlAgent)
        with patch.object(handover_engines, "Handover", opened):
            engine = Engine(port=self.port, lends=lends, **self._config)
        [worker] = engine.workers
        listen: Any = {"listen": f"127.0.0.1:{self.port}"} if lends else {}
        config = NixlConfig(**self._config, **listen)
        caches = worker.reader._describer.caches
        with patch.object(prompt_exchange, "Handover", lambda *_: worker):
            exchange = PromptExchange(config, caches, Namespace(model="m"))
        return exchange, engine, worker

    async def store(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        """Store nothing: prompts are exchanged instead."""
        return [DONE for _ in keys]

    async def load(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        return [MISSING for _ in keys]

    async def fetch(self, ticket: str) -> list[Outcome]:
        """Fetch the prompt; as soon as the call has ended, nothing may write to the blocks."""
        try:
            fetched = await self.d.fetch(ticket, self.tokens, self.ids)
            bad = {*fetched.bad_blocks[0]}
            good = self._worker_d.good(self.tokens, self.ids)[0][0]
        finally:
            for view in self._worker_d.views[0][0]:
                view[:] = -1
        rows = zip(self.ids[0], good, strict=True)
        wrong = [block for block, is_good in rows if not (is_good or block in bad)]
        assert not wrong, f"wrong bytes in {wrong}"
        return [MISSING if block in bad else DONE for block in self.ids[0]]

    @property
    def _num_kept(self) -> int:
        """Number of tickets that are kept; closing ends every hold."""
        return 0 if self.reader._loop.guard.released else len(self.reader.reader._keepers)

    def leftovers(self) -> list[str]:
        self.p.take_ended()
        assert self.lender._lender is not None
        book = self.lender._lender.book
        counts = {
            "tickets of the exchange": len(self.p._lent),
            "tickets": book.num_tickets,
            "offers": len(book._offers),
            "pins": len(book._pins),
            "checksums": len(self.lender._lender._checksums),
            "hashings": len(self.lender._lender._hashings) + len(self.lender._lender._running),
            "tickets that are kept": self._num_kept,
            "calls of loops": sum(len(each._loop._given) for each in (self.lender, self.reader)),
            "written blocks": not self._worker_d.is_untouched(([],)),
        }
        left = [f"{count} {what}" for what, count in counts.items() if count]
        for worker in (self.lender, self.reader):
            left += leftovers_of_exchange(worker._exchange)
        return left

    async def aclose(self) -> None:
        await self.d.aclose()
        await self.p.aclose()


class Rows:
    """Store of pages by rows of memory, whose calls block."""

    def __init__(self, world: "World") -> None:
        self._world = world
        memory = BlockMemory([[PAGE_BYTES]], num_blocks=2 * KEYS)
        self._pages = memory.caches.tensors[0].tensor.numpy().view(np.uint8)[:, :PAGE_BYTES]
        self.backend = open_host(NUM_BLOCKS + 1, memory.namespace())
        self.engine = TransferEngine(memory.caches, self.backend)
        self.rows = RowPool(range(2 * KEYS), waits_for_late=True)
        rows, describer = dict.fromkeys(Direction, self.rows), BlockDescriber(memory.caches)
        self.pages = RowStore(self.engine, rows, name="rows", describer=describer)
        self._threads = Threads("rows", 1)

    async def start(self) -> None:
        """Begin nothing: the engine starts with its first job."""

    async def store(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        def fill(indices: Sequence[int], rows: Sequence[int]) -> None:
            for index, row in zip(indices, rows, strict=True):
                self._pages[row] = self._world.keys.index(keys[index]) + 1

        return await self._move(Direction.STORE, keys, fill)

    async def load(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        def empty(indices: Sequence[int], rows: Sequence[int]) -> None:
            for index, row in zip(indices, rows, strict=True):
                self._world.put(keys[index], self._pages[row])

        return await self._move(Direction.LOAD, keys, empty)

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._threads.run(self.pages.lookup, keys, inf)

    async def purge(self) -> None:
        await self._threads.run(self.pages.purge, inf)

    async def _move(
        self, direction: Direction, keys: Sequence[BlockKey], copy: Callable[..., object]
    ) -> list[Outcome]:
        done = await self._threads.run(self.pages.move, direction, keys, copy, inf)
        return [DONE if each else MISSING for each in done]

    def leftovers(self) -> list[str]:
        counts = {
            "rows in use": self._num_used,
            "purges": self.pages._num_purging,
        }
        left = [f"{count} {what}" for what, count in counts.items() if count]
        return left + leftovers_of_engine(self.engine) + leftovers_of_host(self.backend)

    @property
    def _num_used(self) -> int:
        """Number of rows in use; a closed engine gives late ones back to nobody."""
        is_closed = self.engine._loop.guard.released
        return 0 if is_closed else self.rows.num_rows - len(self.rows._free)

    async def aclose(self) -> None:
        await run_aside("close", self.pages.close)
        await self._threads.aclose()


Operation = Callable[[World, Any], Awaitable[Sequence[Outcome]]]


class ShortageScenario(Scenario):
    """An operation that fails once, and then succeeds."""

    name = "shortage"

    def __init__(
        self,
        open_subject: Callable[[Simulation, World], Any],
        leftovers: Callable[[Any], list[str]],
        operation: Operation,
        shortage: Interruption,
    ) -> None:
        self._open, self._leftovers, self._operation = open_subject, leftovers, operation
        self._shortage = shortage

    def plan(self, random: Random) -> list[Step]:
        del random
        return []

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        del steps
        start = simulation.runtime.start_thread

        def start_noted(target: Callable[..., object], *, name: str, args: Any = ()) -> Any:
            def run() -> None:
                sys.setprofile(self._shortage.note)
                target(*args)

            return start(run, name=name)

        popleft, etcd = _Ready.popleft, SimulatedEtcd(simulation)

        def popleft_noted(ready: Any) -> asyncio.Handle:
            handle = popleft(ready)
            self._shortage.note_event(handle)
            return handle

        with (
            patch.object(simulation.runtime, "start_thread", start_noted),
            patch.object(_Ready, "popleft", popleft_noted),
            patch.object(discovery, "open_session", etcd.open_session),
            patch.object(discovery, "own_loop", etcd.own_loop),
            tempfile.TemporaryDirectory(prefix="kvxfer-shortage-") as self._folder,
        ):
            simulation.run(self._run(simulation))
        runtime.sleep(REST_S)
        simulation.require_no_threads(("kvxfer-etcd",))
        require_no_sockets(simulation)

    async def _run(self, simulation: Simulation) -> None:
        world = World(simulation, Shortage(0))
        world.folder = self._folder
        subject = await self._start(simulation, world)
        world.shortage = self._shortage
        await self._interrupt(simulation, world, subject)
        world.shortage = Shortage(0)
        if isinstance(subject, Held) and subject.looks_late and self._shortage.closing is None:
            await subject.lookup(world.keys)
        if self._shortage.closing is not None:
            await self._end_close(simulation, world, subject)
            subject = await self._start(simulation, world)
        # Blocks whose writer ended for want of memory are written with those of the next store.
        await self._look(simulation, world, subject, may_wait="queued blocks")
        outcomes = await self._operation(world, subject)
        if not all(each.done for each in outcomes):
            simulation.fail("fails again", outcomes)
        await self._look(simulation, world, subject)
        await subject.aclose()

    async def _start(self, simulation: Simulation, world: World) -> Any:
        subject = self._open(simulation, world)
        await subject.start()
        await asyncio.sleep(START_S)
        assert all(each.done for each in await world.store(subject, range(NUM_BLOCKS)))
        await asyncio.sleep(REST_S)
        return subject

    async def _interrupt(self, simulation: Simulation, world: World, subject: Any) -> None:
        """Run the operation, one of whose steps is interrupted."""
        running = asyncio.ensure_future(self._operation(world, subject))
        self._shortage.begin(running, subject)
        if not (await asyncio.wait([running], timeout=MOST_S))[0]:
            simulation.fail("hangs", simulation.stacks())
            running.cancel()
        elif running.cancelled() != self._shortage.was_cancelled:
            simulation.fail("was cancelled" if running.cancelled() else "is not cancelled")
        elif not running.cancelled() and (error := running.exception()) is not None:
            # What is left behind shows whether it was handled.
            simulation.note(repr(error))

    async def _end_close(self, simulation: Simulation, world: World, subject: Any) -> None:
        assert self._shortage.closing is not None
        if not (await asyncio.wait([self._shortage.closing], timeout=MOST_S))[0]:
            simulation.fail("does not close", simulation.stacks())
        await self._shortage.closing
        await asyncio.sleep(REST_S)
        world.require_untouched()
        if left := self._leftovers(subject):
            simulation.fail("left behind by a close", left)

    async def _look(
        self, simulation: Simulation, world: World, subject: Any, *, may_wait: str | None = None
    ) -> None:
        await asyncio.sleep(REST_S)
        world.require_untouched()
        left = [each for each in self._leftovers(subject) if not each.endswith(may_wait or "\n")]
        if left:
            simulation.fail("left behind", left)
        found = await world.load(subject, range(KEYS))
        if not {each.status for each in found} <= {Status.DONE, Status.MISSING}:
            simulation.fail("cannot be loaded", found)


async def store(world: World, backend: Any) -> Sequence[Outcome]:
    return await world.store(backend, [0, KEYS - 2, KEYS - 1])


async def load(world: World, backend: Any) -> Sequence[Outcome]:
    return (await world.load(backend, [0, 1, KEYS - 1]))[:2]


async def look_up(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await backend.lookup(world.keys[1:])
    return []


async def look_up_late(world: World, objects: Any) -> Sequence[Outcome]:
    objects.hang(8.0)
    return await look_up(world, objects)


async def delete(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await backend.delete([world.keys[0], world.keys[-1]])
    return []


async def lend(world: World, backend: Any) -> Sequence[Outcome]:
    parts = BlockParts(world.keys[:2], [0, 0], [2 * PAGE_BYTES, PAGE_BYTES])
    with world.shortage.on():
        async with backend.lend(parts) as lent:
            return [*lent.outcomes]


async def make_room(world: World, backend: Any) -> Sequence[Outcome]:
    parts = BlockParts(world.keys[-2:], [0, 0], [2 * PAGE_BYTES] * 2)
    with world.shortage.on():
        async with backend.make_room(parts):
            pass
    return []


async def flush(world: World, backend: Any) -> Sequence[Outcome]:
    """Store blocks, and have them written to every tier."""
    outcomes = await world.store(backend, [0, KEYS - 2, KEYS - 1])
    with world.shortage.on(), suppress(ClosedError):
        await backend.flush()
    return outcomes


async def promote(world: World, backend: Any) -> Sequence[Outcome]:
    await backend.tiers[0].delete(world.keys[:2])
    with world.shortage.on():
        await backend.lookup(world.keys[:2])
    return await load(world, backend)


async def reconnect(world: World, held: Any) -> Sequence[Outcome]:
    for client in held.backend._exchange.clients.values():
        client.disconnect()
    return await load(world, held)


async def open_and_close(world: World, held: Any) -> Sequence[Outcome]:
    opened: list[Any] = []  # filled even if the call is cancelled meanwhile
    found, threads = [False], Threads("open", 1)
    with world.shortage.on():
        try:
            await threads.run(lambda: opened.append(held.open()))
            await opened[0].start()
            found = await opened[0].lookup(world.keys[:1])
        finally:
            await run_to_the_end(threads.aclose)
            for backend in opened:
                await run_to_the_end(backend.aclose)
    return [DONE if found[0] else MISSING]


async def hand_over(world: World, exchanged: Exchanged) -> Sequence[Outcome]:
    with world.shortage.on():
        ticket = await exchanged.p.offer(exchanged.tokens, exchanged.ids)
        try:
            return await exchanged.fetch(ticket)
        finally:
            await exchanged.d.release(ticket)


async def hand_over_early(world: World, exchanged: Exchanged) -> Sequence[Outcome]:
    tokens, ids = exchanged.tokens, exchanged.ids
    half: dict[str, Any] = {"num_computed_tokens": len(tokens) // 2}
    with world.shortage.on():
        ticket = await exchanged.p.offer(tokens, ids, **half)
        try:
            async with asyncio.TaskGroup() as tasks:
                fetching = tasks.create_task(exchanged.fetch(ticket))
                await exchanged.p.offer(tokens, ids, ticket=ticket)
            return await fetching
        finally:
            exchanged.p.give_up(ticket)


async def offer_twice(world: World, exchanged: Exchanged) -> Sequence[Outcome]:
    """Offer a prompt under a ticket by two calls at once, one of which may be interrupted."""
    tokens, ids = exchanged.tokens, exchanged.ids
    ticket = f"127.0.0.1:{exchanged.port}/twice"
    half: dict[str, Any] = {"num_computed_tokens": len(tokens) // 2, "ticket": ticket}
    offering = asyncio.ensure_future(exchanged.p.offer(tokens, ids, **half))
    try:
        with world.shortage.on():
            await exchanged.p.offer(tokens, ids, **half)
    finally:
        await asyncio.wait([offering])
        fetched = [MISSING]
        if offering.exception() is None:
            await exchanged.p.offer(tokens, ids, ticket=ticket)
            fetched = await exchanged.fetch(ticket)
            world.require_done(fetched)
        exchanged.p.give_up(ticket)
    return fetched


async def ask_and_release(world: World, exchanged: Any) -> Sequence[Outcome]:
    ticket = await exchanged.p.offer(exchanged.tokens, exchanged.ids)
    found = 0
    try:
        with world.shortage.on():
            found = await exchanged.d.ask(ticket, exchanged.tokens)
            await exchanged.d.release(ticket)
    finally:
        with suppress(ClosedError):
            await exchanged.d.release(ticket)
    return [DONE if found == len(exchanged.tokens) else MISSING]


async def purge(world: World, rows: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await rows.purge()
    return await store(world, rows)


async def run_to_the_end(close: Callable[[], Awaitable[object]]) -> None:
    """Close, and again if that was cancelled."""
    try:
        await close()
    except asyncio.CancelledError:
        await close()
        raise


def open_memory(integrity: MemoryIntegrity, _: Simulation, world: World) -> HostBackend:
    return open_host(NUM_BLOCKS + 1, world.namespace, integrity=integrity)


def open_files(_: Simulation, world: World) -> FileBackend:
    config = FileConfig(
        path=str(ROOT),
        capacity=ByteSize(NUM_BLOCKS * FILE_BYTES),
        min_free=ByteSize(0),
        direct="off",
        engine="posix",
    )
    return FileBackend(config, world.namespace)


def open_bucket(simulation: Simulation, world: World) -> S3Backend:
    config, _ = SimulatedBucket(simulation).open_client("alone", path="prefix", timeout_s=2.0)
    return S3Backend(config, world.namespace)


def open_tiers(simulation: Simulation, world: World) -> TieredBackend:
    below = DictBackend(DictConfig(max_blocks=KEYS), world.namespace)
    return join([open_memory(MemoryIntegrity.FENCED, simulation, world), below], world.namespace)


def open_polled(simulation: Simulation, world: World) -> Polled:
    return Polled(world, open_tiers(simulation, world))


def open_peers(
    transport: Literal["auto", "socket"], finds: str, simulation: Simulation, world: World
) -> Held:
    finds += str(len(world.opened)) if finds else ""
    both: dict[str, Any] = {
        "transport": transport,
        "integrity": "full" if transport == "socket" else "fenced",
        "lease_s": 3.0,
        "heartbeat_s": 1.0,
        "discover": finds,
    }
    at, room = f"127.0.0.1:{FIRST_PORT + len(world.opened)}", NUM_BLOCKS + 1
    world.opened.append(at)
    listening = NixlConfig(listen=at, capacity=ByteSize(room * SLOT_BYTES), **both)
    asking = NixlConfig(
        address="" if finds else at, timeout_s=3.0, staging=ByteSize(1 << 16), **both
    )

    def opened() -> NixlBackend:
        return NixlBackend(asking, world.namespace, make_agent=FakeNixlAgent)

    holder = StandalonePeer(
        listening,
        lambda namespace: open_host(room, namespace),
        namespace=world.namespace,
        make_agent=FakeNixlAgent,
    )
    return Held(holder, opened)


def open_pool(simulation: Simulation, world: World) -> Held:
    path, room = Path(world.folder) / f"{len(world.opened)}.sock", NUM_BLOCKS + 1
    world.opened.append(str(path))
    config = PoolConfig(path=str(path), timeout_s=2.0)

    def open_shared(namespace: Namespace) -> HostBackend:
        return open_host(room, namespace, is_shared=True)

    holder = PoolServer(path, room * SLOT_BYTES, open_shared, namespace=world.namespace)
    return Held(holder, lambda: PoolBackend(config, world.namespace), looks_late=True)


def open_exchange(_: Simulation, world: World, **config: Any) -> Exchanged:
    world.opened.append("exchange")
    common = {"lease_s": 2.0, "heartbeat_s": 0.5, "timeout_s": 2.0, "staging": ByteSize(1 << 16)}
    return Exchanged(FIRST_PORT + len(world.opened), **common, **config)


def open_plug(module: str, name: str, _: Simulation, world: World) -> Any:
    kind = getattr(import_module(f"tests.simulation.{module}"), name)
    return kind(world, PAGE_BYTES)


def leftovers_of_peers(held: Held) -> list[str]:
    left = leftovers_of_exchange(held.backend._exchange, held.holder._server)
    counts = {
        "late lookups": held.backend._calls.num_late,
        "late lookups that go on": len(held.backend._calls._abandoned),
    }
    left += [f"{count} {what}" for what, count in counts.items() if count]
    return left + leftovers_of_host(held.holder._tiers.host)


def leftovers_of_exchange(exchange: Any, server: Any = None) -> list[str]:
    """Describe what an idle exchange, and the server of its blocks, still hold."""
    server = server or exchange.server
    sessions = server.sessions if server else []
    clients = [*exchange.clients.values(), *exchange._former_clients]
    counts = {
        "bytes in quarantine": exchange._quarantine.num_bytes,
        "calls of clients": sum(each._num_calls for each in clients),
        "turns of clients": sum(
            PIECES_AT_A_PEER + ASKED_AT_A_PEER - each._in_flight._value - each._asked._value
            for each in clients
        ),
        "requests that wait": sum(
            len(each._connection._waiting) for each in clients if each._connection
        ),
        "tickets of clients": sum(
            len(each._connection.tickets) for each in clients if each._connection
        ),
        "pins of sessions": sum(each.num_pins for each in sessions),
        "jobs of sessions": sum(len(each._jobs) for each in sessions),
        "stores of sessions": sum(len(each._unpublished) for each in sessions),
        "unproven connections": len(server._listener.unproven) if server else 0,
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    for staging in filter(None, (exchange.staging, exchange._generations)):
        left += _leftovers_of_staging(staging, may_lose=False)
    return left


def leftovers_of_pool(held: Held) -> list[str]:
    sessions = list(held.holder._sessions)
    counts = {
        "users of attachments": sum(held.backend._users.values()),
        "pins of sessions": sum(each.num_pins for each in sessions),
        "stores of sessions": sum(len(each._rooms) for each in sessions),
        "sessions too many": max(0, len(sessions) - 1),
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    return left + leftovers_of_host(held.holder._tiers.host)


def leftovers_of_two(backend: TieredBackend) -> list[str]:
    host = backend.tiers[0]
    assert isinstance(host, HostBackend)
    return leftovers_of_tiers(backend) + leftovers_of_host(host)


def leftovers_of_polled(polled: Polled) -> list[str]:
    polled.engine.get_finished()  # of a job whose poll failed
    assert isinstance(polled.backend, TieredBackend)
    return leftovers_of_engine(polled.engine) + leftovers_of_two(polled.backend)


HOST = functools.partial(open_memory, MemoryIntegrity.FENCED), leftovers_of_host
HASHED = functools.partial(open_memory, MemoryIntegrity.FULL), leftovers_of_host
FILES = open_files, leftovers_of_files
BUCKET = open_bucket, leftovers_of_bucket
TIERS = open_tiers, leftovers_of_two
POLLED = open_polled, leftovers_of_polled
PEERS = functools.partial(open_peers, "auto", ""), leftovers_of_peers
SOCKETS = functools.partial(open_peers, "socket", ""), leftovers_of_peers
FOUND = functools.partial(open_peers, "socket", "etcd://127.0.0.1:2379/kvxfer"), leftovers_of_peers
EXCHANGE = (
    functools.partial(open_exchange, transport="auto", integrity="fenced"),
    Exchanged.leftovers,
)
HASHED_EXCHANGE = (
    functools.partial(open_exchange, transport="socket", integrity="full"),
    Exchanged.leftovers,
)
ROWS = (lambda _, world: Rows(world)), Rows.leftovers
POOL = open_pool, leftovers_of_pool

PLUGS = {
    "LMCache": ("lmcache", "lmcache", "Objects"),
    "vLLM": ("vllm", "offloading", "Chunks"),
}
"""Plugs, each with the package that it is for, and the place of the subject."""

OPERATIONS: dict[str, tuple[Any, Operation]] = {
    "store in host memory": (HOST, store),
    "load from host memory": (HOST, load),
    "delete from host memory": (HOST, delete),
    "lend host memory": (HOST, lend),
    "make room in host memory": (HOST, make_room),
    "store in hashed memory": (HASHED, store),
    "load from hashed memory": (HASHED, load),
    "store in files": (FILES, store),
    "load from files": (FILES, load),
    "look up files": (FILES, look_up),
    "delete files": (FILES, delete),
    "flush files": (FILES, flush),
    "store in a bucket": (BUCKET, store),
    "load from a bucket": (BUCKET, load),
    "look up in a bucket": (BUCKET, look_up),
    "delete from a bucket": (BUCKET, delete),
    "store in tiers": (TIERS, store),
    "load from tiers": (TIERS, load),
    "promote": (TIERS, promote),
    "delete from tiers": (TIERS, delete),
    "flush tiers": (TIERS, flush),
    "submit a store": (POLLED, store),
    "submit a load": (POLLED, load),
    "store at a peer": (PEERS, store),
    "load from a peer": (PEERS, load),
    "look up at a peer": (PEERS, look_up),
    "delete at a peer": (PEERS, delete),
    "reconnect to a peer": (PEERS, reconnect),
    "join a peer": (PEERS, open_and_close),
    "store at a peer by sockets": (SOCKETS, store),
    "load from a peer by sockets": (SOCKETS, load),
    "reconnect to a peer by sockets": (SOCKETS, reconnect),
    "join a peer by discovery": (FOUND, open_and_close),
    "store in a pool": (POOL, store),
    "load from a pool": (POOL, load),
    "look up in a pool": (POOL, look_up),
    "delete from a pool": (POOL, delete),
    "attach to a pool": (POOL, open_and_close),
    "store by rows": (ROWS, store),
    "load by rows": (ROWS, load),
    "look up by rows": (ROWS, look_up),
    "purge by rows": (ROWS, purge),
    "hand a prompt over": (EXCHANGE, hand_over),
    "hand a prompt over early": (EXCHANGE, hand_over_early),
    "ask for a prompt": (EXCHANGE, ask_and_release),
    "offer a prompt twice": (EXCHANGE, offer_twice),
    "hand a hashed prompt over": (HASHED_EXCHANGE, hand_over),
    "hand a hashed prompt over early": (HASHED_EXCHANGE, hand_over_early),
}
for plug, (package, module, kind) in PLUGS.items():
    if find_spec(package):
        of_plug = functools.partial(open_plug, module, kind), operator.methodcaller("leftovers")
        OPERATIONS[f"store by {plug}"] = of_plug, store
        OPERATIONS[f"load by {plug}"] = of_plug, load
        OPERATIONS[f"look up by {plug}"] = of_plug, look_up
        if package == "lmcache":
            OPERATIONS[f"delete by {plug}"] = of_plug, delete
            OPERATIONS[f"look up late by {plug}"] = of_plug, look_up_late
IS_LOG = ("was never awaited", "awaited", "never retrieved", "Exception in callback")
"""Reports of asyncio about errors that have been handled, or about work that never began."""


INTERRUPTIONS: dict[str, type[Interruption]] = {
    "shortage": Shortage,
    "cancellation": Cancellation,
    "close": Close,
}


CASES = [(name, kind) for name in OPERATIONS for kind in INTERRUPTIONS]


def is_brief(name: str, kind: str) -> bool:
    """Whether a few steps are tried outside `make exhaustive`, too; long ones only once."""
    return kind == "shortage" or not ("prompt" in name or "peer" in name)


@functools.cache
def count_steps(name: str, kind: type[Interruption]) -> int:
    """Count the steps of an operation, which is not interrupted."""
    calm, found = run_once(name, 0, kind)
    assert (calm.num_calls > 0, found) == (True, [])
    return calm.num_calls


def run_once(
    name: str, fails_at: int, kind: type[Interruption] = Shortage
) -> tuple[Interruption, list[str]]:
    """Run an operation whose step number `fails_at` is interrupted; return what was found."""
    (open_subject, leftovers), operation = OPERATIONS[name]
    shortage = kind(fails_at)
    run = run_seed(ShortageScenario(open_subject, leftovers, operation, shortage), SEED)
    found = [str(each) for each in run.violations]
    return shortage, [each for each in found if not any(text in each for text in IS_LOG)]


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("name", "kind", "most_runs"),
    [
        *((name, kind, MOST_RUNS[kind]) for name, kind in CASES if is_brief(name, kind)),
        *(pytest.param(*case, None, marks=pytest.mark.exhaustive) for case in CASES),
    ],
)
def test_an_operation_that_is_interrupted_leaves_nothing_behind(
    name: str, kind: str, most_runs: int | None
) -> None:
    interrupted = INTERRUPTIONS[kind]
    num_steps = count_steps(name, Shortage if interrupted is Shortage else Cancellation)
    every = 1 if most_runs is None else -(-num_steps // most_runs)
    tried = {n: run_once(name, n, interrupted) for n in range(1 + every // 2, num_steps + 1, every)}
    assert {f"{n}, {each.where}": found for n, (each, found) in tried.items() if found} == {}
