"""Plan: the hits of each policy, capacity and list of tiers, and the best list for a budget."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.simulation import Medium, SimulatedTier, TierPlan, simulate
from kvxfer.replay.trace import Trace, count_ceiling
from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.units import ByteSize, format_size

DEFAULT_BANDWIDTHS: Mapping[Medium, float] = {"host": 10e9, "file": 2e9, "object": 1e9}
"""Bytes per second of a load from each medium, unless stated: verified host memory on a few cores,
one NVMe drive, and a bucket in the same region over some 10 Gbit/s."""

AS_GOOD = 0.995
"""Share of a list's score from which a simpler or smaller list counts as equally good."""

_MEDIA: Sequence[Medium] = ("host", "file")

Budget = Mapping[Medium, ByteSize]
"""Bytes that each medium may take."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Model and machine for which a trace is planned.

    Attributes:
        bytes_per_token: Bytes that the model keeps for a token; None if only blocks count.
        prefill_tokens_per_s: Tokens of a prompt computed in a second; None if time does not count.
        bandwidths: Bytes per second that a load gets from each medium.
    """

    bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None
    bandwidths: dict[Medium, float] = msgspec.field(default_factory=lambda: {**DEFAULT_BANDWIDTHS})

    def block_size_bytes(self, tokens_per_block: int) -> int:
        """Compute the bytes of a block, if those of a token are known."""
        if self.bytes_per_token is None:
            needed = "the bytes of a token for sizes: --bytes-per-token or --model"
            raise InvalidArgumentError("bytes_per_token", None, needed)
        return tokens_per_block * self.bytes_per_token

    def first_token_s(self, trace: Trace, hits: Mapping[Medium, int]) -> float | None:
        """Compute the seconds by which hits make a first token come sooner, on average.

        That is the time to compute their tokens, less the time to load their bytes.
        """
        if self.prefill_tokens_per_s is None:
            return None
        saved = 0.0
        for medium, number in hits.items():
            num_tokens = number * trace.tokens_per_block
            num_bytes = num_tokens * (self.bytes_per_token or 0)
            saved += num_tokens / self.prefill_tokens_per_s - num_bytes / self.bandwidths[medium]
        return saved / trace.num_requests


class CapacityRow(msgspec.Struct, frozen=True, kw_only=True):
    """One capacity of one policy, in host memory alone.

    Attributes:
        capacity_bytes: Capacity, None if the size of a block is not known.
        hit_rate: Share of all blocks of the trace that are hits.
        first_token_s: Seconds by which the first token of a request comes sooner, on average.
    """

    policy: PolicyName
    capacity_bytes: int | None
    num_slots: int
    num_hits: int
    hit_rate: float
    first_token_s: float | None


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a list.

    Attributes:
        policy: Eviction policy; `none` for object storage.
        num_slots: Blocks that fit; in object storage all of the trace.
        num_hits: Hits that this tier gave.
        hit_rate: Share of all blocks of the trace that are hits here.
        num_promoted: Blocks promoted from here to the first tier.
        num_evicted: Blocks evicted.
        bytes_written_per_day: Bytes written in a day at this rate; None without a duration.
    """

    medium: Medium
    policy: PolicyName | Literal["none"]
    num_slots: int
    num_hits: int
    hit_rate: float
    num_promoted: int
    num_evicted: int
    bytes_read: int
    bytes_written: int
    bytes_written_per_day: float | None


class TiersRow(msgspec.Struct, frozen=True, kw_only=True):
    """List of tiers, fastest first, and their hits together; fields as in `CapacityRow`.

    Attributes:
        backend: The list, as in a configuration.
    """

    backend: list[str]
    num_hits: int
    hit_rate: float
    first_token_s: float | None
    tiers: list[TierRow]


def plan_capacities(
    trace: Trace, machine: Machine, capacities: Sequence[tuple[int, int | None]]
) -> list[CapacityRow]:
    """Plan host memory alone, for each policy and capacity in blocks and, if known, bytes."""
    rows, ceiling = [], count_ceiling(trace)
    for policy in POLICIES:
        for num_slots, num_bytes in capacities:
            num_hits = ceiling
            if num_slots < trace.num_unique:  # else nothing is evicted
                num_hits = simulate(trace, [TierPlan("host", policy, num_slots)])[0].num_hits
            rows.append(
                CapacityRow(
                    policy=policy,
                    capacity_bytes=num_bytes,
                    num_slots=num_slots,
                    num_hits=num_hits,
                    hit_rate=num_hits / trace.num_references,
                    first_token_s=machine.first_token_s(trace, {"host": num_hits}),
                )
            )
    return rows


def plan_list(trace: Trace, machine: Machine, backend: Sequence[str]) -> TiersRow:
    """Plan a list of tiers, as the `backend` of an engine has it."""
    plans = plan_tiers(backend, machine.block_size_bytes(trace.tokens_per_block))
    tiers, hits = simulate(trace, plans), Counter[Medium]()
    for tier in tiers:
        hits[tier.plan.medium] += tier.num_hits
    return TiersRow(
        backend=list(backend),
        num_hits=hits.total(),
        hit_rate=hits.total() / trace.num_references,
        first_token_s=machine.first_token_s(trace, hits),
        tiers=[_tier_row(trace, machine, tier) for tier in tiers],
    )


def tier_url(medium: Medium, capacity: int, policy: PolicyName) -> str:
    """Write the URL of a tier of host memory or files, its size in the largest whole unit."""
    place = "" if medium == "host" else "/var/cache/kv"
    eviction = "" if policy == "lru" else f"&eviction={policy}"
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, ""))
    power, unit = next(each for each in units if capacity % 1024 ** each[0] == 0)
    return f"{medium}://{place}?capacity={capacity // 1024**power}{unit}{eviction}"


def _tier_row(trace: Trace, machine: Machine, tier: SimulatedTier) -> TierRow:
    block = machine.block_size_bytes(trace.tokens_per_block)
    written, days = tier.num_written * block, trace.duration_s / 86400
    return TierRow(
        medium=tier.plan.medium,
        policy=tier.plan.policy,
        num_slots=tier.plan.num_slots,
        num_hits=tier.num_hits,
        hit_rate=tier.num_hits / trace.num_references,
        num_promoted=tier.num_promoted,
        num_evicted=tier.num_evicted,
        bytes_read=tier.num_read * block,
        bytes_written=written,
        bytes_written_per_day=written / days if days else None,
    )


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended list of tiers within a budget of bytes; None if no tier is worth anything."""

    budget: dict[Medium, int]
    row: TiersRow | None
    reasons: list[str]


