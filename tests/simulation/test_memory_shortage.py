"""Every call within an operation may fail for want of memory: nothing leaks, hangs or is lost.

In the manner of SQLite: an operation runs again and again, and its next call of a function of
kvxfer fails each time. Not failed is what nothing could undo: clean-up (`except`, `finally`,
`__exit__`), callbacks, which have nobody to raise to, looks at a transfer that was begun, steps of
eviction policies, and reports to observers. Source: <https://sqlite.org/testing.html>.
"""

import ast
import asyncio
import dis
import functools
import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import pytest

from kvxfer import Backend, BlockKey, Outcome, Status, runtime
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostBackend
from kvxfer.backends.object import S3Backend
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import make_block_key
from kvxfer.storage.lending import BlockParts
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.simulation import Scenario, Simulation, Step, run_seed
from kvxfer.tiering import TieredBackend
from kvxfer.transfer import JobId, TransferEngine
from kvxfer.units import ByteSize
from tests.simulation.files import FILE_BYTES, ROOT, leftovers_of_files
from tests.simulation.object_storage import SimulatedBucket
from tests.simulation.objects import leftovers_of_bucket
from tests.simulation.tiers import (
    join,
    leftovers_of_engine,
    leftovers_of_host,
    leftovers_of_tiers,
    open_host,
)

PACKAGE = Path(sys.modules["kvxfer"].__file__ or "").parent
OURS = (f"{PACKAGE}/", f"{PACKAGE.parent}/backends/")
NOT_FAILED = (f"{PACKAGE}/testing/", f"{PACKAGE}/storage/eviction/", f"{PACKAGE}/storage/observer")
LOOKS = ("wait_for_begun", "ask_until_answered", "Begun.wait", "Begun.poll", "Begun._end")
CLEAN_UP = ("__exit__", "__aexit__", "aclose", "close", "_release")
CALLERS = ("/asyncio/", "/concurrent/", "/simulation/", "/threading.py")
"""Files whose code calls callbacks and begins tasks."""
FOUND_BY_WALKS = ("FileIndex._note_gone", "FileIndex._add", "key_in", "Space._evict")
"""Calls whose failure leaves a file unknown until the next walk; not failed, either."""
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
PAGE_BYTES = 64
NUM_BLOCKS = 4
KEYS = 6
REST_S = 30.0
MOST_S = 600.0
MOST_RUNS = 20
"""Maximum calls that fail in turn, evenly spread; all in `make exhaustive`."""
LIMIT_S = 300


class Shortage:
    """Failure of one call; counts the calls that may fail while it `is_on`."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.num_calls = 0
        self.is_on = False
        self.where = ""

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call, and let it fail; to be a profiler."""
        if event != "call" or not self.is_on or not _may_fail(frame):
            return
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            assert frame.f_back is not None
            self.where = f"{frame.f_code.co_qualname} in line {frame.f_back.f_lineno}"
            raise MemoryError(self.where)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


def _may_fail(frame: FrameType) -> bool:
    if not _is_ours(frame.f_code) or frame.f_code.co_qualname in LOOKS + FOUND_BY_WALKS:
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
        while True:
            for each in self.engine.get_finished():
                if each.job_id == job_id:
                    return each.outcomes
            await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        await self.engine.aclose()


