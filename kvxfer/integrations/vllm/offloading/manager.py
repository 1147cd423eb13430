"""Offloading manager, the scheduler's side: the index of the chunks in host memory."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvxfer import runtime
from kvxfer.backends.host import HostPool
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.interface import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    event_of_failed_chunks,
    transfer_params,
)
from kvxfer.integrations.vllm.offloading.requests import (
    RequestAnswers,
    RequestRecorder,
    parse_retention,
)
from kvxfer.storage.backend import NO_ROOM_REASON, Outcome, Status
from kvxfer.storage.eviction.retention import NORMAL, Retention
from kvxfer.storage.gauge import Gauge
from kvxfer.storage.index import BlockIndex, BlockState, StorePlan
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Observer, Operation, Removal, Reports
from kvxfer.telemetry.journal import flush_journal

VERIFY_BYTES_PER_STEP = 256 << 20
"""Bytes that `lookup` may verify in one scheduling step: 10 ms at 25 GB/s (XXH3 on one core)."""

NO_ROOM = Outcome(Status.FAILED, reason=f"{NO_ROOM_REASON}: every chunk in it is in use")
_LOST = Outcome(Status.CANCELLED, reason="some worker did not complete it")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkSlots(LoadStoreSpec):
    """Slots of chunks in the pool, sent from the scheduler to the workers.

    Attributes:
        keys: vLLM's keys, group after group.
        slots: One per key.
    """

    keys: Sequence[BlockKey]
    slots: Sequence[int]


@dataclass(slots=True, eq=False)
class _Check:
    """Verification of a chunk, which is pinned for the requests that looked it up.

    Attributes:
        outcome: None until the chunk was verified.
        num_holders: Requests that the chunk is held for.
    """

    key: BlockKey
    slot: int
    outcome: Outcome | None = None
    num_holders: int = 0


class KVXferOffloadingManager(VLLMPlug, OffloadingManager):
    """Offloading manager over the index of a host pool; no call blocks.

    vLLM cannot recover from a load that fails. So a hit is promised only for a chunk that was
    verified and is pinned: from the first lookup on, the chunk is held for the request until the
    request is scheduled, loads, or ends. Verifying reads memory on the scheduler's thread, a
    bounded number of bytes in each step; further chunks are pending hits until the next step. (A
    thread would answer a step later, and a step takes as long as hashing 30 MB.)

    Args:
        pool: The pool, mapped by this process; closed on `shutdown`.
        index: The index over its slots.
        emit_events: Whether to keep events for `take_events`.
        lower: Name of the tier below, in metrics.
        recorder: Records the requests; closed on `shutdown`.
        observers: Told what happens to chunks, and how lookups were answered.
    """

    def __init__(
        self,
        pool: HostPool,
        index: BlockIndex,
        *,
        emit_events: bool,
        lower: str = metrics.LOWER,
        recorder: RequestRecorder | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._pool = pool
        self._index = index
        self._checks: dict[BlockKey, _Check] = {}
        self._bytes_to_verify = VERIFY_BYTES_PER_STEP
        self._held: dict[str, dict[BlockKey, None]] = {}  # in the order of lookups
        self._storing: dict[BlockKey, None] = {}  # in the order of the prompts
        self._slot_bytes = pool.shape.slot_size_bytes
        self._counters = metrics.Counters(self._slot_bytes, lower)
        self._retentions: dict[str, Retention] = {}  # of requests that have a wish
        self._events: list[OffloadingEvent] | None = [] if emit_events else None
        self._recorder = recorder
        self._reports = Reports(observers, metrics.HOST)
        self._answers = RequestAnswers(self._reports, count=self._count_lookup)
        self._reports.watch(self._gauges)

    def lookup(self, key: BlockKey, req_context: ReqContext, **_: Any) -> LookupResult:
        """Look up a chunk; `HIT_PENDING` while it is being stored or verified."""
        req_id, state = req_context.req_id, self._index.state(key)
        if state is None:
            self._answers.note(req_id, key, "")
            return LookupResult.MISS
        if state is BlockState.STORING:
            return LookupResult.HIT_PENDING
        check = self._hold(key, req_id)
        if check.outcome is None:
            if self._bytes_to_verify <= 0:
                return LookupResult.HIT_PENDING
            self._bytes_to_verify -= self._slot_bytes
            check.outcome = self._pool.verify(check.slot, key)
        if check.outcome.done:
            self._answers.note_hit(req_id, key, metrics.HOST)
            return LookupResult.HIT
        self._answers.note(req_id, key, "")
        self._drop(key, check.outcome)
        return LookupResult.MISS

    def prepare_load(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> ChunkSlots:
        """Pin chunks until `complete_load`; they were hits in this step, so they are present."""
        slots = self._index.pin(list(keys))
        self._release(req_context.req_id)
        self._counters.add(metrics.LOADED, len(slots))
        return ChunkSlots(list(keys), slots)

    def touch(self, keys: Collection[BlockKey], *_: Any, **__: Any) -> None:
        """Mark chunks as recently used."""
        self._index.touch(list(keys))

    def complete_load(self, keys: Collection[BlockKey], *_: Any, **__: Any) -> None:
        """Unpin the chunks that `prepare_load` pinned."""
        self._index.unpin(list(keys))

    def prepare_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> PrepareStoreOutput | None:
        """Find slots for the leading chunks that have room; None if there is no room at all."""
        self._release(req_context.req_id)
        plan = self._index.begin_store(list(keys))
        self._counters.add(metrics.REFUSED, len(plan.refused))
        self._tell_failed_stores(plan.refused, NO_ROOM)
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
        """Make the chunks loadable that every worker finished; drop the others."""
        wanted = set(keys)  # vLLM's are unordered, but eviction spares the heads of prompts
        storing = [key for key in self._storing if key in wanted]
        stored: list[BlockKey] = []
        lost: list[BlockKey] = []
        for key in storing:
            del self._storing[key]
            whole = success and self._pool.holds(self._index.slot_of(key), key)
            (stored if whole else lost).append(key)
        self._index.finish_store(stored, stored=True)
        self._give_up(lost)
        self._tell_failed_stores(lost, _LOST)
        self._counters.add(metrics.LOST, len(lost))
        self._note_stored(stored)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Offload every new chunk of a request."""
        self._answers.arrive(req_context)
        if self._recorder is not None:
            self._recorder.arrive(req_context)
        params = transfer_params(req_context)
        retention = parse_retention(req_context.req_id, params, self._counters)
        if retention != NORMAL:
            self._retentions[req_context.req_id] = retention
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Release chunks held for requests that run now: they will load no more."""
        self._bytes_to_verify = VERIFY_BYTES_PER_STEP
        self._answers.schedule(context.new_req_ids)
        if self._recorder is not None:
            self._recorder.schedule(context.new_req_ids)
        for req_id in context.new_req_ids:
            self._release(req_id)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the chunks that a request still holds."""
        self._answers.finish(req_context.req_id)
        if self._recorder is not None:
            self._recorder.finish(req_context.req_id)
        self._release(req_context.req_id)
        self._retentions.pop(req_context.req_id, None)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        events, self._events = self._events or [], None if self._events is None else []
        return [event for event in map(self._still_gone, events) if event.keys]

    def has_pending_work(self) -> bool:
        """Whether there is work between steps: never."""
        return False

    def reset_cache(self) -> None:
        """Forget every chunk; vLLM no longer reports transfers begun before."""
        text = "vLLM has reset its cache, as for new weights: %d chunks in host memory are dropped"
        logger.warning(text, len(self._index))
        self._emit(self._index.keys(), removed=True)
        self._reports.removed(self._index.keys(), Removal.CLEARED)
        self._index.clear()
        self._checks.clear()
        self._held.clear()
        self._storing.clear()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the metrics since the last call."""
        idle = self._index.num_free_slots + self._index.num_evictable
        gauges: dict[str, float] = {metrics.PINNED: self._index.num_slots - idle}
        for gauge, value in self._gauges().items():
            gauges[gauge.value] = value
        return self._counters.report(gauges)

    def shutdown(self) -> None:
        """Close the pool and the recorder; may be called again."""
        if self._recorder is not None:
            self._recorder.close()
        flush_journal()
        self._pool.close()

    def _hold(self, key: BlockKey, req_id: str) -> _Check:
        """Hold a chunk for a request: pinned until every holder released it."""
        check = self._checks.get(key)
        if check is None:
            (slot,) = self._index.pin([key])
            check = self._checks[key] = _Check(key, slot)
        held = self._held.setdefault(req_id, {})
        if key not in held:
            held[key] = None
            check.num_holders += 1
        return check

    def _release(self, req_id: str) -> None:
        """Release the chunks that a request holds: it has used them."""
        held = list(self._held.pop(req_id, ()))
        self._index.touch(held)
        self._retain(held, req_id)
        released: list[BlockKey] = []
        for key in held:
            check = self._checks[key]
            check.num_holders -= 1
            if not check.num_holders:
                del self._checks[key]
                released.append(key)
        self._index.unpin(released)

    def _retain(self, keys: Sequence[BlockKey], req_id: str) -> None:
        """Note the wish of a request for chunks that it uses or stores, if it has one."""
        if retention := self._retentions.get(req_id):
            self._index.retain(keys, retention)

    def _drop(self, key: BlockKey, outcome: Outcome) -> None:
        """Quarantine a chunk that failed its check, and release it for every holder."""
        if outcome.status is Status.CORRUPT:
            self._counters.add(metrics.CORRUPT)
            self._counters.add(metrics.DROPPED)
        logger.warning("dropped chunk %s: %s", key.hex(), outcome)
        self._reports.moved(Operation.LOAD, [key], [outcome], [], runtime.monotonic())
        if outcome.status is Status.CORRUPT:
            self._reports.removed([key], Removal.CORRUPT)
        for held in self._held.values():
            held.pop(key, None)
        del self._checks[key]
        self._index.quarantine(key)
        self._index.unpin([key])
        self._emit([key], removed=True)

    def _count_lookup(self, tier: str, number: int) -> None:
        self._counters.add(metrics.looked_up(tier), number)

    def _note_stored(self, keys: Sequence[BlockKey]) -> None:
        self._counters.add(metrics.STORED, len(keys))
        self._reports.added(keys)
        self._emit(keys, removed=False)

    def _note_evicted(self, plan: StorePlan) -> None:
        for reason, keys in plan.evicted_by().items():
            self._counters.add(metrics.removed(reason), len(keys))
            self._reports.removed(keys, reason)
        self._emit(plan.evicted, removed=True)

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        """Free the slots of chunks whose store or load failed."""
        self._index.finish_store(keys, stored=False)
        event = event_of_failed_chunks(keys)
        if keys and event is not None and self._events is not None:
            self._events.append(event)

    def _tell_failed_stores(self, keys: Sequence[BlockKey], outcome: Outcome) -> None:
        self._reports.moved(Operation.STORE, keys, [outcome] * len(keys), [], runtime.monotonic())

    def _gauges(self) -> Mapping[Gauge, float]:
        return self._index.gauges(self._slot_bytes)

    def _still_gone(self, event: OffloadingEvent) -> OffloadingEvent:
        """Drop chunks from the event of a failure that are present or expected again by now."""
        if not getattr(event, "metadata_only", False):
            return event
        gone = [key for key in event.keys if self._index.state(key) is None]
        return replace(event, keys=gone)

    def _emit(self, keys: Sequence[BlockKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(keys=list(keys), medium=Medium.CPU, removed=removed)
            )
