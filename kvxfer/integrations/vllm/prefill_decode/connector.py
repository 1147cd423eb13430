"""Connector: prefill in one engine and decode in another, through vLLM's connector interface."""

# ruff: noqa: D102 - the methods are those of vLLM's `KVConnectorBase_V1` and `SupportsHMA`

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.freed_blocks import fence, fence_loads_of_others
from kvxfer.integrations.vllm.common.kv_caches import KVCacheHooks
from kvxfer.integrations.vllm.common.model_identity import handover_namespace
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.common.settings import (
    OFFLOAD_SETTINGS,
    configs_of_callers,
    find_settings,
)
from kvxfer.integrations.vllm.common.settings import logger as vllm_logger
from kvxfer.integrations.vllm.prefill_decode.decode import DecodeScheduler
from kvxfer.integrations.vllm.prefill_decode.groups import (
    Groups,
    describe_worker,
    fails_by_block,
    why_not,
)
from kvxfer.integrations.vllm.prefill_decode.interface import (
    HAS_TRANSFER_RESULTS,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorStats,
    OffloadingConnectorStats,
    SupportsHMA,
    transfer_groups,
    transfer_results,
)
from kvxfer.integrations.vllm.prefill_decode.metrics import Counters, PrefillDecodeMetrics
from kvxfer.integrations.vllm.prefill_decode.prefill import PrefillScheduler
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.settings import Settings
from kvxfer.integrations.vllm.prefill_decode.ticket import make_params, wants_prefill
from kvxfer.integrations.vllm.prefill_decode.worker import Ended, PrefillDecodeWorker, StepData
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import CacheDescription
from kvxfer.lending.handover import Handover, reachable_host
from kvxfer.storage.observer import LENT, Reports
from kvxfer.telemetry.journal import flush_journal, journal_observers

PEERS = "nixl"
"""Name of the tier for blocks that other engines lend."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Description of a worker's caches, and the port on which it listens; 0 if it does not."""

    description: bytes
    port: int


class DoneByBoth:
    """Requests that are done only when both the hand-over and the tiers have reported them."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def expect(self, request_ids: Iterable[str]) -> None:
        """Expect two reports of each of these requests."""
        self._open.update(request_ids)

    def take(self, *said: Iterable[str] | None) -> set[str]:
        """Return the requests that are done, among those that each side now reports."""
        done: set[str] = set()
        for request_ids in said:
            first = self._open.intersection(request_ids or ())
            done.update(set(request_ids or ()) - first)
            self._open -= first
        return done


class NoTiers(KVConnectorBase_V1):
    """Tiers of an engine that has none: they find, keep and report nothing."""

    prefer_cross_layer_blocks = True

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """Find no tokens."""
        return 0, False

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        """Keep no blocks."""
        return False, None

    def reset_cache(self) -> bool:
        """Have nothing to forget."""
        return True

    def _do_nothing(self, *_: Any, **__: Any) -> Any:
        """Do nothing."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing
    update_state_after_alloc = build_connector_meta = _do_nothing


