"""Offloading worker: moves blocks between a worker's caches and the slots of the host pool."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host import SlotMover, slot_key
from kvxfer.backends.host.memory import SharedSegment
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.offloading.interface import (
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from kvxfer.integrations.vllm.offloading.manager import ChunkSlots
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.telemetry.journal import flush_journal
from kvxfer.transfer import PolledEngine
from kvxfer.transfer.job import Direction, JobId

logger = logging.getLogger(__name__)


class KVXferOffloadingWorker(VLLMPlug, OffloadingWorker):
    """Offloading worker that moves blocks between its caches and its part of the pool.

    A failed store is reported as done: the scheduler finds its slots unfinished and drops them. To
    report a failed load would end vLLM's engine, which is why chunks are verified before the
    scheduler promises them. `group_ids` are the indices in vLLM's keys of the caches' groups.
    `shutdown` closes the engine and the segments in `closes`.
    """

    def __init__(
        self,
        engine: PolledEngine[SlotMover],
        *,
        group_ids: Sequence[int],
        blocks_per_chunk: int,
        closes: Sequence[SharedSegment] = (),
    ) -> None:
        self._engine = engine
        self._closes = closes
        self._group_of_id = {group_id: group for group, group_id in enumerate(group_ids)}
        self._blocks_per_chunk = blocks_per_chunk
        self._ours: dict[int, JobId] = {}  # our engine's job for each of vLLM's
        self._results: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ChunkSlots, **_: Any
    ) -> bool:
        """Begin to copy blocks of the caches to their slots."""
        try:
            self._engine.backend.empty(dst_spec.slots)
            keys, ids, firsts = self._batch(src_spec, dst_spec)
            self._require_whole_chunks(keys, ids, firsts)
            self._ours[job_id] = self._engine.submit_store(keys, ids, first_block_indices=firsts)
        except KVXferError:
            logger.exception("store job %d cannot begin; its chunks are dropped", job_id)
            self._results.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(
        self, job_id: int, src_spec: ChunkSlots, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        """Begin to copy slots to blocks of the caches; loads go before stores, expedited or not."""
        keys, ids, firsts = self._batch(dst_spec, src_spec)
        if keys:
            self._ours[job_id] = self._engine.submit_load(keys, ids, first_block_indices=firsts)
        else:
            self._results.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        results, self._results = self._results, []
        finished = {job.job_id: job for job in self._engine.get_finished()}
        for job_id in [each for each, ours in self._ours.items() if ours in finished]:
            job = finished[self._ours.pop(job_id)]
            if lost := [outcome for outcome in job.outcomes if not outcome.done]:
                text = "%s job %d: %d blocks were not moved, the first: %s"
                reason = lost[0].reason or lost[0].status.value
                logger.error(text, job.direction, job_id, len(lost), reason)
            results.append(
                TransferResult(
                    job_id=job_id,
                    success=not lost or job.direction is Direction.STORE,
                    transfer_size=job.num_bytes,
                    transfer_time=job.seconds,
                )
            )
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs ended; unknown ones are ignored."""
        self._engine.wait([self._ours[job_id] for job_id in job_ids if job_id in self._ours])

    def shutdown(self) -> None:
        """Wait for running transfers and close the pool."""
        with ExitStack() as closed:  # closes all of them, whatever fails
            for segment in self._closes:
                closed.callback(segment.close)
            closed.callback(flush_journal)
            self._engine.close()

    def _batch(
        self, blocks: GPULoadStoreSpec, chunks: ChunkSlots
    ) -> tuple[list[BlockKey], list[NDArray[np.int32]], list[int]]:
        """Convert a job to keys of slots, and block ids and first block indices per group."""
        pairs = zip(chunks.keys, chunks.slots, strict=True)
        keys = [slot_key(key, slot, self._group_of_id[group_of(key)]) for key, slot in pairs]
        ends, firsts = np.cumsum(blocks.group_sizes)[:-1], [int(i) for i in blocks.block_indices]
        return keys, np.split(blocks.block_ids, ends), firsts

    def _require_whole_chunks(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[NDArray[np.int32]],
        firsts: Sequence[int],
    ) -> None:
        """Check that each group lacks only leading blocks.

        vLLM leaves out null blocks; in the middle of a chunk that would shift all later blocks.
        """
        num_keys, chunk = Counter(map(group_of, keys)), self._blocks_per_chunk
        for group, (ids, first) in enumerate(zip(block_ids, firsts, strict=True)):
            skip = first % chunk if len(ids) else 0
            if len(ids) + skip != chunk * num_keys[group]:
                expected = f"{chunk} in each of {num_keys[group]} chunks, less {skip}"
                raise InvalidArgumentError(f"blocks of group {group}", len(ids), expected)
