"""Recommendation: the `backend` list that makes the most of a budget, and of no more of it."""

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.plan import Machine, TiersRow, plan_list, tier_url
from kvxfer.replay.simulation import Medium
from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.units import ByteSize, format_size

AS_GOOD = 0.995
"""Share of what another list gives at which a simpler or smaller one is as good."""

_MEDIA: Sequence[Medium] = ("host", "file")

Budget = Mapping[Medium, ByteSize]
"""Bytes that each medium may take."""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended list of tiers.

    Attributes:
        budget: The budget, in bytes.
        row: The list, and what it gives; None where no tier is worth anything.
        reasons: Reasons for it, in words.
    """

    budget: dict[Medium, int]
    row: TiersRow | None
    reasons: list[str]


def parse_budget(text: str) -> dict[Medium, ByteSize]:
    """Parse a budget such as `host=64GiB,file=1TiB`.

    Raises:
        InvalidArgumentError: It is no such text.
    """
    budget: dict[Medium, ByteSize] = {}
    wanted = "host=SIZE, file=SIZE or both, such as 'host=64GiB,file=1TiB'"
    for part in text.split(","):
        medium, _, size = part.partition("=")
        known = next((each for each in _MEDIA if each == medium and each not in budget), None)
        if known is None:
            raise InvalidArgumentError("budget", text, wanted)
        budget[known] = ByteSize.parse(size)
    return budget


def recommend(trace: Trace, machine: Machine, budget: Budget) -> Recommendation:
    """Recommend a list of tiers within a budget.

    Policies and tiers are those that give the most with the whole budget: the most time of first
    tokens saved where a prefill speed is stated, else the most hits. What is simpler wins where it
    gives as good as that. Then each capacity is halved, that of files first, as long as as good as
    all is left.

    Raises:
        InvalidArgumentError: Not one block fits, or the size of a block is not known.
    """
    machine.block_size_bytes(trace.tokens_per_block)  # or nothing can be said about a budget
    search = _Search(trace, machine)
    capacities = {medium: int(budget[medium]) for medium in _MEDIA if medium in budget}
    best, policies = search.best_policies(capacities)
    size = {medium: int(num_bytes) for medium, num_bytes in budget.items()}
    if not policies:
        reasons = ["no tier is worth it: a hit saves nothing, or there is none"]
        return Recommendation(budget=size, row=None, reasons=reasons)
    reasons = []
    for medium in reversed(policies):
        capacities = search.shrink(capacities, policies, medium, AS_GOOD * best)
        given, of_all = format_size(capacities[medium]), format_size(budget[medium])
        if given != of_all:
            reasons.append(f"{medium}: {given} are as good as {of_all}")
    reasons += [f"{medium}: not needed" for medium in capacities if medium not in policies]
    row = search.row(capacities, policies)
    return Recommendation(budget=size, row=row, reasons=reasons)


class _Search:
    """Lists of tiers that were tried, and what they give."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self._trace = trace
        self._machine = machine
        self._rows: dict[tuple[str, ...], TiersRow] = {}

    def best_policies(
        self, capacities: Mapping[Medium, int]
    ) -> tuple[float, dict[Medium, PolicyName]]:
        """Find the policies, and so the tiers, that give the most; none where nothing is given."""
        best, policies = 0.0, dict[Medium, PolicyName]()
        for number in range(1, len(capacities) + 1):
            for chosen in product(POLICIES, repeat=number):
                tried = dict(zip(capacities, chosen, strict=False))
                score = self.score(capacities, tried)
                if score * AS_GOOD > best:
                    best, policies = score, tried
        return best, policies

    def shrink(
        self,
        capacities: dict[Medium, int],
        policies: Mapping[Medium, PolicyName],
        medium: Medium,
        least: float,
    ) -> dict[Medium, int]:
        """Halve the capacity of a medium, as long as the list is not worse than `least`."""
        half = capacities | {medium: capacities[medium] // 2}
        while self._fits(half) and self.score(half, policies) >= least:
            capacities = half
            half = capacities | {medium: capacities[medium] // 2}
        return capacities

    def row(
        self, capacities: Mapping[Medium, int], policies: Mapping[Medium, PolicyName]
    ) -> TiersRow:
        """Plan the list of the media with a policy."""
        urls = tuple(tier_url(medium, capacities[medium], policies[medium]) for medium in policies)
        if urls not in self._rows:
            self._rows[urls] = plan_list(self._trace, self._machine, urls)
        return self._rows[urls]

    def score(
        self, capacities: Mapping[Medium, int], policies: Mapping[Medium, PolicyName]
    ) -> float:
        """Say how good a list is: the seconds that it saves, or else its hits."""
        row = self.row(capacities, policies)
        return row.num_hits if row.first_token_s is None else row.first_token_s

    def _fits(self, capacities: Mapping[Medium, int]) -> bool:
        """Whether at least one block fits in each tier."""
        try:
            block = self._machine.block_size_bytes(self._trace.tokens_per_block)
            plan_tiers(
                [tier_url(medium, size, "lru") for medium, size in capacities.items()], block
            )
        except InvalidArgumentError:
            return False
        return True