class KVXferConnector(VLLMPlug, KVCacheHooks, KVConnectorBase_V1, SupportsHMA):
    """Connector that hands the KV cache of prompts from prefill engines, P, to decode engines, D.

    Settings are in `kv_connector_extra_config`, see `Settings`. An engine with `listen` lends the
    pages of prompts that it computes; any engine reads those of others. With `backend`, vLLM's
    OffloadingConnector also stores the blocks that it computes or reads in its own tiers: a prompt
    begins with the blocks on the device, then come those of the tiers, and P provides the rest.

    Raises:
        InvalidArgumentError: A setting is unknown or invalid, or the engine is parallel in a way
            that is not supported; with tiers, as for `KVXferOffloadingSpec`.
        UnsupportedEngineError: There are tiers, and this release of vLLM cannot end the stores that
            read blocks before P's pages are loaded into these.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        found = find_settings(transfer.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            vllm_logger.info("KVXferConnector has settings: %s", found)
        with found.checked():
            self._settings = Settings.parse(found.values).of_replica(
                parallel.data_parallel_index, parallel.tensor_parallel_size
            )
        # In a MultiConnector, ours is a copy; the scheduler later reads the MultiConnector's own.
        for config in configs_of_callers():
            if (each := getattr(config, "kv_transfer_config", None)) is not None:
                each.kv_load_failure_policy = self._settings.on_failure
        for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(parallel, name, 1)) > 1:
                raise InvalidArgumentError(name, size, "1 with KVXferConnector")
        self._num_token_shares = int(getattr(parallel, "decode_context_parallel_size", 1))
        self._reads, self._lends = self._sides(is_scheduler=role == KVConnectorRole.SCHEDULER)
        self._namespace = handover_namespace(vllm_config, self._settings.revision)
        self._journals = journal_observers(self._namespace, engine=transfer.engine_id or "")
        self._counters = Counters()
        self._prompts: Prompts | None = None
        self._prefill: PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        self._worker: PrefillDecodeWorker | None = None
        self._handover: Handover | None = None
        self._facts: WorkerFacts | None = None
        self._ended = Ended()
        self._has_warned = False
        kind, config = find_tiers(vllm_config)
        self._tiers: Any = kind(config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            fence([self._tiers])
        # Tokens of a prompt after those on the device: from the tiers, and then from P.
        self._matched_tokens: dict[str, tuple[int, int]] = {}
        self._by_tiers: set[str] = set()  # requests whose head the tiers load from this step on
        self._kept_by_both: set[str] = set()
        self._loads, self._saves = DoneByBoth(), DoneByBoth()
        self._alignment, self._has_states = 1, False  # decide where the head of a prompt may end
        self._bad_blocks: dict[str, list[list[int]]] = {}  # of requests still loading their heads

    # The scheduler's side.

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerFacts]) -> None:
        """Take the workers' descriptions of themselves, by rank."""
        if not (self._reads or self._lends):
            return
        fence_loads_of_others()
        facts = metadata.get(0)
        if not isinstance(facts, WorkerFacts):
            rule = "facts of KVXferConnector: it must be the first of a MultiConnector's connectors"
            raise InvalidArgumentError("metadata[0, 0]", facts, rule)
        groups = Groups.of(self._kv_cache_config, self._num_token_shares)
        self._alignment, self._has_states = max(groups.tokens_per_block), any(groups.has_states)
        prompts = self._prompts = Prompts.of(self._vllm_config, groups)
        self._handover = Handover(
            self._settings.asking, self._namespace, CacheDescription.decode(facts.description)
        )
        host = reachable_host(self._settings.exchange, self._settings.advertise)
        own = Endpoint(host, facts.port) if self._lends else None
        if self._reads:
            self._decode = DecodeScheduler(
                self._handover,
                self._settings,
                groups=groups,
                prompts=prompts,
                counters=self._counters,
                own=own,
                reports=Reports(self._journals, PEERS),
            )
        if own is not None:
            params = partial(
                make_params,
                endpoint=own,
                engine_id=self._vllm_config.kv_transfer_config.engine_id,
                tp_size=self._vllm_config.parallel_config.tensor_parallel_size,
            )
            self._prefill = PrefillScheduler(groups=groups, prompts=prompts, make_params=params)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._tiers.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._tiers.bind_gpu_block_pool(gpu_block_pool)

    @property
    def requires_kv_delivery(self) -> bool:
        return self._lends

    def on_new_request(self, request: Any) -> None:
        """Ask about a request of D at once, prepare one of P, and note the adapter of any."""
        if self._prompts is not None:
            self._prompts.note(request)
        if self._prefill is not None:
            self._prefill.on_new_request(request)
        if self._decode is not None:
            self._decode.on_new_request(request)
        self._tiers.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        head, _ = self._tiers.get_num_new_matched_tokens(request, num_computed_tokens)
        count = self._decode.num_matched_tokens if self._decode is not None else lambda *_: 0
        rest = None if head is None else count(request, num_computed_tokens + head)
        if head is None or rest is None:
            return None, False
        ends_within = (num_computed_tokens + head) % self._alignment or self._has_states
        if rest and head and ends_within:  # in a block, or with states: P provides the head, too
            head, rest = 0, count(request, num_computed_tokens)
            assert rest is not None  # P has answered
        self._matched_tokens[request.request_id] = head, rest
        return head + rest, head + rest > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        head = min(self._matched_tokens.get(request.request_id, (0, 0))[0], num_external_tokens)
        self._tiers.update_state_after_alloc(request, blocks, head)
        if self._decode is not None:
            self._decode.on_alloc(request, blocks, num_external_tokens - head)
            if num_external_tokens > head:  # before the tiers plan their step
                fence([self._tiers], blocks)
                if self._settings.backend:
                    manager = self._tiers.connector_scheduler.manager
                    manager.begin(request.request_id, is_given=True)
        if self._prefill is not None:
            self._prefill.on_alloc(request)
        if head:
            self._by_tiers.add(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        head = min(self._matched_tokens.get(request.request_id, (0, 0))[0], num_external_tokens)
        ours = super().get_external_cache_hit_sources(request, num_external_tokens - head)
        theirs = self._tiers.get_external_cache_hit_sources(request, head)
        return dict(Counter(ours) + Counter(theirs))

    def build_connector_meta(self, scheduler_output: Any) -> StepData:
        step = StepData() if self._prefill is None else self._prefill.plan(scheduler_output)
        if self._decode is not None:
            step.fetches = self._decode.take_fetches()
        step.tiers = self._tiers.build_connector_meta(scheduler_output)
        step.loaded_by_both = self._by_tiers.intersection(each.request_id for each in step.fetches)
        step.kept_by_both = self._kept_by_both
        self._by_tiers, self._kept_by_both = set(), set()
        return step

    def has_pending_push_work(self) -> bool:
        return bool(super().has_pending_push_work() or self._tiers.has_pending_push_work())

    def update_connector_output(self, connector_output: Any) -> None:
        self._tiers.update_connector_output(connector_output)
        if self._decode is not None:
            self._decode.on_received(connector_output.finished_recving or ())
        if self._prefill is not None:
            self._prefill.on_sent(list(connector_output.finished_sending or ()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_lent, params = False, None
        if self._decode is not None:
            self._decode.finish(request)
        if wants_prefill(request.kv_transfer_params):
            if self._prefill is not None:
                is_lent, params = self._prefill.finish(request, block_ids)
            elif not self._has_warned:
                self._has_warned = True
                text = "a request is to be handed over, but this engine lends nothing"
                logger.warning(text)
        is_stored, _ = self._tiers.request_finished_all_groups(request, block_ids)
        if is_lent and is_stored:
            self._kept_by_both.add(request.request_id)
        self._matched_tokens.pop(request.request_id, None)
        return is_lent or is_stored, params

    def take_events(self) -> Iterable[Any]:
        return tuple(self._tiers.take_events())

    def reset_cache(self) -> bool:
        """End all leases; vLLM frees the blocks of finished requests once nobody reads them.

        vLLM resets its own cache first, which fails while blocks are lent; a later one can succeed.
        """
        if self._prefill is not None:
            self._prefill.reset()
        return self._tiers.reset_cache() is not False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        head, rest = self._matched_tokens.get(request.request_id, (0, 0))
        if head and not rest:
            return tuple(self._tiers.get_loaded_kv_cache_group_ids(request))
        return transfer_groups(self._kv_cache_config)

    # A worker's side.

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether vLLM should allocate one tensor of all layers."""
        return bool(getattr(self._tiers, "prefer_cross_layer_blocks", True))

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._tiers.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """See vLLM's `KVConnectorBase_V1`, up to 0.28."""
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        self._tiers.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """Begin to lend, and to load into, the blocks of this worker's caches."""
        if not (self._reads or self._lends):
            return
        description = describe_worker(caches, self._kv_cache_config, self._vllm_config)
        rank = description.shard.rank
        exchange, reading = self._settings.exchange, self._settings.reading
        config = exchange.at_rank(rank) if self._lends else reading
        self._handover = Handover(config, self._namespace, description, caches)
        if self._handover.way:
            vllm_logger.info("KVXferConnector: %s", self._handover.way)
        self._handover.start()
        if self._journals:
            self._handover.observe(Reports(self._journals, PEERS))
        self._worker = PrefillDecodeWorker(
            self._handover, self._counters, Reports(self._journals, LENT)
        )
        self._facts = WorkerFacts(description.encode(), self._handover.port)

    def get_handshake_metadata(self) -> WorkerFacts | None:
        return self._facts

    def bind_connector_metadata(self, connector_metadata: StepData) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._tiers.bind_connector_metadata(connector_metadata.tiers)
        self._loads.expect(connector_metadata.loaded_by_both)
        self._saves.expect(connector_metadata.kept_by_both)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._tiers.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: StepData) -> None:
        """Prepare a step: vLLM calls this in each, before it writes to any block."""
        if self._worker is not None:
            self._worker.prepare(kv_connector_metadata)
        self._tiers.handle_preemptions(kv_connector_metadata.tiers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of a step; the tiers also begin to store blocks of earlier steps."""
        self._tiers.start_load_kv(forward_context, **kwargs)
        step = self._get_connector_metadata()
        if self._worker is not None and isinstance(step, StepData):
            self._worker.begin(step)

    def wait_for_layer_load(self, *_: Any, **__: Any) -> None:
        """Do nothing: loads end before a request is scheduled, and blocks are read as a whole."""

    save_kv_layer = wait_for_layer_load

    def wait_for_save(self) -> None:
        self._tiers.wait_for_save()

    def build_connector_worker_meta(self) -> Any:
        return self._tiers.build_connector_worker_meta()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See vLLM's `KVConnectorBase_V1`; before 0.30 vLLM calls this one."""
        self._ended = self._take_ended(finished_req_ids)
        return self._ended.sent, self._ended.received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See vLLM's `KVConnectorBase_V1`; from 0.30 on vLLM calls this one."""
        self._ended = ended = self._take_ended(finished_req_ids)
        failed = set() if fails_by_block(self._kv_cache_config) else set(ended.bad_blocks)
        return transfer_results(ended.sent, ended.received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """List blocks that were not loaded, of a model whose loads can fail by block."""
        if not fails_by_block(self._kv_cache_config):
            return set()
        return {block for (bad,) in self._ended.bad_blocks.values() for block in bad}

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        num_leases = self._prefill.num_leases if self._prefill is not None else None
        stats, theirs = self._counters.take(num_leases), self._tiers.get_kv_connector_stats()
        if theirs is not None:
            stats.aggregate(theirs)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """End every lease and load, then shut the tiers down."""
        try:
            if self._handover is not None:
                self._handover.close()
            flush_journal()
        finally:
            self._tiers.shutdown()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's
        """Whether vLLM may move the caches, from 0.33 on: no, other engines read them in place."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return OffloadingConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> PrefillDecodeMetrics:
        kind, config = find_tiers(vllm_config)
        tiers = kind.build_prom_metrics(config, *args)
        return PrefillDecodeMetrics(vllm_config, *args, tiers=tiers)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See vLLM's `KVConnectorBase_V1`: any layout will do, but tiers may require one."""
        kind, config = find_tiers(vllm_config)
        layout: str | None = kind.get_required_kvcache_layout(config)
        return layout

    def _sides(self, *, is_scheduler: bool) -> tuple[bool, bool]:
        """Decide whether this engine reads and whether it lends; its scheduler logs why not."""
        transfer, config = self._vllm_config.kv_transfer_config, self._kv_cache_config
        reads, lends = transfer.is_kv_consumer, transfer.is_kv_producer
        lends &= self._settings.exchange.listen_endpoint is not None
        text = "prompts are neither read nor lent: %s"
        if why := why_not(config, self._num_token_shares):
            reads = lends = False
        elif reads and not (HAS_TRANSFER_RESULTS or fails_by_block(config)):
            reads, text = False, "prompts are not read: %s"
            why = "before 0.30, vLLM cannot let a load of several groups fail"
        if why and is_scheduler:
            logger.warning(text, why)
        return reads, lends

    def _take_ended(self, finished_req_ids: set[str]) -> Ended:
        ours = Ended() if self._worker is None else self._worker.take_ended()
        sent, received = self._tiers.get_finished(finished_req_ids)
        ended = Ended(self._saves.take(ours.sent, sent), self._loads.take(ours.received, received))
        self._bad_blocks |= ours.bad_blocks
        for request_id in ended.received & self._bad_blocks.keys():
            ended.bad_blocks[request_id] = self._bad_blocks.pop(request_id)
        return ended


def find_tiers(vllm_config: Any) -> tuple[Any, Any]:
    """Find the connector of an engine's tiers, and its configuration; `NoTiers` without `backend`.

    It is vLLM's OffloadingConnector, configured as an engine's only connector, and imported here:
    an engine without tiers needs nothing of vLLM's offloading.
    """
    settings = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).values
    if not settings.get("backend"):
        return NoTiers, vllm_config
    from kvxfer.integrations.vllm.offloading.interface import OffloadingConnector
    from kvxfer.integrations.vllm.offloading.offloading_spec import offloading_config

    given = {name: settings[name] for name in OFFLOAD_SETTINGS if name in settings}
    return OffloadingConnector, offloading_config(vllm_config, given)
