"""Tiered offloading manager, the scheduler's side: host memory with a lower tier below it."""

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from kvxfer.backends.host import HostPool
from kvxfer.integrations.vllm import metrics
from kvxfer.integrations.vllm.interface import (
    LookupResult,
    PrepareStoreOutput,
    ReqContext,
    may_load_from_storage,
)
from kvxfer.integrations.vllm.lower_tier import LowerTier
from kvxfer.integrations.vllm.manager import KVXferOffloadingManager
from kvxfer.integrations.vllm.moved import Moved
from kvxfer.storage.backend import DONE
from kvxfer.storage.index import BlockIndex, BlockState
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.transfer.job import Direction

MAX_SHARE_ON_THE_WAY_DOWN = 0.5
"""Largest share of slots that are copied to the tier below at one time: these cannot be evicted,
and stores need room."""
YIELD_S = 0.001
"""Sleep in a scheduling step that runs no model, while requests wait: in one process, vLLM polls
in a tight loop, and the thread that moves chunks would get the interpreter lock only every 5 ms."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Pauses before a retry of chunks that the tier below failed to store; each is twice as long as the
one before."""

logger = logging.getLogger(__name__)


class TieredOffloadingManager(KVXferOffloadingManager):
    """Offloading manager that also writes chunks of the host pool back to a lower tier.

    A chunk is written back when every worker has stored it, pinned meanwhile. Chunks that the
    lower tier fails to store are retried, as long as they are in host memory. A chunk that is
    looked up and not in host memory is looked up below (`RETRY`), given a slot and loaded
    (`HIT_PENDING`), and then held for the requests that wait for it. Any failure below makes it a
    miss for those requests. While a load that was abandoned may still write to its slot, the chunk
    is a miss and the slot stays out of use.

    Args:
        pool: The pool, mapped by this process; closed on `shutdown`.
        index: The index over its slots.
        tier: Moves the rows of the pool; closed on `shutdown`.
        emit_events: Whether to keep events for `take_events`.
    """

    def __init__(
        self, pool: HostPool, index: BlockIndex, tier: LowerTier, *, emit_events: bool
    ) -> None:
        super().__init__(pool, index, emit_events=emit_events)
        self._tier = tier
        self._waiting: dict[BlockKey, set[str]] = {}  # requests that wait for keys on the way up
        self._to_load: dict[BlockKey, int] = {}
        self._loaded: deque[Moved] = deque()
        self._copied: deque[Moved] = deque()
        self._max_going_down = max(1, int(index.num_slots * MAX_SHARE_ON_THE_WAY_DOWN))
        self._num_going_down = 0
        self._not_taken: dict[BlockKey, None] = {}
        self._pause_s = 0.0
        self._next_offer_s = 0.0
        self._kept_out: dict[int, BlockKey] = {}
        self._polled = False
        self._step_ended_s = 0.0

    def lookup(self, key: BlockKey, req_context: ReqContext, **_: Any) -> LookupResult:
        """Look up a chunk in both tiers; `RETRY` while the lookup in the lower one runs."""
        self._take_moved()
        if self._tier.is_late(key):
            return LookupResult.MISS
        result = super().lookup(key, req_context)
        if result is not LookupResult.MISS:
            if key in self._waiting:
                self._waiting[key].add(req_context.req_id)
            return result
        if not may_load_from_storage(req_context):
            return LookupResult.MISS
        found = self._tier.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if found and self._make_room(key):
            self._waiting[key] = {req_context.req_id}
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def prepare_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, **_: Any
    ) -> PrepareStoreOutput | None:
        """Find slots for chunks, after those of ended transfers were unpinned."""
        self._take_moved()
        return super().prepare_store(keys, req_context)

    def complete_store(
        self, keys: Collection[BlockKey], req_context: ReqContext, *args: Any, **kwargs: Any
    ) -> None:
        """Make chunks loadable, and begin to write them back to the lower tier."""
        wanted = set(keys)
        storing = [key for key in self._storing if key in wanted]
        super().complete_store(keys, req_context, *args, **kwargs)
        self._copy_down([key for key in storing if self._index.state(key) is not None])

    def on_schedule_end(self, context: Any) -> None:
        """Start the lower tier's lookups of this step, and loads of the chunks that it found."""
        self._take_moved()
        self._end_stores()
        self._offer_again()
        super().on_schedule_end(context)
        self._polled = False
        self._tier.flush()
        if self._to_load:
            self._tier.submit_load(list(self._to_load), list(self._to_load.values()))
            self._to_load.clear()
        self._yield()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the chunks that a request holds or waits for; running loads go on."""
        super().on_request_finished(req_context)
        self._tier.release(req_context.req_id)

    def reset_cache(self) -> None:
        """Forget every chunk in both tiers; slots that are still in use are kept out.

        A worker may still write to slots that are free now, until vLLM calls `on_reset_flushed`
        (0.33). No chunk is loaded from below into them before that: keys of the lower tier have
        another salt after a reset, and the first chunk gets there when every worker has stored it.
        """
        in_use = self._tier.reset()
        super().reset_cache()
        self._waiting.clear()
        self._to_load.clear()
        self._loaded.clear()
        self._copied.clear()
        self._not_taken.clear()
        self._num_going_down = 0
        self._polled = False
        self._keep_out(set(in_use))

    def shutdown(self) -> None:
        """Finish write-backs to the lower tier, as far as time allows, and close the pool."""
        self._tier.close()
        super().shutdown()

    def _yield(self) -> None:
        step_s = time.monotonic() - self._step_ended_s
        if step_s < YIELD_S and (self._waiting or self._tier.is_asked):
            time.sleep(YIELD_S)
        self._step_ended_s = time.monotonic()

    def _make_room(self, key: BlockKey) -> bool:
        """Give a slot to a chunk that the lower tier has; loads begin when the step ends."""
        plan = self._index.begin_store([key])
        self._counters.add(metrics.EVICTED, len(plan.evicted))
        self._emit(plan.evicted, removed=True)
        if not plan.keys:
            self._counters.add(metrics.LOWER_LOADS_REFUSED)
            self._tier.deny([key])  # or the request would look for room again and again
            return False
        self._pool.unseal(plan.slots)
        self._to_load[key] = plan.slots[0]
        return True

    def _copy_down(self, stored: Sequence[BlockKey]) -> None:
        """Begin to write back the first of these chunks, up to the bound on chunks in flight."""
        room = self._max_going_down - self._num_going_down
        self._counters.add(metrics.LOWER_STORES_DROPPED, max(0, len(stored) - room))
        if chosen := list(stored[:room]):
            self._tier.submit_store(chosen, self._index.pin(chosen))
            self._num_going_down += len(chosen)

    def _take_moved(self) -> None:
        """Finish loads that ended, once in a step, as many as may be hashed in it.

        Once, because results in the middle of a prompt's lookups would give slots to its end first.
        """
        if self._polled:
            return
        self._polled = True
        for moved in self._tier.poll():
            if moved.void:
                self._index.finish_store([self._kept_out.pop(moved.row)], stored=False)
            elif moved.direction is Direction.LOAD:
                self._loaded.append(moved)
            else:
                self._copied.append(moved)
        landed: list[BlockKey] = []
        failed: list[Moved] = []
        while self._loaded and self._bytes_to_verify > 0:
            moved = self._loaded.popleft()
            if not moved.outcome.done:
                failed.append(moved)
                continue
            self._bytes_to_verify -= self._pool.shape.slot_size_bytes
            self._pool.seal([moved.row], [moved.key])
            landed.append(moved.key)
        if landed:
            self._land(landed)
        if failed:
            self._drop_failed(failed)

    def _end_stores(self) -> None:
        """Unpin chunks that were written back, and verify that the copies are of intact bytes.

        A bit that flipped in host memory before it was read would be stored with a matching
        checksum. Requests come first: this uses the bytes of the step that they left over.
        """
        while self._copied and self._bytes_to_verify > 0:
            moved = self._copied.popleft()
            self._num_going_down -= 1
            sound = moved.outcome.done
            self._note_taken(moved.key, taken=sound)
            if sound:
                self._bytes_to_verify -= self._pool.shape.slot_size_bytes
                sound = self._pool.verify(moved.row, moved.key).done
                if not sound:
                    self._tier.delete([moved.key])
            self._counters.add(metrics.LOWER_STORED if sound else metrics.LOWER_STORES_FAILED)
            self._index.unpin([moved.key])

    def _note_taken(self, key: BlockKey, *, taken: bool) -> None:
        """Remember a chunk that the lower tier failed to store, and when to retry."""
        if taken:
            self._not_taken.pop(key, None)
            self._pause_s = 0.0
            return
        self._not_taken[key] = None
        now = time.monotonic()
        if now >= self._next_offer_s:  # not for each chunk of a batch
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._next_offer_s = now + self._pause_s

    def _offer_again(self) -> None:
        """Retry failed write-backs: one chunk as a probe, and the others once it was stored."""
        room = self._max_going_down - self._num_going_down
        if not self._not_taken or room < 1 or time.monotonic() < self._next_offer_s:
            return
        ready = {BlockState.READY, BlockState.LOADING}
        there = [key for key in self._not_taken if self._index.state(key) in ready]
        self._not_taken = dict.fromkeys(there)
        offered = there[: 1 if self._pause_s else room]
        for key in offered:
            del self._not_taken[key]  # added again if the retry fails
        self._copy_down(offered)

    def _drop_failed(self, loads: Sequence[Moved]) -> None:
        self._counters.add(metrics.LOWER_LOADS_FAILED, len(loads))
        logger.warning("%d chunks were not loaded, the first: %s", len(loads), loads[0].outcome)
        self._give_up([moved.key for moved in loads])
        for moved in loads:
            self._waiting.pop(moved.key, None)

    def _land(self, keys: Sequence[BlockKey]) -> None:
        """Make chunks loadable, and hold them for the waiting requests, so as not to be evicted."""
        self._index.finish_store(keys, stored=True)
        self._counters.add(metrics.LOWER_LOADED, len(keys))
        self._emit(keys, removed=False)
        for key in keys:
            for req_id in self._waiting.pop(key, ()):
                self._hold(key, req_id).outcome = DONE  # verified below, and sealed just now

    def _release(self, req_id: str) -> None:
        super()._release(req_id)
        for req_ids in self._waiting.values():
            req_ids.discard(req_id)

    def _keep_out(self, slots: Collection[int]) -> None:
        """Occupy slots of the empty index that a transfer may still write to or read from."""
        if not slots:
            self._kept_out = {}
            return
        num_slots = self._index.num_slots
        names = [make_block_key(b"kept out %d" % index, 0) for index in range(num_slots)]
        plan = self._index.begin_store(names)
        self._kept_out = {
            slot: key for key, slot in zip(plan.keys, plan.slots, strict=True) if slot in slots
        }
        kept = set(self._kept_out.values())
        self._index.finish_store([key for key in plan.keys if key not in kept], stored=False)
