"""Recording of the requests that vLLM schedules, for `kvxfer replay`."""

import logging
from collections.abc import Iterable
from typing import Any

from kvxfer import runtime
from kvxfer.integrations.vllm.offloading.interface import ReqContext, key_positions
from kvxfer.storage.keys import group_of
from kvxfer.telemetry.trace_recorder import RecordedRequest, TraceRecorder

logger = logging.getLogger(__name__)


class RequestRecorder:
    """Recorder of requests: when each arrived, and the chunks of its prompt, once it is scheduled.

    vLLM tells the whole chunks of a prompt and not its length: tokens behind the last one are left
    out. With several KV-cache groups the chunks are those of the first. Never raises.

    Args:
        trace: Writes them; closed with this one.
    """

    def __init__(self, trace: TraceRecorder) -> None:
        self._trace = trace
        self._arrived: dict[str, tuple[float, ReqContext]] = {}
        self._is_broken = False

    def arrive(self, req_context: ReqContext) -> None:
        """Note the arrival of a request."""
        self._arrived.setdefault(req_context.req_id, (runtime.wall_time(), req_context))

    def schedule(self, req_ids: Iterable[str]) -> None:
        """Record requests that are scheduled for the first time."""
        for req_id in req_ids:
            arrived = self._arrived.pop(req_id, None)
            if arrived is not None and not self._is_broken:
                self._record(*arrived)

    def finish(self, req_id: str) -> None:
        """Forget a request that was perhaps never scheduled."""
        self._arrived.pop(req_id, None)

    def close(self) -> None:
        """Write what waits."""
        self._trace.close()

    def _record(self, arrival_s: float, req_context: Any) -> None:
        try:
            positions = key_positions(req_context)
            if positions is None:
                self._is_broken = True
                logger.warning("no requests are recorded: this vLLM does not tell their chunks")
                return
            keys = list(positions)
            if keys:
                first = [key for key in keys if group_of(key) == group_of(keys[0])]
                size = positions[first[0]]
                request = RecordedRequest(arrival_s, size * len(first), size, first)
                self._trace.record(request)
        except Exception:
            self._is_broken = True
            logger.exception("no more requests are recorded")
