"""Offloading manager, the scheduler's side: chunks in host memory and in a lower tier below it."""

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvxfer import runtime
from kvxfer.backends.host import HostPool
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.interface import (
    STORES_FIRST,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    event_of_failed_chunks,
    may_load,
)
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier, RowOutcome
from kvxfer.integrations.vllm.offloading.requests import Requests
from kvxfer.storage.backend import DONE, NO_ROOM_REASON, Outcome, Status
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.index import BlockIndex, BlockState, StorePlan
from kvxfer.storage.integrity import MemoryIntegrity
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.storage.observer import (
    Cause,
    Gauge,
    NotLoaded,
    NotWrittenBack,
    Observer,
    Operation,
    Removal,
    Reports,
)
from kvxfer.telemetry.journal import flush_journal
from kvxfer.telemetry.trace_recorder import TraceRecorder
from kvxfer.tiering.wanted_blocks import Wanted, WantedBlocks
from kvxfer.tiering.write_back_queue import WriteBackQueue
from kvxfer.transfer.job import Direction
from kvxfer.transfer.load_or_compute import LoadOrCompute

VERIFY_BYTES_PER_STEP = 256 << 20
"""Maximum bytes to verify in one scheduling step: 10 ms at 25 GB/s (XXH3 on one core)."""
MAX_SHARE_ON_THE_WAY_DOWN = 0.5
"""Maximum share of slots that are being copied to the lower tier: these cannot be evicted, and
stores need room."""
MAX_BEGUN = 2048
"""Maximum number of chunks that one call begins to copy down, e.g. once a tier works again."""
MAX_SHARE_FOR_UNKNOWN = 1 / 8
"""Maximum share of the evictable chunks to evict, at any time, for chunks that the lower tier may
turn out to lack."""
EMPTY_STEP_S = 0.001
"""Duration below which a scheduling step cannot have run a model."""
YIELD_S = 0.005
"""Maximum wait for the lower tier in such a step, which also delays a new request. Otherwise, vLLM
would poll in a tight loop, and the thread that moves chunks would get the GIL only every 5 ms."""
AFTER_FAILURE_S = 0.05
"""Maximum wait for running loads after one has failed and its request stores what it computed. If a
load fails later than that, its chunk is not stored, and vLLM does not offer it a second time."""
MAX_STEPS = 16
"""Maximum number of unfinished steps to remember; an engine without statistics ends none."""

NO_ROOM = Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON}: every chunk in it is in use")
_LOST = Outcome(Status.CANCELLED, reason="a worker did not store its part")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkSlots(LoadStoreSpec):
    """Slots of chunks in the pool, group after group, sent from the scheduler to the workers."""

    keys: Sequence[BlockKey]
    slots: Sequence[int]


class PrefillSpeed:
    """Measurement of the prompt tokens that the engine's steps compute, and of the steps' times.

    vLLM offers the chunks that a step computes to be stored: before it says that the step was
    planned if `STORES_FIRST`, else afterwards. It asks for the metrics when the step has ended.
    With asynchronous scheduling, it plans a step before the previous one has ended; the time of the
    step is then that between the two ends. Only chunks of the group with the most tokens are
    counted: of other groups, vLLM may offer only the last ones.
    """

    def __init__(self, loads: LoadOrCompute, tokens_per_chunk: Mapping[int, int]) -> None:
        self.loads = loads
        self._tokens_per_chunk = tokens_per_chunk  # of each group
        self._steps: deque[tuple[float, list[int]]] = deque(maxlen=MAX_STEPS)  # begin, tokens
        self._tokens: list[int] = []  # of the step that is being planned
        self._ended_s = 0.0

    def begin_step(self) -> None:
        """Note that vLLM has planned a step."""
        stored, self._tokens = self._tokens, []
        self._steps.append((runtime.monotonic(), stored if STORES_FIRST else self._tokens))

    def compute(self, keys: Sequence[BlockKey]) -> None:
        """Note chunks that the planned step computes."""
        self._tokens.append(self.count_tokens(keys))

    def end_step(self) -> None:
        """Note that the oldest unfinished step has ended."""
        if not self._steps:
            return
        began_s, tokens = self._steps.popleft()
        now = runtime.monotonic()
        if num_tokens := sum(tokens):
            self.loads.computed(num_tokens, now - max(began_s, self._ended_s))
        self._ended_s = now

    def count_tokens(self, keys: Sequence[BlockKey]) -> int:
        """Count the tokens of a prompt's chunks."""
        num_chunks = Counter(map(group_of, keys))
        return max((n * self._tokens_per_chunk[at] for at, n in num_chunks.items()), default=0)


