"""Requests of vLLM as an offloading manager sees them: answers, wishes, and their recording."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.offloading import metrics
from kvxfer.integrations.vllm.offloading.interface import ReqContext, key_positions
from kvxfer.storage.eviction.retention import NORMAL, Retention
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, group_of
from kvxfer.storage.observer import Reports, Requested
from kvxfer.telemetry.trace_recorder import RecordedRequest, TraceRecorder

PARAMETERS: Mapping[str, str] = {"kvxfer_priority": "priority", "kvxfer_ttl_s": "ttl_s"}
"""Names in `kv_transfer_params`, and the field of a `Retention` that each sets."""

logger = logging.getLogger(__name__)


class RequestAnswers:
    """Answers to lookups, by request: the last one counts.

    Args:
        reports: Told each request once.
        count: Counts chunks by the tier that gave them, empty for a miss; as misses also those that
            vLLM did not ask for after one. Without it, and without observers, nothing is kept.
    """

    def __init__(
        self, reports: Reports, *, count: Callable[[str, int], None] | None = None
    ) -> None:
        self._reports = reports
        self._count = count
        self._contexts: dict[str, ReqContext] = {}
        self._tiers: dict[str, dict[BlockKey, str]] = defaultdict(dict)

    def arrive(self, req_context: ReqContext) -> None:
        """Note the arrival of a request, whose answers are kept from now on."""
        if self._reports or self._count is not None:
            self._contexts.setdefault(req_context.req_id, req_context)

    def note(self, req_id: str, key: BlockKey, tier: str) -> None:
        """Note the tier that gives a chunk, empty for a miss."""
        if req_id in self._contexts:
            self._tiers[req_id][key] = tier

    def note_hit(self, req_id: str, key: BlockKey, tier: str) -> None:
        """Note a tier that has a chunk, perhaps only since another gave it for this request."""
        if req_id in self._contexts:
            tiers = self._tiers[req_id]
            tiers[key] = tiers.get(key) or tier

    def schedule(self, req_ids: Iterable[str]) -> None:
        """Tell requests that are scheduled for the first time."""
        for req_id in req_ids:
            self._tell(req_id, "")

    def finish(self, req_id: str) -> None:
        """Tell a request that ended before it was scheduled, and forget it."""
        self._tell(req_id, "it ended before it was scheduled")

    def _tell(self, req_id: str, reason: str) -> None:
        context, tiers = self._contexts.pop(req_id, None), self._tiers.pop(req_id, {})
        if context is None:
            return
        positions = key_positions(context) or {}
        if self._count is not None:
            counts = Counter(tiers.values())
            counts[""] += _num_not_asked(positions, tiers)
            for tier, number in counts.items():
                self._count(tier, number)
        if not self._reports:
            return
        keys = dict.fromkeys(positions) | dict.fromkeys(tiers)
        found = [tiers.get(key) for key in keys]
        self._reports.tell(Requested(req_id, list(keys), found, reason))


def _num_not_asked(positions: Mapping[BlockKey, int], tiers: Mapping[BlockKey, str]) -> int:
    """Count the chunks behind those whose misses ended the lookups of a prompt.

    Of a group with full attention vLLM asks for one chunk after the other, up to the first miss; of
    a sliding window it asks from the end, and what is left is not needed. Keys for a part of a
    chunk, which vLLM makes as it asks, come after those of the chunks.

    Args:
        positions: Token at the end of each chunk of the request, in the order of each group.
        tiers: Tier that gave each chunk that was asked for, empty for a miss, in that order.
    """
    if "" not in tiers.values():
        return 0
    whole: dict[bytes, dict[BlockKey, int]] = defaultdict(dict)
    for key, end in positions.items():
        chunks = whole[key[-GROUP_INDEX_BYTES:]]
        if end % next(iter(chunks.values()), end) == 0:
            chunks[key] = end
    number = 0
    for chunks in whole.values():
        asked = [key for key in tiers if key in chunks]
        ends = [chunks[key] for key in asked]
        if asked and not tiers[asked[-1]] and ends == sorted(ends):
            number += sum(end > ends[-1] for end in chunks.values())
    return number


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
