"""Scenario of the plug of LMCache: threads in place of its controllers, over tiers with faults."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import torch
from lmcache.v1.distributed.api import ObjectKey

from kvxfer import Backend, BlockKey, Descriptors, Namespace, Outcome, Status, runtime
from kvxfer.backends.host import HostBackend, MemoryIntegrity
from kvxfer.errors import BackendUnavailableError, KVXferError
from kvxfer.integrations.lmcache import KVXferL2Adapter
from kvxfer.integrations.lmcache.answers import GRACE_S
from kvxfer.integrations.lmcache.object_keys import object_id_of, piece_key, piece_of
from kvxfer.integrations.lmcache.object_store import HEADER
from kvxfer.integrations.lmcache.residents import DELIVERY_S
from kvxfer.runtime import Threads, run_aside
from kvxfer.storage.backend import DONE, MISSING, PARTIAL
from kvxfer.storage.observer import Observable, Observer, Reports
from kvxfer.testing.simulation import FaultyTier, Scenario, Simulation, Step, TierFault
from kvxfer.tiering import TieredBackend
from kvxfer.tiering.tiered_backend import observe
from tests.simulation.polled import carry_out_on_threads, draw_faults
from tests.simulation.tiers import (
    _leftovers_of_staging,
    join,
    late_copies,
    leftovers_of_host,
    leftovers_of_tiers,
    open_host,
    open_tier,
    watch_staging,
)

NUM_THREADS = 3
UNIT_BYTES, PIECE_BYTES = 128, 512
STEP_BYTES = PIECE_BYTES - HEADER.size
SIZES = (100, STEP_BYTES, STEP_BYTES + 1, 1000, 1300, 200)
KEYS = tuple(
    ObjectKey(
        chunk_hash=bytes([number]) * 8, model_name="m" * (128 if number == 3 else 1), kv_rank=number
    )
    for number in range(len(SIZES))
)
SPARE = len(KEYS) - 1
"""Object that occurs in no plan."""
PIECES = tuple(
    tuple(piece_key(object_id_of(key), index) for index in range(-(-size // STEP_BYTES)))
    for key, size in zip(KEYS, SIZES, strict=True)
)
NUMBERS = {object_id_of(key): number for number, key in enumerate(KEYS)}
LISTS = (
    *(("host",), ("host",), ("dict",), ("host", "host"), ("host", "dict"), ("dict", "dict")),
    *(("dict", "host"), ("host", "host", "host"), ("host", "dict", "dict")),
)
SLACK_S = 0.1
QUIET_S = 600.0
CALM_S = 20.0
BY_LINE = 0.02
"""Share of the lines of kvxfer after which threads switch, in every fifth seed."""
LISTENERS = ((0.0,), (0.0,), (0.0, 0.0, 0.3, 3.0))
"""Seconds for which LMCache's listeners block the thread that notifies them."""
CANARY = 0x5B
"""Value of each byte of memory whose task was answered."""