class World:
    """Memory and blocks of a run; block `n` of a store has the bytes of key `n`."""

    def __init__(self, simulation: Simulation, shortage: Shortage) -> None:
        self._simulation = simulation
        self._memory = BlockMemory([(PAGE_BYTES, PAGE_BYTES)], num_blocks=2 * KEYS)
        self.caches, self.namespace = self._memory.caches, self._memory.namespace()
        self.shortage = shortage
        self.keys = [make_block_key(hashlib.sha256(bytes([n])).digest(), 0) for n in range(KEYS)]
        self._pages = [each.tensor.numpy() for each in self.caches.tensors]
        for page in self._pages:
            page[:KEYS] = [[n + 1] for n in range(KEYS)]

    async def store(self, subject: Any, numbers: Sequence[int]) -> Sequence[Outcome]:
        keys, blocks = [self.keys[n] for n in numbers], self._memory.describe(0, numbers)
        with self.shortage.on():
            if isinstance(subject, Polled):
                return await subject.move(subject.engine.submit_store, keys, numbers)
            outcomes: Sequence[Outcome] = await subject.store(keys, blocks)
        return outcomes

    async def load(self, subject: Any, numbers: Sequence[int]) -> Sequence[Outcome]:
        ids = [KEYS + n for n in numbers]
        keys, blocks = [self.keys[n] for n in numbers], self._memory.describe(0, ids)
        with self.shortage.on():
            if isinstance(subject, Polled):
                outcomes = await subject.move(subject.engine.submit_load, keys, ids)
            else:
                outcomes = await subject.load(keys, blocks)
        self.judge(numbers, outcomes)
        return outcomes

    def judge(self, numbers: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Check the bytes that were loaded, and forget them."""
        for number, outcome in zip(numbers, outcomes, strict=True):
            for page in self._pages:
                found = page[KEYS + number, :PAGE_BYTES]
                if outcome.done and (found != number + 1).any():
                    self._simulation.fail("wrong bytes", f"of key {number}")
                found[:] = 0


Operation = Callable[[World, Any], Awaitable[Sequence[Outcome]]]


class ShortageScenario(Scenario):
    """An operation that fails once, and then succeeds."""

    name = "shortage"

    def __init__(
        self,
        open_subject: Callable[[Simulation, World], Any],
        leftovers: Callable[[Any], list[str]],
        operation: Operation,
        shortage: Shortage,
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

        with patch.object(simulation.runtime, "start_thread", start_noted):
            sys.setprofile(self._shortage.note)
            try:
                simulation.run(self._run(simulation))
            finally:
                sys.setprofile(None)
        runtime.sleep(REST_S)
        simulation.require_no_threads()

    async def _run(self, simulation: Simulation) -> None:
        world = World(simulation, Shortage(0))
        subject = self._open(simulation, world)
        await subject.start()
        assert all(each.done for each in await world.store(subject, range(NUM_BLOCKS)))
        await asyncio.sleep(REST_S)
        world.shortage = self._shortage
        try:
            await asyncio.wait_for(self._operation(world, subject), MOST_S)
        except TimeoutError:
            simulation.fail("hangs")
        except Exception as exc:  # noqa: BLE001 - what is left behind shows whether it was handled
            simulation.note(repr(exc))
        world.shortage = Shortage(0)
        # Blocks whose writer ended for want of memory are written with those of the next store.
        await self._look(simulation, world, subject, may_wait="queued blocks")
        outcomes = await self._operation(world, subject)
        if not all(each.done for each in outcomes):
            simulation.fail("fails again", outcomes)
        await self._look(simulation, world, subject)
        await subject.aclose()

    async def _look(
        self, simulation: Simulation, world: World, subject: Any, *, may_wait: str | None = None
    ) -> None:
        await asyncio.sleep(REST_S)
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


async def promote(world: World, backend: Any) -> Sequence[Outcome]:
    await backend.tiers[0].delete(world.keys[:2])
    with world.shortage.on():
        await backend.lookup(world.keys[:2])
    return await load(world, backend)


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
    "store in a bucket": (BUCKET, store),
    "load from a bucket": (BUCKET, load),
    "look up in a bucket": (BUCKET, look_up),
    "delete from a bucket": (BUCKET, delete),
    "store in tiers": (TIERS, store),
    "load from tiers": (TIERS, load),
    "promote": (TIERS, promote),
    "delete from tiers": (TIERS, delete),
    "submit a store": (POLLED, store),
    "submit a load": (POLLED, load),
}
IS_LOG = ("was never awaited", "awaited", "never retrieved")
"""Reports of asyncio about errors that have been handled, or about work that never began."""


def run_once(name: str, fails_at: int) -> tuple[Shortage, list[str]]:
    """Run an operation whose call number `fails_at` fails; return what was found."""
    (open_subject, leftovers), operation = OPERATIONS[name]
    shortage = Shortage(fails_at)
    run = run_seed(ShortageScenario(open_subject, leftovers, operation, shortage), 1)
    found = [str(each) for each in run.violations]
    return shortage, [each for each in found if not any(text in each for text in IS_LOG)]


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "most_runs", [MOST_RUNS, pytest.param(1 << 20, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_that_fails_for_want_of_memory_leaves_nothing_behind(
    name: str, most_runs: int
) -> None:
    calm, found = run_once(name, 0)
    assert (calm.num_calls > 0, found) == (True, [])
    step = 1 + calm.num_calls // most_runs
    runs = {number: run_once(name, number) for number in range(1, calm.num_calls + 1, step)}
    assert {f"{n}, {each.where}": found for n, (each, found) in runs.items() if found} == {}
