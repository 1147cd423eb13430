"""Connector: vLLM's OffloadingConnector with kvxfer's spec, and settings of the environment."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer.integrations.vllm.common.settings import find_settings
from kvxfer.integrations.vllm.offloading.interface import KVConnectorRole, OffloadingConnector

SPEC = {
    "spec_name": "KVXferOffloadingSpec",
    "spec_module_path": "kvxfer.integrations.vllm",
}


class KVXferOffload(OffloadingConnector):
    """Connector that keeps the KV cache in kvxfer's backends, by `KVXferOffloadingSpec`.

    Each setting is from `kv_connector_extra_config`, or else `KVXFER_BACKEND`, or else the file
    `KVXFER_CONFIG`.

    Raises:
        InvalidArgumentError: As for `KVXferOffloadingSpec`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        found = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            found.log("KVXferOffload")
        found.check_tiers()
        super().__init__(offloading_config(vllm_config, found.values), role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any) -> Any:
        """See vLLM's `KVConnectorBase_V1`."""
        found = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(offloading_config(vllm_config, found.values), *args)


def offloading_config(vllm_config: Any, settings: Mapping[str, Any]) -> Any:
    """Copy a configuration, as that of an OffloadingConnector with these settings and our spec."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = dataclasses.replace(
        vllm_config.kv_transfer_config,
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config=dict(settings)
        if "spec_name" in settings
        else {**SPEC, **settings},
    )
    return config
