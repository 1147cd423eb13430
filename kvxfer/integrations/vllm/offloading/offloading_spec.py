"""Offloading: vLLM's OffloadingConnector, and the spec that it builds in scheduler and workers."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import xxhash

from kvxfer.backends.host import HostPool, PoolShape, SlotMover, keys_in_slots
from kvxfer.connect import open_tiers
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.freed_blocks import fence_loads_of_others
from kvxfer.integrations.vllm.common.kv_caches import convert_caches
from kvxfer.integrations.vllm.common.model_identity import identify_model, require_no_adapters
from kvxfer.integrations.vllm.common.release import VLLMPlug
from kvxfer.integrations.vllm.common.settings import (
    find_settings,
    locals_of_callers,
    logger,
    parse_offload,
)
from kvxfer.integrations.vllm.common.worker_pages import describe_pages
from kvxfer.integrations.vllm.offloading.interface import (
    CanonicalKVCaches,
    KVConnectorRole,
    OffloadingConfig,
    OffloadingConnector,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    engine_config,
    group_ids,
    workers_keep_the_same,
)
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from kvxfer.integrations.vllm.offloading.manager import KVXferOffloadingManager, PrefillSpeed
from kvxfer.integrations.vllm.offloading.metrics import DefinesMetrics
from kvxfer.integrations.vllm.offloading.rows import (
    WorkerIdentity,
    map_rows,
    num_copies,
    publish_identity,
    receive_identities,
    row_namespace,
)
from kvxfer.integrations.vllm.offloading.worker import KVXferOffloadingWorker
from kvxfer.kvcache.canonical import CanonicalKVCaches as OurCaches
from kvxfer.storage.index import BlockIndex
from kvxfer.storage.keys import Namespace
from kvxfer.storage.portable_backend import portable_namespace
from kvxfer.telemetry.environment import environment_observers
from kvxfer.telemetry.journal import journal_observers
from kvxfer.telemetry.renamed_keys import RenamedKeys
from kvxfer.telemetry.trace_recorder import TraceRecorder
from kvxfer.transfer import PolledEngine

MAX_BYTES_IN_FLIGHT = 1 << 30
"""Bytes that GPUs may copy at a time, straight to and from slots; loads can begin beside stores."""

SPEC = {"spec_name": "KVXferOffloadingSpec", "spec_module_path": "kvxfer.integrations.vllm"}


class KVXferOffloadingSpec(VLLMPlug, DefinesMetrics, OffloadingSpec):
    """Offloading spec that stores vLLM's KV cache in kvxfer's backends.

    Configured by `kv_connector_extra_config`: `backend` is the URL (or mapping) of the host
    pool, e.g. `host://?capacity=4GiB`, shared by all workers of the engine on this machine; or a
    list of it and of the tiers below, e.g. `["host://?capacity=4GiB",
    "file:///var/cache/kv?capacity=200GiB"]`. With `purge_on_reset`, a reset of vLLM's cache also
    deletes the blocks in these tiers, including those of other engines.

    Raises:
        InvalidArgumentError: `backend` is missing or wrong, or there is a tier below but the model
            cannot be identified; or `purge_on_reset` is set, but no tier below can be purged; or a
            chunk of a recurrent layer has several blocks.
    """

    def __init__(self, config: OffloadingConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.replicated_layout = workers_keep_the_same(config)  # vLLM: then only rank 0 stores
        replica = config.parallel.data_parallel_index
        # In every process, before it waits for the others.
        settings = parse_offload(config.extra_config, replica)
        self._pool_config, self._lower, self._loads, self._purges = settings
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side; the same object at every call."""
        if self._manager is not None:
            return self._manager
        fence_loads_of_others()
        self._require_whole_chunks()
        world_size = self.config.parallel.world_size
        workers = receive_identities(self._name, world_size) if self._lower else []
        copies = num_copies(workers[0].pages if workers else None, self.config)
        with ExitStack() as undo:
            pool = self._open_pool(copies, claim=True)
            undo.callback(pool.close)
            sizes = [self.blocks_per_chunk * g.tokens_per_block for g in self.config.groups]
            tokens_per_chunk = dict(zip(group_ids(self.config), sizes, strict=True))
            loads = self._loads if self._lower else None
            prefill = None if loads is None else PrefillSpeed(loads, tokens_per_chunk)
            # The journal of host memory comes before that of the tier below, which is slower.
            journals = journal_observers(None, engine=self._name)
            tier = self._open_lower_tier(pool, workers, prefill) if self._lower else None
            if tier is not None:
                undo.callback(tier.close)
            self._manager = KVXferOffloadingManager(
                pool,
                BlockIndex(self._pool_config.open_policy(pool.shape.num_slots)),
                tier,
                emit_events=self.kv_events_config.enable_kv_cache_events,
                trace=TraceRecorder.from_environment(),
                observers=journals,
                prefill=prefill,
                tokens_per_chunk=tokens_per_chunk,
                has_replicas=self.config.parallel.data_parallel_size > 1,
            )
            undo.pop_all()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the side of the worker with these caches; the same object at every call."""
        if self._worker is None:
            if (vllm_config := engine_config()) is not None:
                require_no_adapters(vllm_config)
            caches = convert_caches(kv_caches)
            identity = self._identify(caches) if self._lower else None
            copies = num_copies(identity.pages if identity else None, self.config)
            rank = self.config.parallel.rank
            part, turn = divmod(rank, copies)
            slots = SlotMover(
                self._open_pool(copies),
                part=part,
                num_writers=1 if self.replicated_layout else copies,
                writer_index=0 if self.replicated_layout else turn,
            )
            journals = journal_observers(None, engine=self._name)
            engine = PolledEngine(
                caches,
                slots,
                blocks_per_chunk=self.blocks_per_chunk,
                max_bytes_in_flight=MAX_BYTES_IN_FLIGHT,
                timeout_s=None,  # host copies always end; a failed load would end the engine
                observers=[RenamedKeys(journals, keys_in_slots)] if journals else [],
            )
            self._worker = KVXferOffloadingWorker(
                engine,
                group_ids=group_ids(self.config),
                blocks_per_chunk=self.blocks_per_chunk,
                closes=[publish_identity(self._name, rank, identity)] if identity else [],
            )
        return self._worker

    def _require_whole_chunks(self) -> None:
        """Refuse chunks of several states: from 0.32 on, vLLM stores only the last one."""
        configs = (getattr(each, "config", None) for each in locals_of_callers("self"))
        groups = [group for each in configs for group in getattr(each, "kv_group_configs", ())]
        has_states = any(getattr(group, "requires_cow_source", False) for group in groups)
        if has_states and self.blocks_per_chunk > 1:
            rule = "1 with recurrent layers, else no chunk is ever found: leave out `block_size`"
            raise InvalidArgumentError("blocks_per_chunk", self.blocks_per_chunk, rule)

    def _open_lower_tier(
        self, pool: HostPool, workers: Sequence[WorkerIdentity], prefill: PrefillSpeed | None
    ) -> LowerTier:
        pages = [worker.pages for worker in workers]
        rows = row_namespace(
            self.config,
            workers[0].model,
            row_size_bytes=pool.shape.slot_size_bytes,
            interleave_tokens=pages[0].interleave_tokens,
        )
        mappings = map_rows(pages, self.config, pool.shape, f"rows {rows.fingerprint}")
        namespace = portable_namespace(rows, mappings)
        observers = environment_observers(namespace, engine=self._name)
        return LowerTier(
            pool.slots.reshape(pool.shape.num_slots, -1),
            namespace,
            open_tiers(self._lower, namespace),
            mappings=mappings,
            purge_on_reset=self._purges,
            pool=pool,
            emit_events=self.kv_events_config.enable_kv_cache_events,
            observers=[*observers, *([prefill.loads] if prefill else [])],
        )

    def _identify(self, caches: OurCaches) -> WorkerIdentity:
        if (vllm_config := engine_config()) is None:
            rule = "host:// alone, since vLLM does not pass on its model's configuration"
            raise InvalidArgumentError("backend", self.extra_config["backend"], rule)
        shares = self.config.parallel.pcp_size * self.config.parallel.dcp_size
        groups = [
            (group.layer_names, group.tokens_per_block // shares) for group in self.config.groups
        ]
        return WorkerIdentity(
            model=identify_model(vllm_config), pages=describe_pages(caches, groups, vllm_config)
        )

    @property
    def _name(self) -> str:
        """Name of this engine, the same in all its processes."""
        engine_id = xxhash.xxh3_64_hexdigest(self.config.engine_id.encode())
        return f"vllm-{engine_id}-{self.config.parallel.data_parallel_index}"

    def _open_pool(self, copies: int, *, claim: bool = False) -> HostPool:
        config = self.config
        shape = PoolShape.fit(
            capacity_bytes=self._pool_config.capacity,
            num_parts=config.parallel.world_size // copies,
            part_size_bytes=config.worker_kv_bytes_per_block * self.blocks_per_chunk,
        )
        # Only what scheduler and workers both know: each pipeline stage has layers of its own.
        return HostPool(
            shape,
            Namespace(model=config.model.name, dtype=config.model.dtype),
            self._pool_config.open_copy_engine(),
            name=self._name,
            integrity=self._pool_config.integrity,
            claim=claim,
        )


class KVXferOffload(OffloadingConnector):
    """Connector that keeps the KV cache in kvxfer's backends, by `KVXferOffloadingSpec`.

    Each setting comes from `kv_connector_extra_config`, else from `KVXFER_BACKEND`, else from the
    file `KVXFER_CONFIG`.

    Raises:
        InvalidArgumentError: As for `KVXferOffloadingSpec`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        found = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            logger.info("KVXferOffload has settings: %s", found)
        found.check_tiers()
        super().__init__(offloading_config(vllm_config, found.values), role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> Any:
        """See vLLM's `KVConnectorBase_V1`."""
        found = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(offloading_config(vllm_config, found.values), *args)


def offloading_config(vllm_config: Any, settings: Mapping[str, Any]) -> Any:
    """Copy a configuration, for an OffloadingConnector with these settings and our spec."""
    defaults = {} if "spec_name" in settings else SPEC
    config = copy.copy(vllm_config)
    config.kv_transfer_config = dataclasses.replace(
        vllm_config.kv_transfer_config,
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={**defaults, **settings},
    )
    return config
