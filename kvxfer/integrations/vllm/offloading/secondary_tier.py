"""Secondary tier under vLLM's own CPU offloading, for its `TieringOffloadingSpec`."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.connect import parse_backend
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.integrations.vllm.common.model_identity import chosen_order, require_telling_keys
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.common.worker_pages import interleave_tokens
from kvxfer.integrations.vllm.offloading.interface import (
    JobResult,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
    engine_config,
    require_tiering,
)
from kvxfer.integrations.vllm.offloading.lower_tier import STORE_TIMEOUT_S, LowerTier
from kvxfer.integrations.vllm.offloading.metrics import DefinesMetrics
from kvxfer.integrations.vllm.offloading.requests import Requests
from kvxfer.integrations.vllm.offloading.rows import row_namespace
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Reports
from kvxfer.telemetry.environment import environment_observers
from kvxfer.transfer.job import JobId


@dataclass(slots=True)
class _Job:
    """Job of vLLM with rows that are still being moved."""

    job_id: int
    num_left: int
    done: list[BlockKey] = field(default_factory=list)
    failed: bool = False
    started: float = field(default_factory=runtime.monotonic)


class KVXferTier(VLLMPlug, DefinesMetrics, SecondaryTierManager):
    """Secondary tier that stores chunks of vLLM's CPU tier in a kvxfer backend, verified.

    Configured as one of `secondary_tiers`: `{"type": "KVXferTier", "module_path":
    "kvxfer.integrations.vllm", "backend": "file:///var/cache/kv?capacity=200GiB", "revision":
    "..."}`. A chunk that is corrupt, gone or late is dropped from its promotion and recomputed.
    A job is reported only once nothing touches its memory, even after its deadline, because vLLM
    then reuses the memory. vLLM passes the first arguments by position; `primary_kv_view` has the
    shape `(num_chunks, row_size_bytes)` and is valid until `shutdown` has returned.

    Args:
        backend: URL or mapping of a backend, or an open one; closed on `shutdown`.
        revision: Name of the model and of every property that changes its values at equal tokens:
            weights, quantization, overrides of its configuration. vLLM does not pass these on.

    Raises:
        InvalidArgumentError: `backend` is wrong, or needs a `revision`; or as
            `require_telling_keys`.
        UnsupportedEngineError: vLLM is older than 0.31.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        backend: str | Mapping[str, Any] | Backend,
        revision: str = "",
    ) -> None:
        require_tiering()
        turn = 1
        if (vllm_config := engine_config()) is not None:
            require_telling_keys(vllm_config)
            turn = interleave_tokens(vllm_config)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        rows = _detached(primary_kv_view)
        config = offloading_spec.config
        model = Namespace(model="", revision=revision, config_hash=chosen_order(vllm_config))
        row_bytes = rows.shape[1]
        namespace = row_namespace(config, model, row_size_bytes=row_bytes, interleave_tokens=turn)
        observers = environment_observers(namespace)
        if not isinstance(backend, Backend):
            if not revision:
                rule = "a name for this model, with its commit, quantization and overrides"
                raise InvalidArgumentError("revision", revision, rule)
            replica = config.parallel.data_parallel_index
            backend_type, backend_config = parse_backend(backend, replica)
            backend = backend_type(backend_config, namespace)
        self._tier = LowerTier(
            rows,
            namespace,
            backend,
            emit_events=offloading_spec.kv_events_config.enable_kv_cache_events,
            observers=observers,
        )
        self._requests = Requests(Reports(observers, self._tier.name))
        self._jobs: dict[JobId, _Job] = {}
        self._empty: list[_Job] = []

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the metrics since the last call."""
        return self._tier.metrics.report()

    def lookup(self, key: BlockKey, req_context: ReqContext) -> LookupResult:
        """Look up a chunk in the backend; `RETRY` while the lookup has not ended."""
        found = self._tier.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        self._requests.note(req_context.req_id, key, self._tier.name if found else "")
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks of the CPU tier to the backend."""
        self._submit(self._tier.submit_store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks of the backend to the CPU tier."""
        self._submit(self._tier.submit_load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, a failed one with the chunks it moved."""
        results = [self._result(job) for job in self._empty]
        self._empty.clear()
        for moved in self._tier.poll():
            job = self._jobs[moved.job.job_id]
            job.num_left -= 1
            if moved.outcome.done:
                job.done.append(moved.key)
            else:
                job.failed = True
            if not job.num_left:
                del self._jobs[moved.job.job_id]
                results.append(self._result(job))
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Offload every new chunk of a request."""
        self._requests.arrive(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget lookup results that only this request wanted."""
        self._requests.finish(req_context.req_id)
        self._tier.wanted.release(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start the backend lookup of the keys that were wanted in this step."""
        self._requests.schedule(context.new_req_ids)
        self._tier.flush()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of blocks that entered or left the backend since the last call."""
        return self._tier.take_events()

    def drain_jobs(self) -> None:
        """Block until nothing touches the CPU tier's memory; an error keeps vLLM from a reset."""
        if not self._tier.drain(timeout_s=2 * STORE_TIMEOUT_S):
            text = "cannot be drained; its memory is still in use"
            raise BackendUnavailableError(f"{self.tier_type} {text}")

    def shutdown(self) -> None:
        """Finish the stores, as far as time allows, and close the backend; may be called again.

        If it raises, the backend may still touch the CPU tier's memory, and vLLM keeps it.
        """
        if not self._tier.close():
            text = "did not close in time; its memory is still in use"
            raise BackendUnavailableError(f"{self.tier_type} {text}")

    def _submit(self, submit: Callable[..., JobId], job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        job = _Job(job_metadata.job_id, len(keys))
        if keys:
            self._jobs[submit(keys, job_metadata.chunk_ids.tolist())] = job
        else:
            self._empty.append(job)

    def _result(self, job: _Job) -> JobResult:
        successful: Collection[BlockKey] | None = job.done if job.failed and job.done else None
        return JobResult(
            job_id=job.job_id,
            success=not job.failed,
            successful_keys=successful,
            transfer_time=runtime.monotonic() - job.started,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )


def _detached(view: memoryview) -> NDArray[np.uint8]:
    """View the same memory without a reference to the view, which vLLM releases at shutdown."""
    array = np.asarray(view)
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    rows: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), np.uint8)
    return rows.reshape(array.shape)
