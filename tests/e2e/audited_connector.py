"""Audited connector: an independent check of every page that one engine loads from another."""

from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode.worker import PrefillDecodeWorker
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import CacheDescription
from tests.e2e.handover_audit import AuditedHandover


class AuditedConnector(KVXferConnector):
    """`KVXferConnector` under audit, see `tests.e2e.handover_audit`."""

    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """Wrap the hand-over of the worker, so that the audit sees lent and loaded bytes."""
        super().use_kv_caches(caches)
        if self._handover is None or self._facts is None:
            return
        description = CacheDescription.decode(self._facts.description)
        audited = AuditedHandover(self._handover, caches, description)
        self._worker = PrefillDecodeWorker(audited, self._counters)  # type: ignore[arg-type]