class KVXferOffloadingManager(VLLMPlug, OffloadingManager):
    """Offloading manager over the index of a host pool, and over a lower tier.

    vLLM cannot recover from a failed load. So a hit is promised only for a chunk that was verified
    and is pinned: from its first lookup on, it is held for the request until the request is
    scheduled, loads, or ends. With `integrity=full`, the scheduler's thread hashes chunks, a
    bounded number of bytes in each step; further chunks are pending hits until the next step.
    (Another thread would answer a step later, and a step takes as long as hashing 30 MB.)

    A chunk is written back to the lower tier once every worker has stored it, and is pinned
    meanwhile. A chunk that is looked up and not in host memory gets a slot, is looked up below
    (`RETRY`), loaded if it is there (`HIT_PENDING`), and then held for the requests that wait for
    it. Any failure below makes it a miss for them. While an abandoned load may still write to its
    slot, the chunk is a miss and the slot stays out of use.

    No call blocks for longer than `AFTER_FAILURE_S`, except `reset_cache` and `shutdown`. The
    latter closes the pool, the tier and the trace.
    """

    def __init__(
        self,
        pool: HostPool,
        index: BlockIndex,
        tier: LowerTier | None = None,
        *,
        emit_events: bool,
        trace: TraceRecorder | None = None,
        observers: Sequence[Observer] = (),
        prefill: PrefillSpeed | None = None,
        tokens_per_chunk: Mapping[int, int] | None = None,
        has_replicas: bool = False,
    ) -> None:
        self._pool = pool
        self._index = index
        self._tier = tier
        self._prefill = prefill
        self._slot_bytes = pool.shape.slot_size_bytes
        hashes = pool.integrity is MemoryIntegrity.FULL
        self._hashed_bytes = self._slot_bytes if hashes else 0  # of a chunk that is verified
        self._bytes_to_verify = VERIFY_BYTES_PER_STEP
        self._polled = tier is None
        self._has_failed = False  # a load, while others go on
        self._step_ended_s = 0.0
        self._was_idle = False  # before this step, so the time since the last one says nothing
        self._has_replicas = has_replicas  # which may run the model in step with this engine
        self._preempted: dict[str, bool] = {}  # whether each request was looked up in this step
        self._given: set[str] = set()  # requests with tokens from another engine
        self._storing: dict[BlockKey, None] = {}  # by workers, in the order of the prompts
        self._loaded: deque[RowOutcome] = deque()  # to be sealed
        self._max_write_backs = max(1, int(index.num_slots * MAX_SHARE_ON_THE_WAY_DOWN))
        self._write_back: WriteBackQueue[None] = WriteBackQueue(max_blocks=index.num_slots)
        self._events: list[OffloadingEvent] | None = [] if emit_events else None
        self._reports = Reports(observers, metrics.HOST)
        self._wanted = tier.wanted if tier else WantedBlocks()
        self._metrics = tier.metrics if tier else metrics.OffloadingMetrics(self._slot_bytes)
        self._metrics.count_in(metrics.HOST, *([tier.name] if tier else []))
        self._requests = Requests(
            self._reports, self._metrics, trace=trace, tokens_per_chunk=tokens_per_chunk
        )
        self._reports.watch(self._gauges)

    def lookup(self, key: BlockKey, req_context: ReqContext, **_: Any) -> LookupResult:
        """Look up a chunk in both tiers; `RETRY` while the lookup in the lower one runs."""
        if not self._polled:
            self._finish_moves()
        req_id, state = req_context.req_id, self._index.state(key)
        if req_id in self._preempted:
            self._preempted[req_id] = True
        if state is BlockState.STORING and key in self._storing:
            return LookupResult.HIT_PENDING
        if state is not None and state is not BlockState.STORING:
            held = self._wanted.want(key, req_id)
            if held.slot is None:
                (held.slot,) = self._index.pin([key])
            if held.checked is None:
                if self._bytes_to_verify <= 0:
                    return LookupResult.HIT_PENDING
                self._bytes_to_verify -= self._hashed_bytes
                held.checked = self._pool.verify(held.slot, key)
            if held.checked.done:
                self._requests.note(req_id, key, metrics.HOST)
                return LookupResult.HIT
            self._drop(key, held, held.checked)
        if state is not BlockState.STORING:
            self._requests.note(req_id, key, "")
        return self._look_up_below(key, req_context)

    def prepare_load(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> ChunkSlots:
        """Pin chunks until `complete_load`; they were hits in this step, so they are present."""
        slots = self._index.pin(list(keys))
        self.begin(req_context.req_id)
        self._metrics.add(
            "load_blocks", metrics.HOST, Cause.REQUEST, Status.DONE, number=len(slots)
        )
        return ChunkSlots(list(keys), slots)

    def begin(self, req_id: str, *, is_given: bool = False) -> None:
        """Note that a request begins to load or compute, and release the chunks that it holds.

        If another engine gives it tokens, its stores say nothing of the speed of computing.
        """
        self._requests.schedule([req_id])
        self._release(req_id)
        if is_given:
            self._given.add(req_id)

    def touch(self, keys: Collection[BlockKey], *_: Any, **__: Any) -> None:
        """Mark chunks as recently used."""
        self._index.touch(list(keys))

    def complete_load(self, keys: Collection[BlockKey], *_: Any, **__: Any) -> None:
        """Unpin the chunks that `prepare_load` pinned."""
        self._index.unpin(list(keys))

    def prepare_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> PrepareStoreOutput | None:
        """Assign slots to the leading chunks that have room; None if there is no room at all.

        A request that began to load or compute before a reset stores nothing: vLLM offers its
        chunks again, even if their blocks left a sliding window or hold values of old weights.
        """
        if self._requests.is_stale(req_context.req_id):
            return PrepareStoreOutput([], ChunkSlots([], []), [])
        self._finish_moves()
        self._take_failed(keys)
        if self._prefill is not None and req_context.req_id not in self._given:
            self._prefill.compute([key for key in keys if key not in self._index])
        self._release(req_context.req_id)
        plan = self._index.begin_store(list(keys))
        self._note_not_stored(plan.refused, NO_ROOM)
        self._storing |= dict.fromkeys(plan.keys)
        self._retain(list(keys), req_context.req_id)
        self._note_evicted(plan)
        if plan.refused and not plan.keys:
            return None
        return PrepareStoreOutput(
            keys_to_store=plan.keys,
            store_spec=ChunkSlots(plan.keys, plan.slots),
            evicted_keys=plan.evicted,
        )

    def complete_store(
        self,
        keys: Collection[BlockKey],
        req_context: ReqContext,  # noqa: ARG002 - vLLM's signature
        success: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
        **_: Any,
    ) -> None:
        """Make the chunks loadable that every worker has stored; drop the others."""
        wanted = set(keys)  # unordered, but eviction needs the order to spare heads of prompts
        storing = [key for key in self._storing if key in wanted]
        whole = [False] * len(storing)
        if success:
            whole = self._pool.holds([self._index.slot_of(key) for key in storing], storing)
        stored: list[BlockKey] = []
        lost: list[BlockKey] = []
        for key, is_whole in zip(storing, whole, strict=True):
            del self._storing[key]
            (stored if is_whole else lost).append(key)
        self._index.finish_store(stored, stored=True)
        self._drop_failed(lost)
        self._note_not_stored(lost, _LOST)
        self._note_added(stored, Cause.REQUEST)
        if self._tier is not None:
            self._drop_stores(self._write_back.add(dict.fromkeys(stored)))
            self._copy_down(self._tier, MAX_BEGUN)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Offload every new chunk of a request."""
        self._was_idle |= self._requests.arrive(req_context) and not self._has_replicas
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Release the chunks of requests that now run; copy down, look up and load others."""
        tier = self._tier
        if tier is not None:
            self._finish_moves()
            self._copy_down(tier, MAX_BEGUN)
        self._bytes_to_verify = VERIFY_BYTES_PER_STEP
        self._requests.schedule(context.new_req_ids)
        for req_id in context.new_req_ids:
            self._release(req_id)
        if self._preempted or context.preempted_req_ids:
            self._release_resumed(context.preempted_req_ids)
        if tier is not None:
            self._polled = False
            if self._prefill is not None:
                self._prefill.begin_step()
                self._decline_slow(tier, self._prefill)
            tier.flush(self._make_room(tier))
            is_short = runtime.monotonic() - self._step_ended_s < EMPTY_STEP_S
            if is_short or (self._was_idle and not context.new_req_ids):
                tier.wait(YIELD_S)
            self._was_idle, self._step_ended_s = False, runtime.monotonic()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the chunks that a request holds or waits for; running loads go on."""
        self._preempted.pop(req_context.req_id, None)
        self._given.discard(req_context.req_id)
        self._release(req_context.req_id)
        self._requests.finish(req_context.req_id)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        events, self._events = self._events or [], None if self._events is None else []
        ours = [event for event in map(self._without_present, events) if event.keys]
        return ours if self._tier is None else [*ours, *self._tier.take_events()]

    def reset_cache(self) -> None:
        """Forget every chunk of both tiers; slots that are still in use are kept out of use.

        vLLM no longer reports transfers that began before. A worker may still write to slots that
        are free now, until vLLM calls `on_reset_flushed` (0.33). No chunk is loaded from below into
        them before that: after a reset, keys of the lower tier have a new salt, and a chunk gets
        there only once every worker has stored it.
        """
        self._requests.note_reset()
        in_use = [] if self._tier is None else self._tier.reset()
        text = "vLLM has reset its cache, as for new weights: %d chunks in host memory are dropped"
        logger.warning(text, len(self._index))
        states = {key: self._index.state(key) for key in self._index.keys()}  # noqa: SIM118
        stored = [key for key, state in states.items() if state is not BlockState.STORING]
        self._note_removed(stored, Removal.CLEARED)
        self._index.clear()
        self._wanted.clear()
        self._storing.clear()
        self._loaded.clear()
        self._drop_stores(self._write_back.clear())
        self._polled = self._tier is None
        if in_use:
            self._index.keep_out(set(in_use))

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the metrics since the last call; vLLM asks when a step has ended."""
        if self._prefill is not None:
            self._prefill.end_step()
        idle = self._index.num_free_slots + self._index.num_evictable
        gauges = {gauge.value: value for gauge, value in self._gauges().items()}
        return self._metrics.report(gauges | {metrics.PINNED: self._index.num_slots - idle})

    def shutdown(self) -> None:
        """Write all chunks back to the lower tier, as far as time allows; may be called again."""
        with ExitStack() as closed:  # closes all of it, whatever fails
            closed.callback(self._pool.close)
            closed.callback(flush_journal)
            closed.callback(self._requests.close)
            if self._tier is None:
                return
            closed.callback(self._tier.close)
            self._max_write_backs = self._index.num_slots  # nothing else needs room now
            self._copy_down(self._tier, self._index.num_slots)
            if left := self._write_back.forget(self._index.keys()):  # except those on the way down
                logger.warning("the lower tier: %d chunks were not written back", len(left))
                self._drop_stores(left)

    def _look_up_below(self, key: BlockKey, req_context: ReqContext) -> LookupResult:
        tier = self._tier
        if tier is None or self._write_back.is_taken(key):
            return LookupResult.MISS
        if not may_load(tier.localities, req_context):
            return LookupResult.MISS
        found = tier.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if found and key not in self._index:
            self._wanted.ask_to_load(key)
        return LookupResult.HIT_PENDING if found else LookupResult.MISS

    def _release(self, req_id: str) -> None:
        """Release the chunks that a request holds, which count as used, or waits for."""
        used, unpinned = self._wanted.release(req_id)
        if used:
            self._index.touch(used)
            self._retain(used, req_id)
            self._index.unpin(unpinned)

    def _release_resumed(self, preempted: Collection[str]) -> None:
        """Release chunks of preempted requests that run again: this step did not look these up."""
        for req_id, is_asking in self._preempted.items():
            if not is_asking:
                self._release(req_id)
        self._preempted = dict.fromkeys([*self._preempted, *preempted], False)

    def _retain(self, keys: Sequence[BlockKey], req_id: str) -> None:
        """Set a request's retention, if it has one, on chunks that it uses or stores."""
        if (retention := self._requests.retention(req_id)) is not None:
            self._index.retain(keys, retention)

    def _drop(self, key: BlockKey, block: Wanted, outcome: Outcome) -> None:
        """Quarantine a chunk that failed its check, and release it for every request."""
        logger.warning("dropped chunk %s: %s", key.hex(), outcome.reason)
        self._metrics.add("load_blocks", metrics.HOST, Cause.REQUEST, outcome.status)
        self._reports.moved(Operation.LOAD, [key], [outcome], [], runtime.monotonic())
        block.slot = block.checked = None
        self._index.quarantine(key)
        self._index.unpin([key])
        self._note_removed([key], Removal.CORRUPT)
        self._write_back.forget([key])

    def _decline_slow(self, tier: LowerTier, prefill: PrefillSpeed) -> None:
        """Turn chunks wanted in this step into misses where computing is faster than loading."""
        wanted: dict[str, list[BlockKey]] = {}
        for key in self._wanted.open:
            block = self._wanted.get(key)
            if block is not None and block.waiting:
                wanted.setdefault(min(block.waiting), []).append(key)
        queued_bytes = tier.queued_bytes
        for keys in wanted.values():
            num_bytes = len(keys) * self._slot_bytes
            num_tokens = prefill.count_tokens(keys)
            if prefill.loads.pays(num_bytes, num_tokens, queued_bytes=queued_bytes):
                queued_bytes += num_bytes
                continue
            self._wanted.deny(keys)
            self._metrics.add("not_loaded_blocks", tier.name, number=len(keys))
            self._reports.tell(NotLoaded(tier.name, keys))

    def _make_room(self, tier: LowerTier) -> dict[BlockKey, int]:
        """Assign slots to chunks of the lower tier that were wanted in this step.

        Chunks that the lower tier was not asked for yet get slots, too, so that it loads what it
        has without another step: at any time as many as there are free slots, and a share of the
        evictable ones. A chunk that turns out to be missing gives its slot back; evicting for it
        was no loss, since it is soon computed and stored, and would evict the same chunks then.
        """
        wanted = self._wanted.open
        if not wanted:
            return {}
        found = [key for key in wanted if self._wanted.found(key)]
        unknown = [key for key in wanted if not self._wanted.found(key)]
        evictable = math.ceil(self._index.num_evictable * MAX_SHARE_FOR_UNKNOWN)
        room = self._index.num_free_slots - len(found) + evictable - tier.num_unknown
        plan = self._index.begin_store([*found, *unknown[: max(0, room)]])
        self._note_evicted(plan)
        if refused := [key for key in found if key in plan.refused]:
            self._note_not_stored(refused, NO_ROOM, cause=Cause.PROMOTION)
            self._wanted.deny(refused)  # otherwise requests would look for room again and again
        return dict(zip(plan.keys, plan.slots, strict=True))

    def _copy_down(self, tier: LowerTier, max_begun: int) -> None:
        """Begin to write back waiting chunks, up to the bound on those in flight."""
        if not tier.takes_stores:
            return
        now = runtime.monotonic()
        room = self._max_write_backs - self._write_back.num_taken
        taken = self._write_back.take(now, min(room, max_begun))
        if waiting := [key for key in taken if tier.is_unwanted(key)]:
            # Their copies below are to be deleted first; other chunks do not wait for that.
            self._write_back.put_off(now, waiting, failed=False)
        if chosen := [key for key in taken if key not in waiting]:
            tier.submit_store(chosen, self._index.pin(chosen))

    def _finish_moves(self) -> None:
        """Finish the moves that ended, once per step, and only as many loads as it may hash."""
        if self._tier is None or self._polled:
            return
        self._polled = True
        copied: list[RowOutcome] = []
        failed: list[RowOutcome] = []
        for moved in self._tier.poll():
            if moved.job.void:
                self._index.give_back([moved.row])
            elif moved.job.direction is Direction.STORE:
                copied.append(moved)
            else:
                (self._loaded if moved.outcome.done else failed).append(moved)
        if copied:
            self._end_stores(self._tier, copied)
        self._has_failed &= self._tier.queued_bytes > 0
        if failed:
            self._has_failed = True
            for status in [moved.outcome.status for moved in failed]:
                self._metrics.add("load_blocks", self._tier.name, Cause.PROMOTION, status)
            self._drop_failed([moved.key for moved in failed])
        self._index.finish_store(self._tier.take_missing(), stored=False)
        landed: list[BlockKey] = []
        while self._loaded and self._bytes_to_verify > 0:
            moved = self._loaded.popleft()
            self._bytes_to_verify -= self._hashed_bytes
            self._pool.seal([moved.row], [moved.key])
            landed.append(moved.key)
        if landed:
            self._finish_loads(self._tier, landed)

    def _take_failed(self, keys: Collection[BlockKey]) -> None:
        """Wait for running loads of chunks that vLLM now offers, if a load has just failed."""
        if self._tier is None or not self._has_failed:
            return
        storing = [key for key in keys if self._index.state(key) is BlockState.STORING]
        if any(key not in self._storing for key in storing):
            self._tier.wait(AFTER_FAILURE_S)
            self._polled = self._has_failed = False
            self._finish_moves()

    def _end_stores(self, tier: LowerTier, copied: Sequence[RowOutcome]) -> None:
        """Unpin chunks that were written back; those that changed meanwhile are deleted there."""
        stored: list[BlockKey] = []
        failed: list[BlockKey] = []
        for moved in copied:
            if moved.outcome.done:
                stored.append(moved.key)
                if (retention := self._index.retentions([moved.key])[0]) != NORMAL:
                    tier.retain([moved.key], retention)
            elif moved.outcome.status is Status.CORRUPT:
                self._write_back.skip([moved.key])  # no retry makes it intact
            else:
                failed.append(moved.key)
            status = Status.DONE if moved.outcome.done else Status.FAILED
            self._metrics.add("store_blocks", tier.name, Cause.WRITE_BACK, status)
            if not moved.outcome.done and (held := self._wanted.get(moved.key)) is not None:
                held.checked = None  # it is verified again before it is promised
            self._index.unpin([moved.key])
        self._write_back.end(runtime.monotonic(), stored=stored, failed=failed)

    def _note_added(self, keys: Sequence[BlockKey], cause: Cause) -> None:
        """Count, report and publish chunks that can be loaded from now on."""
        self._metrics.add("store_blocks", metrics.HOST, cause, Status.DONE, number=len(keys))
        self._reports.added(keys)
        self._emit(keys, removed=False)

    def _note_removed(self, keys: Sequence[BlockKey], reason: Removal) -> None:
        """Count, report and publish chunks that left host memory."""
        self._metrics.add("removed_blocks", metrics.HOST, reason, number=len(keys))
        self._reports.removed(keys, reason)
        self._emit(keys, removed=True)

    def _note_not_stored(
        self, keys: Sequence[BlockKey], outcome: Outcome, *, cause: Cause = Cause.REQUEST
    ) -> None:
        """Count and report chunks that did not get into host memory."""
        self._metrics.add("store_blocks", metrics.HOST, cause, outcome.status, number=len(keys))
        outcomes, now = [outcome] * len(keys), runtime.monotonic()
        self._reports.moved(Operation.STORE, keys, outcomes, [], now, cause=cause)

    def _note_evicted(self, plan: StorePlan) -> None:
        for reason, keys in plan.evicted_by.items():
            self._note_removed(keys, reason)
        self._drop_stores(self._write_back.forget(plan.evicted))

    def _drop_stores(self, keys: Sequence[BlockKey]) -> None:
        if keys and self._tier is not None:
            self._metrics.add("not_written_back_blocks", self._tier.name, number=len(keys))
            self._reports.tell(NotWrittenBack(self._tier.name, keys))

    def _finish_loads(self, tier: LowerTier, keys: Sequence[BlockKey]) -> None:
        """Make chunks loadable, and pin them for the requests that wait for them."""
        self._index.finish_store(keys, stored=True)
        self._metrics.add("load_blocks", tier.name, Cause.PROMOTION, Status.DONE, number=len(keys))
        self._note_added(keys, Cause.PROMOTION)
        for key in keys:
            block = self._wanted.get(key)
            if block is None or not block.waiting:
                continue
            (block.slot,) = self._index.pin([key])
            block.checked = DONE  # verified by the lower tier, and sealed just now
            for req_id in block.waiting:
                self._requests.note(req_id, key, tier.name)

    def _drop_failed(self, keys: Sequence[BlockKey]) -> None:
        """Free the slots of chunks whose store or load failed."""
        self._index.finish_store(keys, stored=False)
        event = event_of_failed_chunks(keys)
        if keys and event is not None and self._events is not None:
            self._events.append(event)

    def _gauges(self) -> Mapping[Gauge, float]:
        return self._index.gauges(self._slot_bytes)

    def _without_present(self, event: OffloadingEvent) -> OffloadingEvent:
        """Drop chunks from a failure's event that are present or being stored again by now."""
        if not getattr(event, "metadata_only", False):
            return event
        gone = [key for key in event.keys if self._index.state(key) is None]
        return replace(event, keys=gone)

    def _emit(self, keys: Sequence[BlockKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(keys=list(keys), medium=Medium.CPU, removed=removed)
            )