class LMCacheScenario(Scenario):
    """Threads that store, load, look up and delete objects of several pieces through the plug."""

    name: ClassVar[str] = "lmcache"
    num_faulty: ClassVar[int] = 3

    def plan(self, random: Random) -> list[Step]:
        if random.random() < 0.3:
            return self._plan_pieces_gone(random)
        steps, length_s = [], random.choice((0.5, 2.0, 6.0))
        num_keys = random.choice((1, 3, SPARE))
        kinds = ["store"] * 5 + ["load"] * 4 + ["lookup"] * 3 + ["list"]
        for kind in ("delete", "evict", "other"):
            kinds += [kind] * random.choice((0, 0, 2))
        for _ in range(random.choice((8, 30))):
            what = random.choice(kinds)
            arguments: dict[str, Any] = {"thread": random.randrange(NUM_THREADS)}
            if what == "evict":
                number = random.randrange(num_keys)
                chosen = [each for each in range(len(PIECES[number])) if random.random() < 0.6]
                tiers = random.choice(((0,), (1,), (0, 1, 2)))
                arguments |= {"tiers": tiers, "number": number, "indices": tuple(chosen or [0])}
            elif what != "list":
                chosen = random.sample(range(num_keys), random.randint(1, num_keys))
                arguments["numbers"] = tuple(chosen)
            if what == "lookup":
                arguments["hold_s"] = random.choice((0.0, 0.0, 0.5))
            steps.append(Step(random.random() * length_s, what, arguments))
        for _ in range(random.choice((0, 0, 2))):
            away = {"thread": 0, "tier": random.randrange(3), "for_s": random.choice((0.2, 1.0))}
            steps.append(Step(random.random() * length_s, "away", away))
        steps += draw_faults(random, length_s, self.num_faulty)
        if random.random() < 0.2:
            steps.append(Step(random.random() * length_s, "close", {"thread": 0}))
        return sorted(steps, key=lambda step: step.at_s)

    def _plan_pieces_gone(self, random: Random) -> list[Step]:
        """Plan calls for objects that lose pieces meanwhile, to other users or lost peers."""
        number = random.choice((0, 2, 3, 4))
        indices = [each for each in range(len(PIECES[number])) if random.random() < 0.5] or [0]
        tiers = random.choice(((0,), (0, 1, 2)))
        numbers: dict[str, Any] = {"numbers": random.choice(((number,), (number, 1)))}
        evicted = {"thread": 1, "tiers": tiers, "number": number, "indices": tuple(indices)}
        steps = [Step(0.0, "store", {"thread": 0} | numbers), Step(1.2, "evict", evicted)]
        for what in random.choice(((), ("fault",), ("away",))):
            given: dict[str, Any] = {"thread": 2, "tier": random.choice((0, 1, 1)), "for_s": 1.0}
            if what == "fault":
                given["fault"] = random.choice((TierFault.HANG, TierFault.ERROR, TierFault.UNSAFE))
            steps.append(Step(1.0 + 0.2 * random.random(), what, given))
        for what in ("load", "load", "store", "lookup", "lookup"):
            asked = {"thread": random.randrange(NUM_THREADS)} | numbers
            asked |= {"hold_s": 0.0} if what == "lookup" else {}
            steps.append(
                Step(1.2 + random.choice((0.02, 0.02, 0.4)) * random.random(), what, asked)
            )
        return sorted(steps, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        if simulation.random("lines").random() < 0.2:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)
        with simulated(UNIT_BYTES):
            run = _Run(simulation, {step.what for step in steps})
            carry_out_on_threads(simulation, steps, run.carry_out, NUM_THREADS)
            run.end()


@contextmanager
def simulated(unit_bytes: int) -> Iterator[None]:
    """Let the plug run in a simulation, with small pieces."""
    package = "kvxfer.integrations.lmcache"
    bus = "lmcache.v1.distributed.l2_adapters.base.get_event_bus"
    with ExitStack() as patched:
        for name in ("settings", "object_store"):
            patched.enter_context(patch(f"{package}.{name}.UNIT_BYTES", unit_bytes))
        patched.enter_context(patch(f"{package}.answers.create_event_notifier", _Notifier))
        patched.enter_context(patch(bus, Mock))
        yield


class _Notifier:
    """Event file descriptor that threads of the simulation can wait for."""

    def __init__(self) -> None:
        self.num_notified = 0
        self._changed = runtime.condition()

    def fileno(self) -> int:
        return 0

    def notify(self) -> None:
        with self._changed:
            self.num_notified += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until there are more notifications than the `seen` ones."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_notified > seen, timeout_s)

    close = notify


