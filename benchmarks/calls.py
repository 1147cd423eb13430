"""Benchmark of the fixed cost of a call: the work that Python does for it, counted, not timed.

Counts are the same on every machine with the same release of Python, so CI compares them with the
limits in `calls.json`. When a call gets cheaper, lower its limits; never raise one.
"""

import contextlib
import ctypes
import itertools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.batches import describe, make_namespace, require_done
from benchmarks.engine_loop import Loop, open_engine
from benchmarks.report import BenchRow, compare
from kvxfer import runtime
from kvxfer.backends.host import HostPool, PoolShape
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.eviction.policies import LRU, RetainingPolicy
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import make_block_key
from kvxfer.units import ByteSize

BLOCK_BYTES = 128 << 10
KEY = make_block_key(b"block", 0)
MESSAGE_BYTES = 4 << 10
"""Bytes of a block that is loaded from a peer, so few that they always arrive in one piece."""
NUM_CHUNKS = 16
LIMITS = Path(__file__).with_name("calls.json")
"""Limits by release of Python, then by case."""

NUM_CALLS = 40
"""Number of calls, of which the cheapest counts: threads and sockets add work to some of them."""


def run(*, quick: bool) -> list[BenchRow]:
    """Count the work of a polled load, a polled store, a load from a peer, and vLLM's lookup.

    Baseline: the limits for this release of Python; without a limit, a case has no goal.

    Args:
        quick: Whether to make fewer calls, the cheapest of which may cost more.
    """
    release = "{}.{}".format(*sys.version_info)
    limits = msgspec.json.decode(LIMITS.read_bytes(), type=dict[str, dict[str, int]])
    rows = []
    for counter in (_PythonCalls(), _Allocations(), _Locks()):
        for name, least in counter.count(8 if quick else NUM_CALLS):
            case = f"{name}, {counter.what}"
            limit = limits.get(release, {}).get(case)
            goal = "" if limit is None else "<= 1"
            against = (least if limit is None else limit) or 0.5  # a count of 1 exceeds 0
            rows.append(compare(case, [least], [against], unit="", goal=goal, of_time=True))
    return rows


class _Counter:
    """Counter of one kind of work, in all threads."""

    what: str

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the work of everything opened inside the block."""
        yield

    def total(self) -> int:
        """Return the count so far."""
        return next(self._numbers)

    def count(self, num_calls: int) -> Iterator[tuple[str, int]]:
        """Count each case several times; yield its name and the smallest count."""
        for name, opened in CASES.items():
            with opened() as call:  # a first call does all imports
                call()
            with self.watching(), opened() as call:
                counts = [self._count(call) for _ in range(num_calls)]
                nothing = min(self._count(int) for _ in range(3))  # the cost of counting itself
            yield name, min(counts) - nothing

    def _count(self, call: Callable[[], object]) -> int:
        before = self.total()
        call()
        return self.total() - before


class _PythonCalls(_Counter):
    """Counter of calls of Python functions, including resumed generators."""

    what = "Python calls"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            next(self._numbers)


class _Allocations(_Counter):
    """Counter of memory allocations for Python objects."""

    what = "allocations"

    def __init__(self) -> None:
        source = Path(__file__).with_name("allocations.c")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "allocations.so")
            command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
            subprocess.run(command, check=True)  # noqa: S603 - the set-up needs gcc, too
            self._library = ctypes.PyDLL(str(library))
        self._library.count_allocations()
        self._total = ctypes.c_ulong.in_dll(self._library, "num_allocations")

    def total(self) -> int:
        return self._total.value


class _Locks(_Counter, runtime.Runtime):
    """Counter of acquired locks and conditions of the runtime."""

    what = "lock operations"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with runtime.use(self):
            yield

    def lock(self) -> threading.Lock:
        return _Lock(self._numbers, threading.Lock())  # type: ignore[return-value]

    def condition(self) -> threading.Condition:
        return threading.Condition(_Lock(self._numbers, threading.RLock()))  # type: ignore[arg-type]


@dataclass
class _Lock:
    """Lock that counts how often it is acquired."""

    _numbers: "itertools.count[int]"
    _lock: Any

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002
        next(self._numbers)
        return bool(self._lock.acquire(blocking, timeout))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@contextlib.contextmanager
def _polled(make_call: Callable[[Loop], Callable[[], object]]) -> Iterator[Callable[[], object]]:
    with open_engine(torch.ones((1, BLOCK_BYTES), dtype=torch.int8)) as engine:
        yield make_call(Loop(engine))


@contextlib.contextmanager
def _peer_load() -> Iterator[Callable[[], object]]:
    """Open a holder and a backend that reads from it through a socket; both sides are counted."""
    namespace = make_namespace(MESSAGE_BYTES)
    memory = np.ones(MESSAGE_BYTES, np.uint8)
    block = describe(memory.ctypes.data, MESSAGE_BYTES, [0], owner=memory)
    capacity = ByteSize(8 * MESSAGE_BYTES)
    served = NixlConfig(listen="127.0.0.1:0", capacity=capacity, transport="socket")
    with contextlib.closing(runtime.new_event_loop()) as loop:
        holder = NixlBackend(served, namespace)
        loop.run_until_complete(holder.start())
        assert holder.server is not None
        config = NixlConfig(address=str(holder.server.endpoint), transport="socket")
        reader = NixlBackend(config, namespace)
        require_done(loop.run_until_complete(reader.store([KEY], block)))
        yield lambda: require_done(loop.run_until_complete(reader.load([KEY], block)))
        for backend in (reader, holder):
            loop.run_until_complete(backend.aclose())


@contextlib.contextmanager
def _vllm_lookup() -> Iterator[Callable[[], object]]:
    """Open the scheduler's side of offloading; the call finds a prompt in host memory."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

    from kvxfer.integrations.vllm.offloading.manager import KVXferOffloadingManager

    keys = [make_block_key(b"%d" % number, 0) for number in range(NUM_CHUNKS)]
    shape = PoolShape(num_slots=NUM_CHUNKS, num_parts=1, part_size_bytes=MESSAGE_BYTES)
    pool = HostPool(shape, make_namespace(MESSAGE_BYTES), CPUCopyEngine(num_threads=1))
    index = BlockIndex(RetainingPolicy(LRU(NUM_CHUNKS)))
    manager = KVXferOffloadingManager(pool, index, emit_events=False)
    stored = manager.prepare_store(keys, ReqContext("stored"))
    assert stored is not None
    pool.seal([*stored.store_spec.slots], stored.keys_to_store)
    manager.complete_store(keys, ReqContext("stored"))

    def look_up() -> None:
        request = ReqContext("request")
        manager.on_new_request(request)
        if not all(manager.lookup(key, request) is LookupResult.HIT for key in keys):
            raise RuntimeError("a chunk was not found")
        manager.on_schedule_end(ScheduleEndContext([request.req_id], ()))
        manager.on_request_finished(request)

    yield look_up
    manager.shutdown()


CASES: dict[str, Callable[[], AbstractContextManager[Callable[[], object]]]] = {
    "polled load of 128 KiB": partial(_polled, lambda loop: loop.loading(1)),
    "polled store of 128 KiB": partial(_polled, lambda loop: loop.storing(1, NUM_CALLS)),
    "load of 4 KiB from a peer": _peer_load,
    f"vLLM's lookup of {NUM_CHUNKS} chunks": _vllm_lookup,
}
