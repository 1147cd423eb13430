"""Every system call within an operation on files may fail, be cut short, or be the last one.

In the manner of SQLite, as `test_memory_shortage` does with memory: an operation runs again and
again, and its next call fails each time, or moves fewer bytes, or another program has just removed
the file, or the process is killed there, perhaps with all that the disk had not yet written. Python
itself repeats calls that a signal interrupts. Source: <https://sqlite.org/testing.html>.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, TypeVar, cast

import pytest

from kvxfer import Outcome, Status, runtime
from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.file.block_writer import Durability
from kvxfer.backends.file.folder_store import FolderStore
from kvxfer.backends.file.folders import Ledger
from kvxfer.backends.host import HostBackend
from kvxfer.backends.object import S3Backend, S3Config
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.pages.maintenance import BlockCheck, GarbageCollection, StoreCheck
from kvxfer.pages.names import QUARANTINE, file_name
from kvxfer.testing.simulation import Scenario, Simulation, Step, run_seed
from kvxfer.testing.simulation.disk import SimulatedDisk
from kvxfer.testing.simulation.process import FIRST_PID
from kvxfer.testing.simulation.scheduler import SimulatedProcess
from kvxfer.tiering import TieredBackend
from kvxfer.units import ByteSize
from tests.simulation.files import FILE_BYTES, ROOT, leftovers_of_files
from tests.simulation.object_storage import REQUESTS, BucketFault, SimulatedBucket
from tests.simulation.objects import leftovers_of_bucket
from tests.simulation.test_memory_shortage import (
    KEYS,
    LIMIT_S,
    MOST_S,
    NUM_BLOCKS,
    REST_S,
    Shortage,
    World,
    delete,
    load,
    look_up,
    store,
)
from tests.simulation.tiers import join, leftovers_of_host, leftovers_of_tiers, open_host

MOST_RUNS = 6
"""Maximum faults of an operation, evenly spread; all in `make exhaustive`."""

MEDIUM = (errno.EIO, errno.ESTALE)
NAMING = (errno.EACCES, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*MEDIUM, errno.EACCES, errno.EMFILE),
    "create": (*MEDIUM, *NAMING, *FULL, errno.EMFILE),
    "stat": (*MEDIUM, errno.EACCES),
    "fstat": MEDIUM,
    "statvfs": MEDIUM,
    "listdir": (*MEDIUM, errno.EACCES, errno.EMFILE),
    "mkdir": (*MEDIUM, *NAMING, *FULL),
    "makedirs": (*MEDIUM, *NAMING, *FULL),
    "rename": (*MEDIUM, *NAMING, *FULL),
    "rmdir": (*MEDIUM, *NAMING, errno.EBUSY),
    "unlink": (*MEDIUM, *NAMING),
    "utime": (*MEDIUM, *NAMING),
    "pread": MEDIUM,
    "read_pieces": MEDIUM,
    "pwrite": (*MEDIUM, *FULL),
    "write_pieces": (*MEDIUM, *FULL),
    "ftruncate": (errno.EIO,),
    "fsync": (*MEDIUM, *FULL),
    "sync_file_system": (errno.EIO, errno.ENOSPC),
    "flock": (*MEDIUM, errno.ENOLCK),
    "close": (errno.EIO, errno.EDQUOT),
}
"""Errors that each call may give; a file that is closed with an error is closed all the same."""
SHORT, GONE, KILLED, TORN, CUT = "short", "gone", "killed", "torn", "cut"
MOVES = ("pread", "read_pieces", "pwrite", "write_pieces")
NAMES = ("open", "stat", "rename", "rmdir", "unlink", "utime")
Fault = int | str
"""An error number, a fault of a bucket, or one of the words above."""

T = TypeVar("T")


class Trouble:
    """Fault of one call of the world; counts the calls that may have one while it `is_on`."""

    def __init__(self, simulation: Simulation, fails_at: int, fault: Fault) -> None:
        self.simulation, self.fails_at, self.fault = simulation, fails_at, fault
        self.process = SimulatedProcess("a", FIRST_PID)
        self.calls: list[str] = []
        self.is_on = False
        self.where = ""
        self.removed: set[str] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def is_due(self, call: str, where: object) -> bool:
        """Count a call, and return whether it is the one to have the fault."""
        if not self.is_on or self.process.has_ended:
            return False
        self.calls.append(call)
        if len(self.calls) == self.fails_at:
            self.where = f"{call}{where}"
        return len(self.calls) == self.fails_at

    def kill(self) -> None:
        self.process.has_ended = self.process.is_stopped = True
        self.simulation.runtime.files.forget(self.process)
        self.simulation.runtime.scheduler.wait_until(bool, object())


class DiskTrouble(Trouble):
    """Fault of a system call."""

    def __init__(self, simulation: Simulation, fails_at: int, fault: Fault) -> None:
        super().__init__(simulation, fails_at, fault)
        self._disk = simulation.runtime.files
        for name in {*ERRORS} - {"create"}:
            setattr(self._disk, name, partial(self._call, name, getattr(self._disk, name)))

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **given: Any) -> Any:
        is_new = name == "open" and args[1] & os.O_CREAT
        if not self.is_due("create" if is_new else name, args):
            return call(*args, **given)
        if isinstance(self.fault, int):
            self._fail(name, call, args)
        if self.fault in (KILLED, CUT):
            self.kill()
        if self.fault in (SHORT, TORN):
            args = _shorter(name, args)
        if self.fault == GONE and os.fsdecode(args[0]) not in (str(ROOT), str(ROOT.parent)):
            self._remove(args[0], given.get("dir_fd", given.get("src_dir_fd")))
        result = call(*args, **given)
        if self.fault == TORN:
            self.kill()
        return result

    def _fail(self, name: str, call: Callable[..., Any], args: Any) -> None:
        """Raise the error; a failed sync drops the writes, and a close closes all the same."""
        if name == "close":
            call(*args)
        if name == "fsync":
            self._disk._get(args[0]).node.pending = []
        if name == "sync_file_system":
            for node in self._disk._nodes.values():
                node.pending = []
        assert isinstance(self.fault, int)
        path = [os.fsdecode(args[0])] if args and not isinstance(args[0], int) else []
        raise OSError(self.fault, os.strerror(self.fault), *path)

    def _remove(self, path: Any, folder_fd: int | None) -> None:
        """Remove what a call is about to use, as another program may do."""
        folder, name = self._disk._find(path, folder_fd)
        node = folder.names.get(name)
        if node is not None:
            inner = [*self._disk._paths(node, name)]
            self.removed |= {each.rpartition("/")[2] for each, _ in inner}
            for _, each in reversed(inner):
                if each.names:
                    self._disk._change(each, dict.fromkeys(each.names))
            self._disk._change(folder, {name: None})


def _shorter(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a call move about half of the bytes, or of the first piece."""
    fd, what, *rest = args
    if name == "pread":
        return fd, (what + 1) // 2, *rest
    if name == "pwrite":
        return fd, what[: (len(what) + 1) // 2], *rest
    numbers = (ctypes.c_uint64 * 2).from_address(what)
    half = (ctypes.c_uint64 * 2)(numbers[0], (numbers[1] + 1) // 2)
    _HALVES[:] = [half]
    return fd, ctypes.addressof(half), 1, *rest[1:]


_HALVES: list[object] = []
"""Memory of the last piece that was halved."""


class RequestTrouble(Trouble):
    """Fault of a request to a bucket; a `TORN` one reaches the bucket as its process is killed."""

    def __init__(self, simulation: Simulation, fails_at: int, fault: Fault) -> None:
        super().__init__(simulation, fails_at, fault)
        self.bucket = SimulatedBucket(simulation)
        self._draw = self.bucket.draw
        self.bucket.draw = self._draw_fault  # type: ignore[method-assign]
        self._last: Callable[[], object] = bool

    def open_client(self) -> S3Config:
        config, client = self.bucket.open_client("alone", path="prefix", timeout_s=2.0)
        ask, self._client = client._ask, client

        async def ask_noted(name_of_request: str, name: str, apply: Callable[[], T]) -> T:
            self._last = apply
            return await ask(name_of_request, name, apply)

        client._ask = ask_noted  # type: ignore[method-assign]
        return config

    def _draw_fault(self, request: str, random: Random) -> tuple[BucketFault | None, float]:
        if not self.is_due(request, ""):
            return self._draw(request, random)
        if isinstance(self.fault, BucketFault):
            return self.fault, 5.0
        if self.fault == TORN:
            with contextlib.suppress(Exception):
                self._last()
        self.kill()
        return None, 0.0


class TroubleScenario(Scenario):
    """An operation of a process that has trouble once; then a new process opens the store."""

    name = "trouble"

    def __init__(self, name: str, fails_at: int, fault: Fault) -> None:
        self._open, self._operation, self._may_go = OPERATIONS[name]
        self._fails_at, self._fault = fails_at, fault
        self._was_cut = fault == CUT and name != "store durably"
        if fault in FULL:
            self._may_go = EVERY  # others are evicted for those that do not fit

    def plan(self, random: Random) -> list[Step]:
        del random
        return []

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        del steps
        kind = RequestTrouble if self._open is open_bucket else DiskTrouble
        self.trouble = kind(simulation, self._fails_at, self._fault)
        self._must: set[int] = set()
        scheduler, process = simulation.runtime.scheduler, self.trouble.process
        thread = scheduler.start(lambda: runtime.run(self._live(simulation)), "a", process)
        while not (thread.ended or process.has_ended):
            thread.join(1.0)
        if self._fault == CUT and process.has_ended:
            simulation.runtime.files.cut_power()
        simulation.run(self._live_again(simulation))
        runtime.sleep(REST_S)
        simulation.require_no_threads()
        if opened := simulation.runtime.files.descriptors():
            simulation.fail("descriptors left", opened)
        if left := [*_files_of(simulation, ".claim"), *_files_of(simulation, ".tmp")]:
            simulation.fail("files left", left)

    async def _live(self, simulation: Simulation) -> None:
        """Live to the end, or until the process is killed."""
        world = World(simulation, Shortage(0))
        subject = self._open(self.trouble, world)
        await subject.start()
        assert all(each.done for each in await world.store(subject, range(NUM_BLOCKS)))
        await subject.flush()
        await asyncio.sleep(REST_S)
        self._must = set(range(NUM_BLOCKS)) - self._may_go
        world.shortage = self.trouble  # type: ignore[assignment]
        try:
            outcomes = await asyncio.wait_for(self._operation(world, subject), MOST_S)
            self._note_stored(outcomes)
        except TimeoutError:
            simulation.fail("hangs")
        except BackendUnavailableError as exc:
            if self._operation in (store, load):
                simulation.fail("raised", repr(exc))
        world.shortage = Shortage(0)
        await self._look_twice(simulation, world, subject)

    async def _live_again(self, simulation: Simulation) -> None:
        """Open the store as a new process, without help."""
        world = World(simulation, Shortage(0))
        subject = self._open(self.trouble, world)
        await subject.start()
        await self._look_twice(simulation, world, subject)

    async def _look_twice(self, simulation: Simulation, world: World, subject: Any) -> None:
        """Check what is there and held, and again after the operation has succeeded; close."""
        await self._look(simulation, world, subject)
        outcomes = await self._operation(world, subject)
        is_gone = self.trouble.removed and self._operation in (load, promote)
        if not (is_gone or all(each.done for each in outcomes)):
            simulation.fail("fails again", outcomes)
        self._note_stored(outcomes)
        await self._look(simulation, world, subject)
        await subject.aclose()

    def _note_stored(self, outcomes: Sequence[Outcome]) -> None:
        """Note which blocks must be there."""
        if self._operation is store:
            done = {n for n, each in zip(STORED, outcomes, strict=True) if each.done}
            self._must |= done - self._may_go

    async def _look(self, simulation: Simulation, world: World, subject: Any) -> None:
        await asyncio.sleep(REST_S)
        if left := _leftovers(subject):
            simulation.fail("left behind", left)
        lowest = subject.tiers[-1] if isinstance(subject, TieredBackend) else subject
        if isinstance(lowest, FileBackend):
            self._require_count(simulation, is_exact=False)
        found = await world.load(lowest, range(KEYS))
        there = {n for n, each in enumerate(found) if each.done}
        for number, each in enumerate(found):
            may_be_torn = number in self._may_go or (self._was_cut and number not in self._must)
            is_torn = may_be_torn and each.status is Status.CORRUPT
            if not (each.done or each.status is Status.MISSING or is_torn):
                simulation.fail("cannot be loaded", each)
        gone = {n for n in range(KEYS) if file_name(world.keys[n]) in self.trouble.removed}
        if lost := self._must - gone - there:
            simulation.fail("lost", lost)
        self._must &= there
        if isinstance(lowest, FileBackend):
            if isinstance(self._fault, int) and self._operation not in OF_OTHERS:
                self._require_known(simulation, lowest)
            lowest._space.begin_scan()
            await lowest.wait_indexed()
            await asyncio.sleep(REST_S)
            self._require_count(simulation, is_exact=True)
            self._require_known(simulation, lowest)

    def _require_known(self, simulation: Simulation, files: FileBackend) -> None:
        num_known = len(files._space.index._entries)
        num_files = sum(QUARANTINE not in path for path in _files_of(simulation))
        if num_known != num_files:
            simulation.fail("count", f"{num_known} files are known of {num_files}")

    def _require_count(self, simulation: Simulation, *, is_exact: bool) -> None:
        """Check the count against the files, and what is open; only a walk makes it exact."""
        there = sum(-(-size // 4096) * 4096 for size in _files_of(simulation).values())
        ledger = Ledger(ROOT)
        with ledger.locked():
            used, is_known = ledger.used, ledger.known
        ledger.close()
        is_right = used == there if is_exact else used >= there or self._fault in (CUT, GONE)
        if (is_known or is_exact) and not is_right:
            simulation.fail("count", f"{used} bytes are counted of {there}")
        temporary = _files_of(simulation, ".tmp")
        if temporary and is_exact and not self.trouble.where.startswith("unlink"):
            simulation.fail("temporary files", temporary)
        opened = [each.node for each in simulation.runtime.files._opened.values()]
        folders = [each.number for each in opened if each.is_folder and each.num_names]
        num_files = sum(not each.is_folder for each in opened)
        if len({*folders}) < len(folders) or num_files != 2:  # the count and a claim
            simulation.fail("descriptors", f"of folders {folders}, and {num_files} of files")


def _files_of(simulation: Simulation, suffix: str = ".safetensors") -> dict[str, int]:
    """List files of the store, with their sizes in bytes."""
    files = simulation.runtime.files.files().items()
    return {path: n for path, n in files if path.startswith(f"{ROOT}/") and path.endswith(suffix)}


def _leftovers(subject: Any) -> list[str]:
    if isinstance(subject, TieredBackend):
        host, files = subject.tiers
        assert isinstance(host, HostBackend)
        return leftovers_of_tiers(subject) + leftovers_of_host(host) + _leftovers(files)
    is_folder = isinstance(subject, FileBackend)
    return leftovers_of_files(subject) if is_folder else leftovers_of_bucket(subject)


def open_store(
    _: object, world: World, *, num_files: int = 4 * KEYS, durability: Durability = "none"
) -> FileBackend:
    config = FileConfig(
        path=str(ROOT),
        capacity=ByteSize(num_files * FILE_BYTES),
        min_free=ByteSize(0),
        direct="off",
        engine="posix",
        durability=durability,
        read_threads=1,
        write_threads=1,
    )
    return FileBackend(config, world.namespace)


def open_tiers(_: object, world: World) -> TieredBackend:
    host = open_host(NUM_BLOCKS + 1, world.namespace)
    return join([host, open_store(_, world)], world.namespace)


def open_bucket(trouble: RequestTrouble, world: World) -> S3Backend:
    return S3Backend(trouble.open_client(), world.namespace)


async def purge(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await backend.purge()
    return []


async def purge_prefix(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await backend.purge(world.keys[0][:1])
    return []


async def flush(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        await backend.flush()
    return []


async def walk(world: World, backend: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        backend._space.begin_scan()
        await backend.wait_indexed()
    return []


async def open_again(world: World, _: Any) -> Sequence[Outcome]:
    with world.shortage.on():
        second = open_store(None, world)
        await second.wait_indexed()
    await second.aclose()
    return []


async def close(world: World, _: Any) -> Sequence[Outcome]:
    second = open_store(None, world)
    await second.wait_indexed()
    with world.shortage.on():
        await second.aclose()
    return []


async def load_damaged(world: World, backend: Any) -> Sequence[Outcome]:
    disk = cast("SimulatedDisk", runtime.disk())
    name = file_name(world.keys[1])
    for path in disk.files():
        if path.endswith(name) and QUARANTINE not in path:
            disk.damage(path)
    with world.shortage.on():
        await backend.load(world.keys[1:2], world._memory.describe(0, [KEYS + 1]))
    return []


async def store_in_moved(world: World, backend: Any) -> Sequence[Outcome]:
    disk = runtime.disk()
    with contextlib.suppress(FileNotFoundError):
        moved = f"/new/{runtime.token_bytes(4).hex()}"
        disk.rename(ROOT / world.namespace.fingerprint, moved)
    return await store(world, backend)


async def collect(world: World, _: Any) -> Sequence[Outcome]:
    def run() -> None:
        with contextlib.suppress(OSError, InvalidArgumentError), world.shortage.on():
            GarbageCollection(FolderStore(ROOT), capacity_bytes=2 * FILE_BYTES).run()

    await runtime.run_aside("operator", run)
    return []


async def check(world: World, _: Any) -> Sequence[Outcome]:
    def run() -> None:
        with contextlib.suppress(OSError, InvalidArgumentError), world.shortage.on():
            checked = StoreCheck(FolderStore(ROOT), BlockCheck())
            list(checked.verify(repair=True))
            checked.clean_up()

    await runtime.run_aside("operator", run)
    return []


async def store_below(world: World, tiers: Any) -> Sequence[Outcome]:
    outcomes = await store(world, tiers)
    with world.shortage.on():
        await tiers.flush()
    return outcomes


async def promote(world: World, tiers: Any) -> Sequence[Outcome]:
    await tiers.tiers[0].delete(world.keys[:2])
    with world.shortage.on():
        await tiers.lookup(world.keys[:2])
    return await load(world, tiers)


OF_OTHERS = (open_again, collect, check, store_in_moved)
"""Operations whose removals a process learns by a walk."""
Operation = Callable[[World, Any], Awaitable[Sequence[Outcome]]]
STORED = (0, KEYS - 2, KEYS - 1)
NONE, EVERY = frozenset[int](), frozenset(range(KEYS))
OPERATIONS: dict[str, tuple[Any, Operation, frozenset[int]]] = {
    "store": (open_store, store, NONE),
    "store durably": (partial(open_store, durability="fsync"), store, NONE),
    "store in a full store": (
        partial(open_store, num_files=NUM_BLOCKS),
        store,
        EVERY - {0},
    ),
    "store in a moved folder": (open_store, store_in_moved, EVERY),
    "load": (open_store, load, NONE),
    "load a damaged file": (open_store, load_damaged, frozenset((1,))),
    "look up": (open_store, look_up, NONE),
    "delete": (open_store, delete, frozenset((0, KEYS - 1))),
    "purge": (open_store, purge, EVERY),
    "purge a prefix": (open_store, purge_prefix, frozenset((0,))),
    "flush": (open_store, flush, NONE),
    "walk": (open_store, walk, NONE),
    "open": (open_store, open_again, NONE),
    "close": (open_store, close, NONE),
    "collect": (open_store, collect, EVERY),
    "check": (open_store, check, NONE),
    "store in tiers": (open_tiers, store_below, NONE),
    "promote": (open_tiers, promote, NONE),
    "store in a bucket": (open_bucket, store, NONE),
    "load from a bucket": (open_bucket, load, NONE),
    "look up in a bucket": (open_bucket, look_up, NONE),
    "delete from a bucket": (open_bucket, delete, frozenset((0, KEYS - 1))),
    "purge a prefix of a bucket": (open_bucket, purge_prefix, frozenset((0,))),
}


def faults_of(call: str) -> Iterator[Fault]:
    """List what may go wrong with a call, or with a request."""
    if call in REQUESTS:
        yield from (*BucketFault, KILLED, TORN)
        return
    yield from ERRORS[call]
    yield from (KILLED, CUT)
    if call in MOVES:
        yield from (SHORT, TORN)
    if call in NAMES:
        yield GONE


def run_once(name: str, fails_at: int, fault: Fault) -> tuple[Trouble, list[str]]:
    """Run an operation whose call number `fails_at` has a fault; return what was found."""
    scenario = TroubleScenario(name, fails_at, fault)
    run = run_seed(scenario, 1)
    return scenario.trouble, [str(each) for each in run.violations]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "most_runs", [MOST_RUNS, pytest.param(1 << 20, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_system_call_that_fails_or_is_the_last_one_loses_and_leaves_nothing(
    name: str, most_runs: int
) -> None:
    calm, found = run_once(name, 0, KILLED)
    assert (len(calm.calls) > 0, found) == (True, [])
    every = [(at, f) for at, call in enumerate(calm.calls, 1) for f in faults_of(call)]
    some = every[:: 1 + len(every) // most_runs]
    runs = {each: run_once(name, *each) for each in some}
    assert {f"{of}, {each.where}": found for of, (each, found) in runs.items() if found} == {}
