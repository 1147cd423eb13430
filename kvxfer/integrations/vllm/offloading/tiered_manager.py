"""Tiered offloading manager, the scheduler's side: host memory with a lower tier below it."""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from kvxfer import runtime
from kvxfer.backends.host import HostPool
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.interface import (
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    may_load_from_storage,
)
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.integrations.vllm.offloading.manager import NO_ROOM, KVXferOffloadingManager
from kvxfer.integrations.vllm.offloading.prefill_speed import PrefillSpeed
from kvxfer.integrations.vllm.offloading.requests import RequestRecorder
from kvxfer.integrations.vllm.offloading.row_jobs import RowOutcome
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.eviction.retention import NORMAL
from kvxfer.storage.index import BlockIndex, StorePlan
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Cause, NotLoaded, Observer
from kvxfer.tiering.write_back_queue import WriteBackQueue
from kvxfer.transfer.job import Direction

MAX_SHARE_ON_THE_WAY_DOWN = 0.5
"""Largest share of slots that are copied to the tier below at one time: these cannot be evicted,
and stores need room."""
MAX_SHARE_FOR_UNKNOWN = 1 / 8
"""Largest share of the chunks that may be evicted whose slots are given, at one time, to chunks
of which the tier below is yet to say whether it has them."""
EMPTY_STEP_S = 0.001
"""Time of a scheduling step below which it has run no model."""
YIELD_S = 0.005
"""Longest wait for the lower tier in such a step, and so of a new request. Else vLLM would poll in
a tight loop, and the thread that moves chunks get the interpreter lock only every 5 ms."""

logger = logging.getLogger(__name__)


