"""Audited connector: an independent check of every page that one engine loads from another."""

from typing import Any

from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode.tiers import TieredConnector
from kvxfer.integrations.vllm.prefill_decode.worker import PrefillDecodeWorker
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import CacheDescription
from tests.e2e.handover_audit import AuditedHandover


class AuditedConnector(KVXferConnector):
    """`KVXferConnector` under audit, see `tests.e2e.handover_audit`."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> "KVXferConnector":
        """Choose the class by the configuration, as `KVXferConnector` does."""
        has_tiers = vllm_config.kv_transfer_config.kv_connector_extra_config.get("backend")
        kind = AuditedTieredConnector if has_tiers else cls
        return super().__new__(kind, vllm_config, *args, **kwargs)

    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """Wrap the hand-over of the worker, so that the audit sees what is lent and what lands."""
        super().use_kv_caches(caches)
        if self._handover is None or self._facts is None:
            return
        description = CacheDescription.decode(self._facts.description)
        audited = AuditedHandover(self._handover, caches, description)
        self._worker = PrefillDecodeWorker(audited, self._counters)  # type: ignore[arg-type]


class AuditedTieredConnector(AuditedConnector, TieredConnector):
    """`TieredConnector` under audit."""
