"""Tiers: the connector with a host tier of its own, for the head of what P has the rest of."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvxfer.integrations.vllm.common.settings import find_settings
from kvxfer.integrations.vllm.offloading.connector import offloading_config
from kvxfer.integrations.vllm.offloading.interface import OffloadingConnector, fence_blocks
from kvxfer.integrations.vllm.prefill_decode.connector import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.integrations.vllm.prefill_decode.interface import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
)
from kvxfer.integrations.vllm.prefill_decode.metrics import (
    OFFLOADING,
    PrefillDecodeMetrics,
    PrefillDecodeStats,
)
from kvxfer.integrations.vllm.prefill_decode.settings import TIERS
from kvxfer.integrations.vllm.prefill_decode.step_data import StepData
from kvxfer.integrations.vllm.prefill_decode.worker import Ended


@dataclass(slots=True)
class TieredStep(KVConnectorMetadata):
    """Step data of a connector with tiers.

    Attributes:
        step: What is lent and read.
        tiers: What is stored and loaded.
        loaded_by_both: Requests that begin to load from P and from the tiers in this step.
        kept_by_both: Finished requests whose blocks are lent and still being stored.
    """

    step: StepData
    tiers: Any
    loaded_by_both: set[str]
    kept_by_both: set[str]


@dataclass(frozen=True, slots=True)
class _Shares:
    """Tokens of a prompt beyond those on the device, by where they come from.

    Attributes:
        head: From the tiers.
        rest: From P, after the head.
    """

    head: int
    rest: int


class _Twice:
    """Requests that are done when two have said so."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def expect(self, request_ids: Iterable[str]) -> None:
        """Let requests be done the second time only."""
        self._open.update(request_ids)

    def take(self, *said: Iterable[str] | None) -> set[str]:
        """Return the requests that are done, of those that each one has said."""
        done: set[str] = set()
        for request_ids in said:
            first = self._open.intersection(request_ids or ())
            done.update(set(request_ids or ()) - first)
            self._open -= first
        return done


