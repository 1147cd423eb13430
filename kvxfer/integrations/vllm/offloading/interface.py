"""Interface of vLLM's offloading: all imports from vLLM, and differences between its releases.

The adapter is written for the newest release; older ones are adapted to it here, by checking for
attributes, never for version numbers.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.common.release import SUPPORTED, installed_version
from kvxfer.integrations.vllm.common.settings import configs_of_callers
from kvxfer.storage.keys import BlockKey
from kvxfer.telemetry.places import place_of

SUPPORTED_TIERING = "0.31 to 0.33"


try:
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        KVConnectorRole,
        OffloadingConnector,
    )
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering import base as tiering
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as exc:
    raise UnsupportedEngineError("vllm", installed_version(), SUPPORTED, str(exc)) from exc


MEDIA_BEFORE_027 = {"CPU": "CPU", "STORAGE": "STORAGE"}
Medium: Any = getattr(base, "Medium", None) or enum.StrEnum("Medium", MEDIA_BEFORE_027)
TransferJob: Any = getattr(tiering, "TransferJob", object)
EVENT_FIELDS = frozenset(field.name for field in fields(OffloadingEvent))
STORES_FIRST = hasattr(OffloadingManager, "lock")
"""Whether vLLM calls `on_schedule_end` after all stores of a step, not before: from 0.33 on."""


def engine_config() -> Any:
    """Return the configuration of the engine under construction; None if there is none."""
    return get_current_vllm_config_or_none() or next(configs_of_callers(), None)


def localities_of(tiers: Iterable[str]) -> list[Any]:
    """List vLLM's localities of the storage tiers in `tiers`; None if one may be anywhere."""
    if not hasattr(base, "Locality"):  # before 0.27
        return [None]
    local = [place for medium, place in map(place_of, tiers) if medium == "STORAGE"] or [None]
    return [base.Locality(place) if place else None for place in dict.fromkeys(local)]


def may_load(localities: Sequence[Any], req_context: ReqContext) -> bool:
    """Whether a request may load from any of these localities; before 0.27, every request may."""
    tiers = getattr(req_context, "load_tier_filter", None)
    return tiers is None or any(tiers.allows(Medium.STORAGE, each) for each in localities)


def key_positions(req_context: ReqContext) -> Mapping[BlockKey, int] | None:
    """Return a request's chunks and the end token of each; None if vLLM does not keep them."""
    return getattr(req_context, "_offload_key_positions", None)


def group_ids(config: OffloadingConfig) -> list[int]:
    """List each group's index in vLLM's keys; before 0.30 every group was offloaded."""
    return [getattr(group, "group_id", index) for index, group in enumerate(config.groups)]


def layout_name(config: OffloadingConfig) -> str:
    """Return vLLM's name of the caches' layout, the same in all processes of an engine.

    Before 0.29, vLLM does not expose it: the attention backend decides, unless an environment
    variable overrides it.
    """
    if hasattr(config, "kv_cache_layout"):
        return config.kv_cache_layout or ""
    return envs.VLLM_KV_CACHE_LAYOUT or "the backend's"


def workers_keep_the_same(config: OffloadingConfig) -> bool:
    """Whether all workers keep the same bytes, such as latents; not exposed before 0.27."""
    return bool(getattr(config, "replicated_layout", False))


def event_of_failed_chunks(keys: Sequence[BlockKey]) -> OffloadingEvent | None:
    """Build the event by which vLLM forgets chunks that were `HIT_PENDING`; None before 0.33."""
    if "metadata_only" not in EVENT_FIELDS:
        return None
    return OffloadingEvent(keys=list(keys), medium=Medium.CPU, removed=True, metadata_only=True)


def event_of_tier(keys: Sequence[BlockKey], tier: str, *, removed: bool) -> OffloadingEvent | None:
    """Build the event for chunks that enter or leave a tier below host memory.

    None for a tier in memory in older releases, whose events cannot tell it from host memory.
    """
    medium, locality = place_of(tier)
    if "ownership" not in EVENT_FIELDS and medium == Medium.CPU.value:
        return None
    place = base.Locality(locality) if locality and "locality" in EVENT_FIELDS else None
    more = {"locality": place, "ownership": tier, "removal_expected": True}
    return OffloadingEvent(
        keys=list(keys),
        medium=Medium(medium),
        removed=removed,
        **{name: value for name, value in more.items() if name in EVENT_FIELDS},
    )


def require_tiering() -> None:
    """Refuse vLLM before 0.31, whose tiers cannot report which chunks of a job are intact."""
    if "transfer_bytes" not in {field.name for field in fields(JobResult)}:
        detail = "its secondary tiers have another interface"
        raise UnsupportedEngineError("vllm", installed_version(), SUPPORTED_TIERING, detail)