class _Tier(FaultyTier):
    """Tier with faults, which may be away for a time.

    It records deletes of pieces from objects that were whole in all tiers together.
    """

    passes_on = frozenset({Observable, HostBackend})

    def __init__(
        self, inner: Backend, simulation: Simulation, name: str, is_whole: Callable[[int], bool]
    ) -> None:
        super().__init__(inner, simulation, name)
        self.away_until = 0.0
        self.deleted: list[tuple[float, int]] = []
        self._is_whole = is_whole

    @property
    def _is_away(self) -> bool:
        return self._simulation.now < self.away_until

    def has(self, key: BlockKey) -> bool:
        """Whether the tier has a block, even if a fault or its absence hides it."""
        if isinstance(self.inner, HostBackend):
            return self.inner._index.are_ready([key])[0]
        return key in self.inner._blocks  # type: ignore[attr-defined]

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys) if self._is_away else await super().lookup(keys)

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        failed = [Outcome(Status.FAILED, reason="away")] * len(keys)
        return failed if self._is_away else await super().store(keys, blocks)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        if self._is_away:
            return [MISSING] * len(keys)
        outcomes = await super().load(keys, blocks)
        at = [i for i, each in enumerate(outcomes) if each == MISSING and self.has(keys[i])]
        for index in at:  # a `DictBackend` reports a part as missing
            outcomes[index] = PARTIAL
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self._is_away:
            raise BackendUnavailableError("away")
        began, numbers = self._simulation.now, [NUMBERS[piece_of(key)[0]] for key in keys]
        whole = [self._is_whole(number) for number in numbers]
        deleted = await super().delete(keys)
        rows = zip(numbers, whole, deleted, strict=True)
        self.deleted += [(began, number) for number, *is_lost in rows if all(is_lost)]
        return deleted


class _Adapter(KVXferL2Adapter):
    """The plug; it notifies the run of stored and deleted keys before LMCache's bookkeeping."""

    def __init__(self, run: "_Run", params: dict[str, Any]) -> None:
        self._run = run
        super().__init__(params)

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        return self._run.open(namespace, observers)

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._run.note_told(dict(zip(keys, sizes, strict=True)), is_stored=True)
        super()._notify_keys_stored(keys, sizes)

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._run.note_told(dict(zip(keys, sizes, strict=True)), is_stored=False)
        super()._notify_keys_deleted(keys, sizes)


class _Object:
    """Object in memory of LMCache's."""

    def __init__(self, number: int, content: bytes = b"", *, is_other: bool = False) -> None:
        self.raw_data = torch.zeros(SIZES[number], dtype=torch.uint8)
        self.bytes = self.raw_data.numpy()
        if content:
            self.bytes[:] = memoryview(content)
        self.data_ptr = self.raw_data.data_ptr()
        self.metadata = SimpleNamespace(shapes=[number], dtypes=["other" if is_other else "same"])

    def get_size(self) -> int:
        return len(self.bytes)


