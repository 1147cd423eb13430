"""Answers to the lookups of a request, told to observers when it is scheduled."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from kvxfer.integrations.vllm.offloading.interface import ReqContext, key_positions
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Reports, Requested


class RequestAnswers:
    """Answers to lookups, by request: the last one counts.

    Args:
        reports: Told each request once.
        count: Counts chunks by the tier that gave them, empty for a miss. Without it, and without
            observers, nothing is kept.
    """

    def __init__(
        self, reports: Reports, *, count: Callable[[str, int], None] | None = None
    ) -> None:
        self._reports = reports
        self._count = count
        self._contexts: dict[str, ReqContext] = {}
        self._tiers: dict[str, dict[BlockKey, str]] = defaultdict(dict)

    def arrive(self, req_context: ReqContext) -> None:
        """Note the arrival of a request."""
        if self._is_used:
            self._contexts.setdefault(req_context.req_id, req_context)

    def note(self, req_id: str, key: BlockKey, tier: str) -> None:
        """Note the tier that gives a chunk, empty for a miss."""
        if self._is_used:
            self._tiers[req_id][key] = tier

    def note_hit(self, req_id: str, key: BlockKey, tier: str) -> None:
        """Note a tier that has a chunk, perhaps only since another gave it for this request."""
        if self._is_used:
            tiers = self._tiers[req_id]
            tiers[key] = tiers.get(key) or tier

    def schedule(self, req_ids: Iterable[str]) -> None:
        """Tell requests that are scheduled for the first time."""
        for req_id in req_ids:
            self._tell(req_id, "")

    def finish(self, req_id: str) -> None:
        """Tell a request that ended before it was scheduled, and forget it."""
        self._tell(req_id, "it ended before it was scheduled")

    @property
    def _is_used(self) -> bool:
        return bool(self._reports) or self._count is not None

    def _tell(self, req_id: str, reason: str) -> None:
        context, tiers = self._contexts.pop(req_id, None), self._tiers.pop(req_id, {})
        if context is None:
            return
        if self._count is not None:
            for tier, number in Counter(tiers.values()).items():
                self._count(tier, number)
        if not self._reports:
            return
        keys = dict.fromkeys(key_positions(context) or ()) | dict.fromkeys(tiers)
        found = [tiers.get(key) for key in keys]
        self._reports.tell(Requested(req_id, list(keys), found, reason))
