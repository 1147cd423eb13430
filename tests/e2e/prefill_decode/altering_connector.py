"""Connector with a fault: a page that it loads changes after it was verified."""

from typing import Any

import numpy as np

from kvxfer.integrations.vllm import KVXferConnector
from kvxfer.integrations.vllm.prefill_decode.step_data import StepData
from kvxfer.kvcache.canonical import CanonicalKVCaches

SIGN_BIT = 0x80
"""Of the last byte of a little-endian float, of 16 bits or 32: what is altered stays finite."""


class AlteringConnector(KVXferConnector):
    """Connector that alters a page of the last layer in every load, as a broken copy would."""

    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        """See `KVXferConnector`."""
        super().use_kv_caches(caches)
        self._caches = caches
        self._victims: dict[str, int] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Choose the block of each load."""
        step = self._get_connector_metadata()
        assert isinstance(step, StepData)
        for fetch in step.fetches:
            self._victims[fetch.request_id] = next(filter(None, fetch.wanted.block_ids[0]))
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Alter what has landed."""
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            ref = self._caches.group_data_refs[0][-1]
            row = self._caches.tensors[ref.tensor_idx].tensor[self._victims.pop(request_id)]
            row.numpy().view(np.uint8)[1 : ref.page_size_bytes : 2] ^= SIGN_BIT
        return results
