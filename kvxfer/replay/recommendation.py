"""Recommendation: the `backend` list that makes the most of a budget, and of no more of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    block = machine.block_size_bytes(trace.tokens_per_block)
    rows: dict[tuple[str, ...], TiersRow] = {}

    def plan(sizes: Mapping[Medium, int], policies: Mapping[Medium, PolicyName]) -> TiersRow:
        urls = tuple(tier_url(each, sizes[each], policies[each]) for each in policies)
        if urls not in rows:
            rows[urls] = plan_list(trace, machine, urls)
        return rows[urls]

    def score(sizes: Mapping[Medium, int], policies: Mapping[Medium, PolicyName]) -> float:
        row = plan(sizes, policies)
        return row.num_hits if row.first_token_s is None else row.first_token_s

    asked = {medium: int(num_bytes) for medium, num_bytes in budget.items()}
    sizes = {medium: asked[medium] for medium in _MEDIA if medium in asked}
    best, policies = 0.0, dict[Medium, PolicyName]()
    for tried in _choices(sizes):
        if score(sizes, tried) * AS_GOOD > best:
            best, policies = score(sizes, tried), tried
    if not policies:
        reasons = ["no tier is worth it: a hit saves nothing, or there is none"]
        return Recommendation(budget=asked, row=None, reasons=reasons)
    reasons = []
    for medium in reversed(policies):
        half = sizes | {medium: sizes[medium] // 2}
        while _fits(medium, half[medium], block) and score(half, policies) >= AS_GOOD * best:
            sizes, half = half, half | {medium: half[medium] // 2}
        given, of_all = format_size(sizes[medium]), format_size(asked[medium])
        if given != of_all:
            reasons.append(f"{medium}: {given} are as good as {of_all}")
    reasons += [f"{medium}: not needed" for medium in sizes if medium not in policies]
    return Recommendation(budget=asked, row=plan(sizes, policies), reasons=reasons)


def _choices(media: Iterable[Medium]) -> Iterator[dict[Medium, PolicyName]]:
    """List the policies of the first tier alone, then those of two."""
    for number, _ in enumerate(media, start=1):
        for chosen in product(POLICIES, repeat=number):
            yield dict(zip(media, chosen, strict=False))


def _fits(medium: Medium, capacity: int, block_size_bytes: int) -> bool:
    """Whether at least one block fits."""
    try:
        plan_tiers(tier_url(medium, capacity, "lru"), block_size_bytes)
    except InvalidArgumentError:
        return False
    return True
