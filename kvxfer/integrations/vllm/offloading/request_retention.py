"""Retention of requests: the wishes in a request's `kv_transfer_params`."""

import logging
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.storage.eviction.retention import NORMAL, Retention

PARAMETERS: Mapping[str, str] = {"kvxfer_priority": "priority", "kvxfer_ttl_s": "ttl_s"}
"""Names in `kv_transfer_params`, and the field of a `Retention` that each sets."""

logger = logging.getLogger(__name__)


def parse_retention(req_id: str, params: Any, counters: metrics.Counters) -> Retention:
    """Read the wish of a request; a wrong value is logged, counted, and as if it were not there.

    Args:
        req_id: The request, for the log.
        params: Its `kv_transfer_params`, whatever the client sent.
        counters: Counts what is ignored.
    """
    fields: dict[str, Any] = {}
    for name, field in PARAMETERS.items():
        value = params.get(name) if isinstance(params, Mapping) else None
        if value is None:
            continue
        try:
            Retention(**{field: value})
        except InvalidArgumentError as exc:
            logger.warning("request %s: %s is ignored: %s", req_id, name, exc)
            counters.add(metrics.ignored(name))
        else:
            fields[field] = value
    return Retention(**fields) if fields else NORMAL
