"""Answers to the lookups of a request, told to observers when it is scheduled."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from kvxfer.integrations.vllm.offloading.interface import ReqContext, key_positions
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey
from kvxfer.storage.observer import Reports, Requested


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