class TieredOffloadingManager(KVXferOffloadingManager):
    """Offloading manager that also writes chunks of the host pool back to a lower tier.

    A chunk is written back when every worker has stored it, pinned meanwhile. It is verified
    before, so that the tier proves no bytes that have changed, and again when it has arrived: until
    then this engine does not take it from there. Chunks beyond the
    bound on those, and chunks that the lower tier fails to store, wait for their turn, as long as
    they are in host memory; see `WriteBackQueue`. A chunk that is looked up and not in host memory
    is given a slot and looked up below (`RETRY`), loaded if it is there (`HIT_PENDING`), and then
    held for the requests that wait for it. Any failure below makes it a miss for those requests.
    While a load that was abandoned may still write to its slot, the chunk is a miss and the slot
    stays out of use.

    Args:
        pool: The pool, mapped by this process; closed on `shutdown`.
        index: The index over its slots.
        tier: Moves the rows of the pool; closed on `shutdown`.
        emit_events: Whether to keep events for `take_events`.
        recorder: Records the requests; closed on `shutdown`.
        observers: As of `KVXferOffloadingManager`; the tier has observers of its own.
        prefill: Measures what the engine computes, and knows which loads are faster than that;
            None to load whatever is found.
    """

    def __init__(
        self,
        pool: HostPool,
        index: BlockIndex,
        tier: LowerTier,
        *,
        emit_events: bool,
        recorder: RequestRecorder | None = None,
        observers: Sequence[Observer] = (),
        prefill: PrefillSpeed | None = None,
    ) -> None:
        super().__init__(
            pool,
            index,
            emit_events=emit_events,
            lower=tier.name,
            recorder=recorder,
            observers=observers,
        )
        self._lower_reports = self._reports.of(tier.name)
        self._tier = tier
        tier.verify_by(pool.verify)
        self._prefill = prefill
        self._going_up: set[BlockKey] = set()
        self._found: dict[BlockKey, None] = {}  # known to be below, and without a slot
        self._loaded: deque[RowOutcome] = deque()
        self._copied: deque[RowOutcome] = deque()
        self._max_going_down = max(1, int(index.num_slots * MAX_SHARE_ON_THE_WAY_DOWN))
        self._write_back: WriteBackQueue[None] = WriteBackQueue(max_blocks=index.num_slots)
        self._unproven: set[BlockKey] = set()  # maybe below, and not verified since
        self._polled = False
        self._step_ended_s = 0.0

    def lookup(self, key: BlockKey, req_context: ReqContext, **_: Any) -> LookupResult:
        """Look up a chunk in both tiers; `RETRY` while the lookup in the lower one runs."""
        self._take_moved()
        if self._tier.is_late(key):
            return LookupResult.MISS
        if key not in self._going_up:
            result = super().lookup(key, req_context)
            if result is not LookupResult.MISS:
                return result
        if key in self._unproven or not may_load_from_storage(req_context):
            return LookupResult.MISS
        found = self._tier.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if found and key not in self._going_up:
            self._found[key] = None
        return LookupResult.HIT_PENDING if found else LookupResult.MISS

    def prepare_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> PrepareStoreOutput | None:
        """Find slots for chunks, after those of ended transfers were unpinned."""
        self._take_moved()
        if self._prefill is not None:
            self._prefill.compute([key for key in keys if key not in self._index])
        return super().prepare_store(keys, req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Start the lower tier's lookup of this step, and loads of the chunks that it has."""
        self._take_moved()
        self._end_stores()
        self._copy_down()
        super().on_schedule_end(context)
        self._polled = False
        if self._prefill is not None:
            self._prefill.begin_step()
            self._decline_slow(self._prefill)
        self._tier.flush(self._make_room())
        if runtime.monotonic() - self._step_ended_s < EMPTY_STEP_S:
            self._tier.wait(YIELD_S)
        self._step_ended_s = runtime.monotonic()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the metrics since the last call; vLLM asks when a step has ended."""
        if self._prefill is not None:
            self._prefill.end_step()
        return self._tier.metrics.report(super().get_stats(), but=metrics.COUNTED_HERE)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        return [*super().take_events(), *self._tier.take_events()]

    def reset_cache(self) -> None:
        """Find no chunk of either tier any more; slots that are still in use are kept out.

        A worker may still write to slots that are free now, until vLLM calls `on_reset_flushed`
        (0.33). No chunk is loaded from below into them before that: keys of the lower tier have
        another salt after a reset, and the first chunk gets there when every worker has stored it.
        """
        in_use = self._tier.reset()
        super().reset_cache()
        self._going_up.clear()
        self._found.clear()
        self._loaded.clear()
        self._copied.clear()
        self._unproven.clear()
        self._write_back.clear()
        self._polled = False
        self._index.keep_out(set(in_use))

    def shutdown(self) -> None:
        """Write all chunks back to the lower tier, as far as time allows, and close the pool."""
        with ExitStack() as closed:  # all of it, whatever fails
            closed.callback(super().shutdown)
            closed.callback(self._tier.close)
            self._max_going_down = self._index.num_slots  # nothing else needs room any more
            self._copy_down()
            if num_left := len(self._write_back) - self._write_back.num_taken:
                logger.warning("the lower tier: %d blocks were not written back there", num_left)
            self._drop_stores(self._write_back.clear())

    def _decline_slow(self, prefill: PrefillSpeed) -> None:
        """Turn chunks into misses that were wanted in this step and are computed sooner.

        Whether the tier below has them is not known yet: what counts is how long it would take.
        """
        wanted: dict[str, list[BlockKey]] = {}
        for key in [*self._found, *self._tier.results.unasked]:
            for req_id in sorted(self._tier.results.waiting_for(key))[:1]:
                wanted.setdefault(req_id, []).append(key)
        queued_bytes = self._tier.queued_bytes
        for keys in wanted.values():
            num_bytes = len(keys) * self._slot_bytes
            if prefill.load_pays(keys, num_bytes, queued_bytes=queued_bytes):
                queued_bytes += num_bytes
                continue
            self._tier.results.deny(keys)
            self._counters.add(metrics.NOT_LOADED, len(keys))
            self._lower_reports.tell(NotLoaded(self._tier.name, keys))
            for key in keys:
                self._found.pop(key, None)

    def _make_room(self) -> dict[BlockKey, int]:
        """Give slots to chunks of the lower tier that were wanted in this step.

        Also to chunks of which the lower tier is yet to be asked, so that it loads what it has
        without another step: at one time, to as many as there are free slots, and to a share of
        those that may be evicted. A chunk that turns out to be missing gives its slot back. The
        chunks that were evicted for it are gone, but a missing chunk is computed and stored soon,
        and would evict them then. Chunks beyond this bound get slots when they were found.
        """
        # A request that did not take what was found forgets the answer: the next one asks anew.
        found = list(self._found)
        unknown = [key for key in self._tier.results.unasked if key not in self._found]
        if not found and not unknown:
            return {}
        self._found.clear()
        evictable = math.ceil(self._index.num_evictable * MAX_SHARE_FOR_UNKNOWN)
        room = self._index.num_free_slots - len(found) + evictable - self._tier.num_unknown
        plan = self._index.begin_store([*found, *unknown[: max(0, room)]])
        self._note_evicted(plan)
        if refused := [key for key in found if key in plan.refused]:
            self._tell_failed_stores(refused, NO_ROOM)
            self._counters.add(metrics.NOT_PROMOTED, len(refused))
            self._tier.results.deny(refused)  # or requests would look for room again and again
        self._pool.unseal(plan.slots)
        self._going_up.update(plan.keys)
        return dict(zip(plan.keys, plan.slots, strict=True))

    def _copy_down(self) -> None:
        """Begin to write back chunks that wait, up to the bound on chunks in flight."""
        if not self._tier.takes_stores:
            return
        now = runtime.monotonic()
        room = self._max_going_down - self._write_back.num_taken - len(self._copied)
        taken = self._write_back.take(now, room)
        if waiting := [key for key in taken if self._tier.is_unwanted(key)]:
            self._write_back.give_back(now, waiting)  # what is below is to be deleted first
        if chosen := [key for key in taken if key not in waiting]:
            self._unproven.update(chosen)
            self._tier.submit_store(chosen, self._index.pin(chosen))

    def _take_moved(self) -> None:
        """Finish loads that ended, once in a step, as many as may be hashed in it."""
        if self._polled:
            return
        self._polled = True
        copied: list[RowOutcome] = []
        failed: list[RowOutcome] = []
        for moved in self._tier.poll():
            if moved.void:
                self._index.give_back([moved.row])
            elif moved.direction is Direction.STORE:
                copied.append(moved)
            else:
                (self._loaded if moved.outcome.done else failed).append(moved)
        self._copied += copied
        changed = {moved.key for moved in copied if moved.outcome.status is Status.CORRUPT}
        stored = {moved.key for moved in copied if moved.outcome.done}
        self._write_back.skip(changed)  # no other attempt makes them intact
        self._write_back.end(
            runtime.monotonic(),
            stored=stored,
            failed=[moved.key for moved in copied if moved.key not in stored | changed],
        )
        if failed:
            self._drop_failed(failed)
        missing = self._tier.take_missing()
        self._going_up.difference_update(missing)
        self._index.finish_store(missing, stored=False)
        landed: list[BlockKey] = []
        while self._loaded and self._bytes_to_verify > 0:
            moved = self._loaded.popleft()
            self._bytes_to_verify -= self._slot_bytes
            self._pool.seal([moved.row], [moved.key])
            landed.append(moved.key)
        if landed:
            self._land(landed)

    def _end_stores(self) -> None:
        """Unpin chunks that were written back, and verify that the copies are of intact bytes.

        A bit that flipped in host memory while it was read would be stored with a matching
        checksum. Requests come first: this uses the bytes of the step that they left over.
        """
        while self._copied and self._bytes_to_verify > 0:
            moved = self._copied.popleft()
            sound = moved.outcome.done
            if sound:
                self._bytes_to_verify -= self._slot_bytes
                sound = self._pool.verify(moved.row, moved.key).done
                if not sound:
                    self._tier.delete([moved.key])
                elif (retention := self._index.retentions([moved.key])[0]) != NORMAL:
                    self._tier.retain([moved.key], retention)
            self._counters.add(metrics.LOWER_STORED if sound else metrics.LOWER_STORES_FAILED)
            self._unproven.discard(moved.key)
            self._index.unpin([moved.key])

    def _note_stored(self, keys: Sequence[BlockKey]) -> None:
        super()._note_stored(keys)
        self._drop_stores(self._write_back.add(dict.fromkeys(keys)))
        self._copy_down()

    def _note_evicted(self, plan: StorePlan) -> None:
        super()._note_evicted(plan)
        self._drop_stores(self._write_back.forget(plan.evicted))

    def _drop_stores(self, keys: Sequence[BlockKey]) -> None:
        self._counters.add(metrics.LOWER_STORES_DROPPED, len(keys))
        self._lower_reports.not_written_back(keys)

    def _drop(self, key: BlockKey, outcome: Outcome) -> None:
        super()._drop(key, outcome)
        self._write_back.forget([key])

    def _drop_failed(self, loads: Sequence[RowOutcome]) -> None:
        for moved in loads:
            status = moved.outcome.status
            self._counters.add(metrics.loaded(metrics.LOWER, Cause.PROMOTION, status))
        logger.warning("%d chunks were not loaded, the first: %s", len(loads), loads[0].outcome)
        keys = [moved.key for moved in loads]
        self._going_up.difference_update(keys)
        self._give_up(keys)

    def _land(self, keys: Sequence[BlockKey]) -> None:
        """Make chunks loadable, and hold them for the waiting requests, so as not to be evicted."""
        self._index.finish_store(keys, stored=True)
        self._counters.add(metrics.LOWER_LOADED, len(keys))
        self._counters.add(metrics.PROMOTED, len(keys))
        self._reports.added(keys)
        self._emit(keys, removed=False)
        self._going_up.difference_update(keys)
        for key in keys:
            for req_id in self._tier.results.waiting_for(key):
                self._hold(key, req_id).outcome = DONE  # verified below, and sealed just now
                self._answers.note(req_id, key, self._tier.name)

    def _release(self, req_id: str) -> None:
        """Release the chunks that a request holds or waits for; running loads go on."""
        super()._release(req_id)
        self._tier.results.release(req_id)
