"""Requests of vLLM as an offloading manager sees them: lookups, retentions and recorded traces."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.offloading.interface import ReqContext, key_positions
from kvxfer.integrations.vllm.offloading.metrics import IGNORED, OffloadingMetrics
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.storage.observer import Reports, Requested
from kvxfer.telemetry.metrics import NO_TIER
from kvxfer.telemetry.trace_recorder import RecordedRequest, TraceRecorder
from kvxfer.text import printable_id

PARAMETERS: Mapping[str, str] = {"kvxfer_priority": "priority", "kvxfer_ttl_s": "ttl_s"}
"""Names in `kv_transfer_params`, and the field of a `Retention` that each sets."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """Request that vLLM has announced and not finished."""

    context: ReqContext
    arrived_at: float  # wall-clock time; 0 if nothing is recorded
    retention: Retention | None  # for the chunks that it uses and stores
    # Tier that has each chunk that was looked up, empty for a miss; None once that was reported.
    tiers: dict[BlockKey, str] | None = field(default_factory=dict)
    is_stale: bool = False  # it had begun to load or compute when the caches were reset


class Requests:
    """Requests of an engine: their retentions, and the last answer to each of their lookups.

    A request is reported once, when it first loads or computes, or ends before. With `trace`, its
    prompt is then recorded as whole chunks of the first KV-cache group. `tokens_per_chunk` of each
    group tells whole chunks from parts; without it, all are whole. The metrics count chunks by the
    tier that had them; without metrics, retentions are not read. Never raises.
    """

    def __init__(
        self,
        reports: Reports,
        metrics: OffloadingMetrics | None = None,
        *,
        trace: TraceRecorder | None = None,
        tokens_per_chunk: Mapping[int, int] | None = None,
    ) -> None:
        self._reports = reports
        self._tokens_per_chunk = tokens_per_chunk or {}
        self._metrics = metrics
        self._trace = trace
        self._cannot_record = False
        self._requests: dict[str, _Request] = {}

    def arrive(self, context: ReqContext) -> bool:
        """Note a request, to keep its answers from now on; return whether it is the only one."""
        known = self._requests.get(context.req_id)
        if known is None or known.tiers is None:
            retention = None if self._metrics is None else _read_wish(context, self._metrics)
            arrived_at = 0.0 if self._trace is None else runtime.wall_time()
            self._requests[context.req_id] = _Request(context, arrived_at, retention)
        return len(self._requests) == 1

    def retention(self, req_id: str) -> Retention | None:
        """Return the retention that a request asks for; None if it asks for none."""
        request = self._requests.get(req_id)
        return None if request is None else request.retention

    def note(self, req_id: str, key: BlockKey, tier: str) -> None:
        """Note the tier that has a chunk, empty for a miss; of several tiers the first counts."""
        request = self._requests.get(req_id)
        if request is not None and request.tiers is not None:
            request.tiers[key] = tier and (request.tiers.get(key) or tier)

    def schedule(self, req_ids: Iterable[str]) -> None:
        """Report and record the requests that load or compute for the first time."""
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None and request.tiers is not None:
                if self._trace is not None and not self._cannot_record:
                    self._record(self._trace, request)
                self._tell(request, request.tiers, "")

    def note_reset(self) -> None:
        """Note that the caches were reset: what requests have loaded or computed is stale."""
        for request in self._requests.values():
            request.is_stale = request.is_stale or request.tiers is None

    def is_stale(self, req_id: str) -> bool:
        """Whether a request had begun to load or compute when the caches were reset."""
        request = self._requests.get(req_id)
        return request is not None and request.is_stale

    def finish(self, req_id: str) -> None:
        """Forget a request; report it if it ended before it was scheduled."""
        request = self._requests.pop(req_id, None)
        if request is not None and request.tiers is not None:
            self._tell(request, request.tiers, "it ended before it was scheduled")

    def close(self) -> None:
        """Close the trace, after writing the requests that wait to be recorded."""
        if self._trace is not None:
            self._trace.close()

    def _tell(self, request: _Request, tiers: Mapping[BlockKey, str], reason: str) -> None:
        request.tiers = None
        if self._metrics is None and not self._reports:
            return
        positions = key_positions(request.context) or {}
        if self._metrics is not None:
            counts = Counter(tiers.values())
            if "" in counts:
                counted = {**tiers, **dict.fromkeys(self._behind_misses(positions, tiers), "")}
                whole = (key for key in counted if counted[key] or self._is_whole(key, positions))
                counts = Counter(counted[key] for key in whole)
            for tier, number in counts.items():
                labels = (tier, "hit") if tier else (NO_TIER, "miss")
                self._metrics.add("lookup_blocks", *labels, number=number)
        if self._reports:
            found: dict[BlockKey, str | None] = {}
            for key in {**positions, **tiers}:
                if (giver := tiers.get(key)) or self._is_whole(key, positions):
                    found[key] = giver
            req_id = request.context.req_id
            self._reports.tell(Requested(req_id, list(found), list(found.values()), reason))

    def _is_whole(self, key: BlockKey, positions: Mapping[BlockKey, int]) -> bool:
        """Whether a key is that of a whole chunk, as far as is known, and not of a part of one."""
        return positions.get(key, 0) % self._tokens_per_chunk.get(group_of(key), 1) == 0

    def _behind_misses(
        self, positions: Mapping[BlockKey, int], tiers: Mapping[BlockKey, str]
    ) -> Iterator[BlockKey]:
        """Yield the chunks of a prompt that it cannot use because of earlier misses.

        In a group with full attention, vLLM looks up one chunk after the other, up to the first
        miss, but an earlier one may turn out to be corrupt later; in a sliding window it begins at
        the end, and does not need the rest. `positions` has the end token of each chunk; `tiers` is
        in the order of the lookups.
        """
        groups: dict[int, dict[BlockKey, int]] = defaultdict(dict)
        for key, end in positions.items():
            groups[group_of(key)][key] = end
        for ends in groups.values():
            asked = [key for key in tiers if key in ends and self._is_whole(key, positions)]
            first_miss = next((ends[key] for key in asked if not tiers[key]), inf)
            if asked == sorted(asked, key=lambda key: ends[key]):
                yield from (key for key, end in ends.items() if end > first_miss)

    def _record(self, trace: TraceRecorder, request: _Request) -> None:
        try:
            positions = key_positions(request.context)
            if positions is None:
                self._cannot_record = True
                logger.warning("no requests are recorded: this vLLM does not expose their chunks")
                return
            if not positions:
                return
            group = next(iter(self._tokens_per_chunk), group_of(next(iter(positions))))
            of_group = [key for key in positions if group_of(key) == group]
            whole = [key for key in of_group if self._is_whole(key, positions)]
            if whole:  # else the prompt is shorter than a chunk
                size = positions[whole[0]]
                trace.record(RecordedRequest(request.arrived_at, size * len(whole), size, whole))
        except Exception:
            self._cannot_record = True
            logger.exception("a request cannot be recorded; recording ends")


def _read_wish(context: ReqContext, metrics: OffloadingMetrics) -> Retention | None:
    """Read the retention that a request asks for; a wrong value is logged, counted, and ignored."""
    params = getattr(context, "kv_transfer_params", None)
    fields: dict[str, Any] = {}
    for name, attribute in PARAMETERS.items():
        if not isinstance(params, Mapping) or (value := params.get(name)) is None:
            continue
        try:
            Retention(**{attribute: value})
        except InvalidArgumentError as exc:
            request_id = printable_id(context.req_id)
            logger.warning("request %s: %s is ignored: %s", request_id, name, exc)
            metrics.add(IGNORED, name)
        else:
            fields[attribute] = value
    return Retention(**fields) if fields else None