class _Run:
    def __init__(self, simulation: Simulation, kinds: set[str]) -> None:
        self._simulation = simulation
        self._random = random = simulation.random("lmcache")
        self._kinds = random.choice(LISTS)
        self._is_roomy = random.random() < 0.6
        self._tells_all = {*self._kinds} == {"host"}
        self._delays = random.choice(LISTENERS)
        self._timeout_s = random.choice((0.5, 2.0, CALM_S))
        self._close_timeout_s = random.choice((0.5, 30.0))
        self._keeps_all = self._is_roomy and "evict" not in kinds
        is_fast = self._timeout_s == CALM_S and self._delays == (0.0,)
        self._is_calm = self._keeps_all and is_fast and not {"fault", "away"} & kinds
        self._versions = Counter[int]()
        self._pieces: dict[BlockKey, set[bytes]] = {key: set() for of in PIECES for key in of}
        self._stores: dict[int, list[float]] = {number: [] for number in range(len(KEYS))}
        self._stored: dict[int, float] = {}  # time of the first completed store, by object
        self._excused: dict[int, float] = {} if self._is_roomy else dict.fromkeys(self._stores, 0.0)
        self._deleted: dict[int, tuple[float, float]] = {}
        self._deleting = Counter[int]()
        self._pins, self._unlocks = Counter[int](), Counter[int]()
        self._loading, self._num_loads = Counter[int](), Counter[int]()
        self._told: dict[ObjectKey, int] = {}
        self._answered: list[_Object] = []
        self._close_began = self._close_ended = inf
        self._results: dict[int, Any] = {}
        self._taking = runtime.lock()
        params = {"backend": "host://", "revision": "commit", "piece": PIECE_BYTES}
        params["staging"] = 2 * random.choice((8192, 16384, 65536))
        params |= {"timeout_s": self._timeout_s, "pause_s": random.choice((0.1, 1.0))}
        params["close_timeout_s"] = self._close_timeout_s
        self._adapter = _Adapter(self, params)
        for staging in self._adapter._objects._staging.values():
            watch_staging(simulation, staging)
        self._adapter.set_backend_identity("kvxfer")
        self._is_primed = random.random() < 0.5  # each tier has reported events at least once
        if self._is_primed:
            self._store((SPARE,))
            runtime.sleep(1.0)
        self._began = simulation.now

    def open(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        """Open tiers, as the seed decides."""
        random, copying = self._random, late_copies(self._simulation)
        self._tiers: list[_Tier] = []
        for number, kind in enumerate(self._kinds):
            num_blocks = 64 if self._is_roomy else random.choice((3, 6, 64))
            integrity = random.choice((MemoryIntegrity.FULL, MemoryIntegrity.FENCED))
            inner = open_tier(kind, num_blocks, namespace, integrity, copying)
            self._tiers.append(_Tier(inner, self._simulation, f"{number} {kind}", self._is_whole))
        self._backend: Backend = self._tiers[0]
        if len(self._tiers) > 1 or random.random() < 0.3:
            staging_bytes, pause_s = random.choice((8192, 65536)), random.choice((0.1, 1.0))
            tiers: list[Backend] = [*self._tiers]
            joined = join(tiers, namespace, staging_bytes=staging_bytes, pause_s=pause_s)
            watch_staging(self._simulation, joined._staging)
            self._backend = joined
        return observe(self._backend, Reports(observers))

    def note_told(self, objects: dict[ObjectKey, int], *, is_stored: bool) -> None:
        """Note a report to LMCache: which objects came or are gone, and their sizes."""
        for key, num_bytes in objects.items():
            told = self._told.get(key)
            if told is not None if is_stored else told != num_bytes:
                what = "come" if is_stored else "gone"
                self._simulation.fail("told wrongly", f"{key.kv_rank} {what} {told} {num_bytes}")
            if is_stored:
                self._told[key] = num_bytes
            else:
                self._told.pop(key, None)
        runtime.sleep(self._random.choice(self._delays))

    def carry_out(self, steps: Sequence[Step]) -> None:
        for step in steps:
            runtime.sleep(max(0.0, self._began + step.at_s - self._simulation.now))
            given = {name: each for name, each in step.arguments.items() if name != "thread"}
            self._simulation.note(f"-> {step}")
            self._simulation.num_calls += 1
            said = getattr(self, f"_{step.what}")(**given)
            self._simulation.note(f"<- {step.what}: {said}")

    def _fault(self, tier: int, fault: Any, for_s: float) -> None:
        if tier < len(self._tiers):
            self._tiers[tier].begin_fault(fault, for_s, 1.0)

    def _away(self, tier: int, for_s: float) -> None:
        """Let a tier and those below it be away, if they report no events, like peers."""
        for each, kind in list(zip(self._tiers, self._kinds, strict=True))[tier:]:
            if kind == "dict":
                each.away_until = self._simulation.now + for_s

    def _evict(self, tiers: Sequence[int], number: int, indices: Sequence[int]) -> None:
        """Delete pieces from some tiers behind the back of the plug."""
        keys = [PIECES[number][index] for index in indices]
        if self._tells_all:
            self._excused.setdefault(number, self._simulation.now)
        for tier in [self._tiers[each] for each in tiers if each < len(self._tiers)]:
            with suppress(KVXferError):  # closed
                evicting = self._adapter._objects._loop.submit(tier.inner.delete(keys))
                runtime.result(evicting)

    def _store(self, numbers: Sequence[int]) -> Any:
        objects = [_Object(number, self._make(number)) for number in numbers]
        for number in numbers:
            self._stores[number].append(inf)
        at = {number: len(self._stores[number]) - 1 for number in numbers}
        submit = partial(self._adapter.submit_store_task, [KEYS[n] for n in numbers], [*objects])
        result = self._ask(submit, self._take_stored, self._adapter._stored)
        if result is None:
            return None
        for number in numbers:
            self._stores[number][at[number]] = self._simulation.now
            if result.is_successful():
                self._stored.setdefault(number, self._simulation.now)
        self._answer(objects)
        if result.bytes_transferred() > sum(SIZES[number] for number in numbers):
            self._simulation.fail("more bytes than there are", int(result))
        return result

    def _load(self, numbers: Sequence[int], *, is_other: bool = False) -> object:
        began, objects = self._simulation.now, [_Object(n, is_other=is_other) for n in numbers]
        if is_other:
            for number in numbers:
                self._excused.setdefault(number, began)
        submit = partial(self._adapter.submit_load_task, [KEYS[n] for n in numbers], [*objects])
        self._loading.update(numbers)
        self._num_loads.update(numbers)
        bitmap = self._ask(submit, self._adapter.query_load_result, self._adapter._loaded)
        self._loading.subtract(numbers)
        if bitmap is None:
            return None
        done = [bitmap.test(index) for index in range(len(numbers))]
        for number, each, is_done in zip(numbers, objects, done, strict=True):
            if is_done and is_other:
                self._simulation.fail("loaded into memory of another type", number)
            elif is_done:
                self._judge_bytes(number, each.bytes.tobytes())
            else:
                self._judge_miss(number, began, is_other=is_other)
        self._answer(objects)
        return done

    def _other(self, numbers: Sequence[int]) -> object:
        """Load objects under another data type."""
        return self._load(numbers, is_other=True)

    def _lookup(self, numbers: Sequence[int], hold_s: float) -> object:
        began, keys = self._simulation.now, [KEYS[number] for number in numbers]
        submit = partial(self._adapter.submit_lookup_and_lock_task, keys, {})
        take = self._adapter.query_lookup_and_lock_result
        bitmap = self._ask(submit, take, self._adapter._found)
        if bitmap is None:
            return None
        done = [bitmap.test(index) for index in range(len(numbers))]
        found = [number for number, is_there in zip(numbers, done, strict=True) if is_there]
        self._pins.update(found)
        for number in numbers:
            if number in found:
                self._judge_hit(number, began)
            else:
                self._judge_miss(number, began)
        runtime.sleep(hold_s)
        self._pins.subtract(found)
        self._unlocks.update(found)
        self._adapter.submit_unlock([KEYS[number] for number in found])
        return done

    def _delete(self, numbers: Sequence[int]) -> None:
        began, unlocks = self._simulation.now, self._unlocks.copy()
        pinned = [number for number in numbers if self._pins[number] > 0]
        num_loads = self._num_loads - self._loading  # a delete may keep a block that is being read
        self._deleting.update(numbers)
        self._adapter.delete([KEYS[number] for number in numbers])
        limit_s = self._timeout_s + 1 + DELIVERY_S + SLACK_S
        if self._delays == (0.0,) and self._simulation.now - began > limit_s:
            self._simulation.fail("late", f"delete took {self._simulation.now - began:.3f} s")
        for number in numbers:
            if number not in pinned or self._unlocks[number] != unlocks[number]:
                self._excused[number] = min(began, self._excused.get(number, inf))
                if number not in pinned and self._num_loads[number] == num_loads[number]:
                    self._deleted[number] = began, self._simulation.now
            self._deleting[number] -= 1

    def _list(self) -> object:
        listed: list[tuple[ObjectKey, int]] = []
        cursor: str | None = None
        while True:
            page = self._adapter.list_l2_keys(None, 2, cursor)
            listed += [(each.key.to_object_key(), each.size_bytes) for each in page.entries]
            if (cursor := page.next_page_token) is None:
                break
        if len(dict(listed)) < len(listed) or not all(size for _, size in listed):
            self._simulation.fail("listed wrongly", listed)
        return {NUMBERS[object_id_of(key)]: size for key, size in listed}

    def _close(self) -> None:
        self._close_began, self._is_calm = self._simulation.now, False
        self._adapter.close()
        self._close_ended = self._simulation.now
        took_s = self._close_ended - self._close_began
        if took_s > 2 * self._close_timeout_s + SLACK_S:
            self._simulation.fail("late", f"close took {took_s:.3f} s")

    def _ask(
        self, submit: Callable[[], int], take: Callable[[int], Any], answers: Any
    ) -> Any | None:
        """Submit a task, and wait for its answer; None if the plug was closed before."""
        began, notifier = self._simulation.now, answers._notifier
        ends_at = began + self._timeout_s + GRACE_S + SLACK_S
        task = submit()
        if self._simulation.now - began > SLACK_S:
            self._simulation.fail("late", f"submitted in {self._simulation.now - began:.3f} s")
        while True:
            seen, was_closed = notifier.num_notified, self._close_ended <= self._simulation.now
            if (answer := take(task)) is not None:
                break
            if was_closed:
                if began < self._close_began:
                    self._simulation.fail("never answered", task)
                return None
            if self._simulation.now > ends_at and began < self._close_began:
                self._simulation.fail("late", f"task {task} of {submit}")
                return None
            notifier.wait(seen, max(SLACK_S, ends_at - self._simulation.now))
        if take(task) is not None:
            self._simulation.fail("answered twice", task)
        return answer

    def _take_stored(self, task: int) -> Any | None:
        with self._taking:
            self._results |= self._adapter.pop_completed_store_tasks()
        return self._results.pop(task, None)

    def _answer(self, objects: Sequence[_Object]) -> None:
        """Reuse the memory of objects, since their task was answered."""
        for each in objects:
            each.bytes[:] = CANARY
        self._answered += objects

    def _make(self, number: int) -> bytes:
        """Make the bytes of a store of an object."""
        self._versions[number] += 1
        name = b"%d %d" % (number, self._versions[number])
        content = hashlib.shake_128(name).digest(SIZES[number])
        for key, piece in zip(PIECES[number], _cut(content), strict=True):
            self._pieces[key].add(piece)
        return content

    def _judge_bytes(self, number: int, content: bytes) -> None:
        """Check that each piece is one that a store of the object had at its place."""
        for key, piece in zip(PIECES[number], _cut(content), strict=True):
            if piece not in self._pieces[key]:
                self._simulation.fail("wrong bytes", f"{number}: {piece[:8].hex()}")

    def _judge_hit(self, number: int, began: float) -> None:
        deleted = self._deleted.get(number)
        if not self._stores[number]:
            self._simulation.fail("found, and never stored", number)
        elif self._is_calm and deleted and max(self._stores[number]) < deleted[0]:
            is_over = deleted[1] < began
            if is_over:
                self._simulation.fail("deleted and found again", number)

    def _judge_miss(self, number: int, began: float, *, is_other: bool = False) -> None:
        is_kept = self._stored.get(number, inf) < began and not self._may_be_gone(number)
        if self._is_calm and is_kept and not is_other:
            self._simulation.fail("not found", number)

    def end(self) -> None:
        """Check what is left, and close the plug."""
        runtime.sleep(QUIET_S)
        if self._close_ended == inf:
            self._delays = (0.0,)
            self._delete((SPARE,))  # triggers the plug's clean-up once more
            self._store((SPARE,))
            runtime.sleep(QUIET_S)
            self._judge_end()
            runtime.sleep(QUIET_S)
            self._judge_leftovers()
            self._close()
        runtime.sleep(QUIET_S)
        self._judge_deletes()
        if any((each.bytes != CANARY).any() for each in self._answered):
            self._simulation.fail("memory was touched after the answer")
        if (
            self._close_ended - self._close_began < self._close_timeout_s
        ):  # else a tier may still be open
            self._simulation.require_no_threads()

    def _may_be_gone(self, number: int) -> bool:
        """Whether a delete or another excuse may explain a missing object."""
        return number in self._excused or self._deleting[number] > 0

    def _has(self, key: BlockKey) -> bool:
        return any(tier.has(key) for tier in self._tiers)

    def _is_whole(self, number: int) -> bool:
        """Whether the tiers together have all pieces of an object."""
        return all(map(self._has, PIECES[number]))

    def _judge_end(self) -> None:
        """Check, after all faults, which objects are there, and what LMCache was told of them."""
        self._judge_told()
        for number in range(len(PIECES)):
            is_whole, is_kept = self._is_whole(number), self._keeps_all
            is_kept &= not self._may_be_gone(number)
            if is_kept and number in self._stored and not is_whole:
                self._simulation.fail("lost", number)
            must_be_found = is_whole and self._is_roomy  # else there may be no room to promote it
            is_found = self._lookup((number,), 0.0) == [True]
            if is_found < must_be_found:
                self._simulation.fail("not found, and all its pieces are there", number)
            if is_found > is_whole and is_kept:
                self._simulation.fail("found, and never whole", number)
            if self._load((number,)) != [True] and must_be_found:
                self._simulation.fail("not loaded, and all its pieces are there", number)
        self._judge_told()

    def _judge_told(self) -> None:
        """Check that the reports to LMCache agree with its list and with the tiers."""
        told = {key.kv_rank: num_bytes for key, num_bytes in self._told.items()}
        if (listed := self._list()) != told:
            self._simulation.fail("listed otherwise than told", f"{listed} {told}")
        used = self._adapter.get_usage().total_bytes_used
        num_objects = self._adapter.report_status()["num_objects"]
        if (used, num_objects) != (sum(told.values()), len(told)):
            self._simulation.fail("counted otherwise than told", f"{used} {num_objects} {told}")
        for number, pieces in enumerate(PIECES) if self._tells_all else ():
            there = [self._has(key) for key in pieces]
            is_told = number in told
            if is_told > there[0] or is_told < all(there):
                self._simulation.fail("told otherwise than it is", f"{number} {there}")
            if self._is_primed and there[0] and not all(there):
                self._simulation.fail("part of an object is left", f"{number} {there}")

    def _judge_deletes(self) -> None:
        """Check that no whole object was deleted because a tier was away."""
        for tier in self._tiers:
            for began, number in tier.deleted:
                if began < self._excused.get(number, inf):
                    self._simulation.fail("deleted, and only away", f"{number} in {tier.name}")

    def _judge_leftovers(self) -> None:
        """Check that the idle plug and its tiers have released everything."""
        left = leftovers_of_adapter(self._adapter)
        if isinstance(self._backend, TieredBackend):
            left += leftovers_of_tiers(self._backend)
        for tier in self._tiers:
            if isinstance(tier.inner, HostBackend):
                left += leftovers_of_host(tier.inner)
        for each in left:
            self._simulation.fail("left", each)


def leftovers_of_adapter(adapter: KVXferL2Adapter) -> list[str]:
    """Describe what an idle plug still holds."""
    objects, residents = adapter._objects, adapter._residents
    counts = {
        "locked objects": len(objects._deletes) + len(objects._deletes._turns),
        "late calls": objects._calls.num_late + len(objects._calls._abandoned),
        "calls of the loop": len(objects._loop._given),
        "answers": sum(
            len(each._given) for each in (adapter._stored, adapter._found, adapter._loaded)
        ),
        "tasks": sum(not each.ended for each in adapter._deadlines._tasks),
        "stores": sum(each.num_stores for each in residents._objects.values()),
        "objects to delete": len(residents._broken.keys() & residents._objects.keys()),
    }
    left = [f"{count} {what}" for what, count in counts.items() if count]
    for staging in objects._staging.values():
        left += _leftovers_of_staging(staging, may_lose=False)
    return left


class _ObjectsAdapter(KVXferL2Adapter):
    """The plug over host memory."""

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        self.host = open_host(3 * len(KEYS) // 2, namespace, integrity=MemoryIntegrity.FULL)
        return observe(self.host, Reports(observers))


class Objects:
    """Objects of two pieces, one for each key of the world, whose calls block."""

    def __init__(self, world: Any, object_bytes: int) -> None:
        self._world, self._object_bytes = world, object_bytes
        self._keys = {key: KEYS[number] for number, key in enumerate(world.keys)}
        self._threads = Threads("lmcache", 1)
        self._patched = ExitStack()
        self._is_closed = False

    async def start(self) -> None:
        self._patched.enter_context(simulated(self._object_bytes))
        size = self._object_bytes
        params = {"backend": "host://", "revision": "commit", "piece": size, "staging": 64 * size}
        params |= {"timeout_s": 5.0}
        self.adapter = await run_aside("open", partial(_ObjectsAdapter, params))
        self.adapter.set_backend_identity("kvxfer")

    async def store(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        values = [self._world.keys.index(key) + 1 for key in keys]
        objects = [self._make(value) for value in values]
        done = await self._ask(self.adapter.submit_store_task, keys, objects, self._take_stored)
        return [DONE if done is not None and done.is_successful() else MISSING for _ in keys]

    async def load(self, keys: Sequence[BlockKey], blocks: object) -> list[Outcome]:
        objects, adapter = [self._make(0) for _ in keys], self.adapter
        done = await self._ask(adapter.submit_load_task, keys, objects, adapter.query_load_result)
        loaded = [done is not None and done.test(index) for index in range(len(keys))]
        for key, each, is_there in zip(keys, objects, loaded, strict=True):
            if is_there:
                assert len({*each.bytes.tolist()}) == 1, "parts of several objects"
                self._world.put(key, each.bytes[0])
        return [DONE if each else MISSING for each in loaded]

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        adapter = self.adapter

        def take(task: int) -> Any:
            done = adapter.query_lookup_and_lock_result(task)
            if done is not None:
                there = (key for at, key in enumerate(keys) if done.test(at))
                adapter.submit_unlock([self._keys[key] for key in there])
            return done

        done = await self._ask(adapter.submit_lookup_and_lock_task, keys, {}, take)
        return [done is not None and done.test(index) for index in range(len(keys))]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        await self._threads.run(self.adapter.delete, [self._keys[key] for key in keys])

    def hang(self, seconds: float) -> None:
        """Hang the event loop of the plug."""
        self.adapter._objects.call_soon(partial(runtime.sleep, seconds))

    async def _ask(
        self, submit: Callable[..., int], keys: Sequence[BlockKey], given: Any, take: Any
    ) -> Any:
        """Submit a task and wait for its answer, as a controller does, even if cancelled."""

        def ask() -> Any:
            task = submit([self._keys[key] for key in keys], given)
            answer, began = None, runtime.monotonic()
            while answer is None and not self._is_closed:
                runtime.sleep(0.1)
                with suppress(MemoryError):  # of the controller, which asks again
                    answer = take(task)
                if runtime.monotonic() > began + CALM_S:
                    self._world._simulation.fail("never answered", task)
                    break
            return answer

        return await self._threads.run(ask)

    def _take_stored(self, task: int) -> Any:
        return self.adapter.pop_completed_store_tasks().get(task)

    def _make(self, value: int) -> Any:
        content = torch.full((self._object_bytes,), value, dtype=torch.uint8)
        metadata = SimpleNamespace(shapes=[0], dtypes=["same"])
        return SimpleNamespace(
            raw_data=content,
            bytes=content.numpy(),
            data_ptr=content.data_ptr(),
            metadata=metadata,
            get_size=lambda: self._object_bytes,
        )

    def leftovers(self) -> list[str]:
        left = leftovers_of_host(self.adapter.host)
        if not self._is_closed:  # else nobody has its buffers
            left += leftovers_of_adapter(self.adapter)
            left += [f"{key} is pinned" for key in self.adapter._pins]
        return left

    async def aclose(self) -> None:
        await run_aside("close", self.adapter.close)
        self._is_closed = True
        self._patched.close()
        await self._threads.aclose()


def _cut(content: bytes) -> list[bytes]:
    return [content[at : at + STEP_BYTES] for at in range(0, len(content), STEP_BYTES)]
