"""Interface of vLLM's connectors: all imports from vLLM, and differences between its releases.

Written for the newest release; older ones are recognised by what they lack, never by version.
"""

from typing import Any

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.common.release import SUPPORTED, installed_version

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.request import RequestStatus
except ImportError as exc:
    raise UnsupportedEngineError("vllm", installed_version(), SUPPORTED, str(exc)) from exc

HAS_TRANSFER_RESULTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether a load of several groups can be reported as failed: from 0.30 on."""


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Build vLLM's report of requests whose transfers ended; from 0.30 on."""
    results = base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received)
    results.failed_recving.update(failed)
    return results


def transfer_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """List the groups whose blocks are handed over; before 0.32, all of them."""
    every = tuple(range(len(kv_cache_config.kv_cache_groups)))
    return tuple(getattr(kv_cache_config, "transfer_group_ids", every))