def parse_budget(text: str) -> dict[Medium, ByteSize]:
    """Parse a budget such as `host=64GiB,file=1TiB`."""
    budget: dict[Medium, ByteSize] = {}
    wanted = "host=SIZE, file=SIZE or both, such as 'host=64GiB,file=1TiB'"
    for part in text.split(","):
        medium, _, size = part.partition("=")
        known = next((each for each in _MEDIA if each == medium and each not in budget), None)
        if known is None:
            raise InvalidArgumentError("budget", text, wanted)
        budget[known] = ByteSize.parse(size, name="budget")
    return budget


def recommend(trace: Trace, machine: Machine, budget: Budget) -> Recommendation:
    """Recommend a list of tiers within a budget.

    Policies and tiers are those with the best score for the whole budget: with a prefill speed, the
    seconds by which a first token comes sooner, else the hits. A simpler list wins if it is equally
    good. Then each capacity, that of files first, is halved as long as the list stays as good.
    """
    block = machine.block_size_bytes(trace.tokens_per_block)
    plan_once = functools.cache(functools.partial(plan_list, trace, machine))

    def plan(sizes: Mapping[Medium, int], policies: Mapping[Medium, PolicyName]) -> TiersRow:
        return plan_once(tuple(tier_url(each, sizes[each], policies[each]) for each in policies))

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
        reasons = ["no tier is worth it: a hit saves nothing, or there are no hits"]
        return Recommendation(budget=asked, row=None, reasons=reasons)
    reasons = []
    for medium in reversed(policies):
        half = sizes | {medium: sizes[medium] // 2}
        while _fits(medium, half[medium], block) and score(half, policies) >= AS_GOOD * best:
            sizes, half = half, half | {medium: half[medium] // 2}
        given, of_all = format_size(sizes[medium]), format_size(asked[medium])
        if given != of_all:
            reasons.append(f"{medium}: {given} is as good as {of_all}")
    reasons += [f"{medium}: not needed" for medium in sizes if medium not in policies]
    return Recommendation(budget=asked, row=plan(sizes, policies), reasons=reasons)


def _choices(media: Iterable[Medium]) -> Iterator[dict[Medium, PolicyName]]:
    """List the policies of the first tier alone, then those of both tiers."""
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