class TieredConnector(KVXferConnector):
    """Connector with tiers: `KVXferConnector` together with vLLM's OffloadingConnector.

    Whatever the engine computes or reads is stored in the tiers of `backend`. A prompt begins with
    the blocks that are on the device; then come those that the tiers have; and where the request
    has a ticket, P gives the rest. A request is loaded when both parts are, and its blocks are free
    when they are neither lent nor being stored.

    Raises:
        InvalidArgumentError: As for `KVXferConnector`, and for `KVXferOffloadingSpec`.
        UnsupportedEngineError: This release of vLLM cannot end stores of blocks that P's pages are
            about to be written to.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tiers: Any = OffloadingConnector(_tiers_config(vllm_config), role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            fence_blocks(self._tiers, ())
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._has_states = any(Groups.of(kv_cache_config, 1).has_states)
        self._alignment = max(spec.block_size for spec in specs) * self._num_token_shares
        self._shares: dict[str, _Shares] = {}
        self._heads: set[str] = set()  # requests whose head is loaded from this step on
        self._kept_by_both: set[str] = set()
        self._loads, self._saves = _Twice(), _Twice()
        self._bad_blocks: dict[str, list[list[int]]] = {}  # of requests that load their heads yet

    # The side of the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._tiers.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._tiers.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Ask about a request at once, and tell the tiers of it."""
        super().on_new_request(request)
        self._tiers.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM's `KVConnectorBase_V1`."""
        head, _ = self._tiers.get_num_new_matched_tokens(request, num_computed_tokens)
        if head is None:
            return None, False
        rest, _ = super().get_num_new_matched_tokens(request, num_computed_tokens + head)
        if rest is None:
            return None, False
        if rest and head and not self._fits_both(num_computed_tokens + head):
            head = 0  # P gives the head, too
            rest, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
            assert rest is not None  # P has answered
        self._shares[request.request_id] = _Shares(head, rest)
        return head + rest, head + rest > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """See vLLM's `KVConnectorBase_V1`."""
        if self._shares[request.request_id].rest:
            return super().get_loaded_kv_cache_group_ids(request)
        return tuple(self._tiers.get_loaded_kv_cache_group_ids(request))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        head = self._head_of(request, num_external_tokens)
        self._tiers.update_state_after_alloc(request, blocks, head)
        super().update_state_after_alloc(request, blocks, num_external_tokens - head)
        if head:
            self._heads.add(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        """See vLLM's `KVConnectorBase_V1`."""
        head = self._head_of(request, num_external_tokens)
        ours = super().get_external_cache_hit_sources(request, num_external_tokens - head)
        theirs = self._tiers.get_external_cache_hit_sources(request, head)
        return dict(Counter(ours) + Counter(theirs))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """See vLLM's `KVConnectorBase_V1`."""
        step = super().build_connector_meta(scheduler_output)
        for fetch in step.fetches:  # before the tiers plan their step
            written = (block for ids in fetch.wanted.block_ids for block in ids if block)
            fence_blocks(self._tiers, written)
        tiered = TieredStep(
            step=step,
            tiers=self._tiers.build_connector_meta(scheduler_output),
            loaded_by_both=self._heads.intersection(fetch.request_id for fetch in step.fetches),
            kept_by_both=self._kept_by_both,
        )
        self._heads, self._kept_by_both = set(), set()
        return tiered

    def has_pending_push_work(self) -> bool:
        """See vLLM's `KVConnectorBase_V1`."""
        return bool(super().has_pending_push_work() or self._tiers.has_pending_push_work())

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        self._tiers.update_connector_output(connector_output)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM's `SupportsHMA`."""
        is_lent, params = super().request_finished_all_groups(request, block_ids)
        is_stored, _ = self._tiers.request_finished_all_groups(request, block_ids)
        if is_lent and is_stored:
            self._kept_by_both.add(request.request_id)
        self._shares.pop(request.request_id, None)
        return is_lent or is_stored, params

    def take_events(self) -> Iterable[Any]:
        """See vLLM's `KVConnectorBase_V1`."""
        return tuple(self._tiers.take_events())

    def reset_cache(self) -> bool | None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().reset_cache()
        done: bool | None = self._tiers.reset_cache()
        return done

    # The side of a worker.

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether vLLM should allocate one tensor of all layers."""
        return bool(getattr(self._tiers, "prefer_cross_layer_blocks", True))

    def register_kv_caches(self, kv_caches: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().register_kv_caches(kv_caches)
        self._tiers.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`, up to 0.28."""
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        self._tiers.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def bind_connector_metadata(self, connector_metadata: TieredStep) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().bind_connector_metadata(connector_metadata.step)
        self._tiers.bind_connector_metadata(connector_metadata.tiers)
        self._loads.expect(connector_metadata.loaded_by_both)
        self._saves.expect(connector_metadata.kept_by_both)

    def clear_connector_metadata(self) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        super().clear_connector_metadata()
        self._tiers.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: TieredStep) -> None:
        """End the leases and the stores of blocks that are about to be written to."""
        super().handle_preemptions(kv_connector_metadata.step)
        self._tiers.handle_preemptions(kv_connector_metadata.tiers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of a step, and lend and store the blocks of earlier steps."""
        self._tiers.start_load_kv(forward_context, **kwargs)
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """See vLLM's `KVConnectorBase_V1`."""
        self._tiers.wait_for_save()

    def build_connector_worker_meta(self) -> Any:
        """See vLLM's `KVConnectorBase_V1`."""
        return self._tiers.build_connector_worker_meta()

    def _take_ended(self, finished_req_ids: set[str]) -> Ended:
        ours = super()._take_ended(finished_req_ids)
        sent, received = self._tiers.get_finished(finished_req_ids)
        ended = Ended(
            sent=self._saves.take(ours.sent, sent),
            received=self._loads.take(ours.received, received),
        )
        self._bad_blocks |= ours.bad_blocks
        for request_id in ended.received & self._bad_blocks.keys():
            ended.bad_blocks[request_id] = self._bad_blocks.pop(request_id)
        return ended

    # Both sides.

    def shutdown(self) -> None:
        """End every lease and load, and then the tiers."""
        try:
            super().shutdown()
        finally:
            self._tiers.shutdown()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See vLLM's `KVConnectorBase_V1`."""
        ours, theirs = super().get_kv_connector_stats(), self._tiers.get_kv_connector_stats()
        stats = TieredStats(
            (ours.data if ours else {}) | {OFFLOADING: theirs.data if theirs else {}}
        )
        return None if stats.is_empty() else stats

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> "TieredMetrics":
        """See vLLM's `KVConnectorBase_V1`."""
        return TieredMetrics(vllm_config, *args)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See vLLM's `KVConnectorBase_V1`."""
        layout: str | None = OffloadingConnector.get_required_kvcache_layout(
            _tiers_config(vllm_config)
        )
        return layout

    def _fits_both(self, num_tokens: int) -> bool:
        """Whether the tiers' part of a prompt may end here: not within a block, nor a state."""
        return num_tokens % self._alignment == 0 and not self._has_states

    def _head_of(self, request: Any, num_external_tokens: int) -> int:
        shares = self._shares.get(request.request_id)
        return min(shares.head, num_external_tokens) if shares else 0


TieredConnector.__name__ = KVXferConnector.__name__  # a MultiConnector finds classes by names


class TieredStats(PrefillDecodeStats):
    """Statistics of prefill and decode, with those of the tiers under a key of their own."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data)
        self.data.setdefault(OFFLOADING, {})

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data[OFFLOADING] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        ours = {name: self.data[name] for name in self.data.keys() - {OFFLOADING}}
        return PrefillDecodeStats(ours).is_empty() and bool(self.tiers.is_empty())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the statistics of another worker, or of a later step."""
        super().aggregate(other)
        self.data[OFFLOADING] = self.tiers.aggregate(TieredStats(other.data).tiers).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summarise for vLLM's log."""
        return {**super().reduce(), **self.tiers.reduce()}

    @property
    def tiers(self) -> Any:
        """Statistics of the tiers, in vLLM's form."""
        return OffloadingConnector.build_kv_connector_stats(self.data[OFFLOADING])


class TieredMetrics(PrefillDecodeMetrics):
    """Metrics of Prometheus of prefill and decode, and of the tiers."""

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._tiers = OffloadingConnector.build_prom_metrics(_tiers_config(vllm_config), *args)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count the statistics of an engine."""
        super().observe(transfer_stats_data, engine_idx)
        self._tiers.observe(transfer_stats_data.get(OFFLOADING, {}), engine_idx)


def _tiers_config(vllm_config: Any) -> Any:
    """Make the configuration of the tiers' connector, as that of an engine with no other."""
    settings = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).values
    tiers = {name: settings[name] for name in TIERS if name in settings}
    return offloading_config(vllm_config, tiers)
