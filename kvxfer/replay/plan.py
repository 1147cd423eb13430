"""Plan: what caches of each policy, capacity and list of tiers give, for a trace and a machine."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import object_size_bytes, plan_tiers
from kvxfer.replay.lru_curve import LRUCurve
from kvxfer.replay.object_costs import ObjectUse, Prices, price
from kvxfer.replay.simulation import (
    Medium,
    RequestKind,
    SimulatedBucket,
    SimulatedTier,
    Simulation,
    TierPlan,
    simulate,
)
from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import PolicyName

SECONDS_PER_DAY = 86400
FOLDER = "/var/cache/kv"
BYTES_NEEDED = "the bytes of a token for sizes: --bytes-per-token or --model"

DEFAULT_BANDWIDTHS: Mapping[Medium, float] = {"host": 10e9, "file": 2e9, "object": 1e9}
"""Bytes per second that a load gets from a tier where nothing else is stated: verified host memory
on a few cores, one NVMe drive, and a bucket of the same region over some 10 Gbit/s."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Model and machine for which a trace is planned.

    Attributes:
        bytes_per_token: Bytes that the model keeps for a token; None if only blocks count.
        prefill_tokens_per_s: Tokens of a prompt computed in a second; None if time does not count.
        bandwidths: Bytes per second that a load gets from each medium.
        prices: Prices of object storage; None if costs do not count.
    """

    bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None
    bandwidths: dict[Medium, float] = msgspec.field(default_factory=lambda: {**DEFAULT_BANDWIDTHS})
    prices: Prices | None = None

    def block_size_bytes(self, tokens_per_block: int) -> int:
        """Compute the bytes of a block.

        Raises:
            InvalidArgumentError: Those of a token are not known.
        """
        if self.bytes_per_token is None:
            raise InvalidArgumentError("bytes_per_token", None, BYTES_NEEDED)
        return tokens_per_block * self.bytes_per_token

    def saved_s(self, tokens_per_block: int, hits: Mapping[Medium, int]) -> float | None:
        """Compute the seconds that hits save: computing their tokens, less loading their bytes."""
        if self.prefill_tokens_per_s is None:
            return None
        saved = 0.0
        for medium, number in hits.items():
            num_tokens = number * tokens_per_block
            num_bytes = num_tokens * (self.bytes_per_token or 0)
            saved += num_tokens / self.prefill_tokens_per_s - num_bytes / self.bandwidths[medium]
        return saved


class CapacityRow(msgspec.Struct, frozen=True, kw_only=True):
    """One capacity of one policy, in host memory alone.

    Attributes:
        policy: Eviction policy.
        capacity_bytes: Capacity, None where it was given in blocks of unknown size.
        num_slots: Blocks that fit.
        num_hits: Hits.
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
        medium: `host`, `file` or `object`.
        policy: Eviction policy; `none` for object storage.
        num_slots: Blocks that fit; in object storage those that are kept at the end.
        num_hits: Hits that this tier gave.
        hit_rate: Share of all blocks of the trace that are hits here.
        num_promoted: Blocks promoted from here to the first tier.
        num_evicted: Blocks evicted.
        bytes_read: Bytes read, None for blocks of unknown size.
        bytes_written: Bytes written, likewise.
        bytes_written_per_day: The same, as it would be if the trace went on for a day.
        objects: Requests and costs of object storage; None for another medium.
    """

    medium: Medium
    policy: PolicyName | Literal["none"]
    num_slots: int
    num_hits: int
    hit_rate: float
    num_promoted: int
    num_evicted: int
    bytes_read: int | None
    bytes_written: int | None
    bytes_written_per_day: float | None
    objects: ObjectUse | None = None


class TiersRow(msgspec.Struct, frozen=True, kw_only=True):
    """A list of tiers.

    Attributes:
        backend: The list as a configuration has it.
        num_hits: Hits of all tiers.
        hit_rate: Share of all blocks of the trace that are hits.
        first_token_s: Seconds by which the first token of a request comes sooner, on average.
        tiers: Fastest first.
    """

    backend: list[str]
    num_hits: int
    hit_rate: float
    first_token_s: float | None
    tiers: list[TierRow]


class GridRow(msgspec.Struct, frozen=True, kw_only=True):
    """One capacity of host memory of one policy, above lower tiers.

    Attributes:
        policy: Eviction policy of host memory.
        capacity_bytes: Capacity of host memory.
        below: URLs of the lower tiers.
        row: What the tiers give.
    """

    policy: PolicyName
    capacity_bytes: int
    below: list[str]
    row: TiersRow


def plan_capacities(
    trace: Trace,
    curve: LRUCurve,
    machine: Machine,
    *,
    policies: Sequence[PolicyName],
    slots: Sequence[int],
    capacities: Sequence[int | None],
) -> list[CapacityRow]:
    """Plan host memory alone, for each policy and capacity.

    Args:
        trace: The trace.
        curve: Its hits with LRU.
        machine: Model and machine.
        policies: Policies to compare.
        slots: Blocks that fit in each capacity.
        capacities: The capacities in bytes, where they are known.
    """
    rows = []
    for policy in policies:
        hits = {each: curve.hits(each) for each in slots}
        if policy == "arc":  # the same as LRU where nothing is evicted
            evicting = [each for each in hits if each < trace.num_unique]
            hits |= {
                each: simulate(trace, [TierPlan("host", policy, each)]).num_hits
                for each in evicting
            }
        for num_slots, capacity in zip(slots, capacities, strict=True):
            num_hits = hits[num_slots]
            rows.append(
                CapacityRow(
                    policy=policy,
                    capacity_bytes=capacity,
                    num_slots=num_slots,
                    num_hits=num_hits,
                    hit_rate=num_hits / trace.num_references,
                    first_token_s=_per_request(trace, machine, {"host": num_hits}),
                )
            )
    return rows


def plan_list(trace: Trace, machine: Machine, backend: Sequence[str]) -> TiersRow:
    """Plan a list of tiers, as the `backend` of an engine has it.

    Raises:
        InvalidArgumentError: A backend is unknown or not one block fits, or the size of a block is
            not known.
    """
    plans = plan_tiers(backend, machine.block_size_bytes(trace.tokens_per_block))
    return describe_simulation(trace, machine, backend, simulate(trace, plans))


def plan_grid(
    trace: Trace,
    machine: Machine,
    *,
    policies: Sequence[PolicyName],
    slots: Sequence[int],
    capacities: Sequence[int | None],
    below: Sequence[Sequence[str]],
) -> list[GridRow]:
    """Plan host memory of each policy and capacity above each of several lists of lower tiers.

    Args:
        trace: The trace.
        machine: Model and machine.
        policies: Policies of host memory; those of the tiers below are in their URLs.
        slots: Blocks that fit in each capacity of host memory.
        capacities: These capacities in bytes.
        below: Lists of URLs, fastest first.

    Raises:
        InvalidArgumentError: As of `plan_list`.
    """
    rows = []
    for lower in below:
        lower_plans = plan_tiers(lower, machine.block_size_bytes(trace.tokens_per_block))
        for policy in policies:
            for num_slots, capacity in zip(slots, capacities, strict=True):
                assert capacity is not None, "the size of a block is known"
                plans = [TierPlan("host", policy, num_slots), *lower_plans]
                backend = [tier_url("host", capacity, policy), *lower]
                row = describe_simulation(trace, machine, backend, simulate(trace, plans))
                below_it = list(lower)
                rows.append(
                    GridRow(policy=policy, capacity_bytes=capacity, below=below_it, row=row)
                )
    return rows


def tier_url(medium: Medium, capacity: int, policy: PolicyName) -> str:
    """Write the URL of a tier of host memory or files."""
    place = "" if medium == "host" else FOLDER
    eviction = "" if policy == "lru" else f"&eviction={policy}"
    return f"{medium}://{place}?capacity={_size(capacity)}{eviction}"


def _size(num_bytes: int) -> str:
    """Write bytes in the largest unit in which they are whole."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


def describe_simulation(
    trace: Trace, machine: Machine, backend: Sequence[str], simulation: Simulation
) -> TiersRow:
    """Describe what tiers gave in the units of a machine."""
    hits: dict[Medium, int] = {}
    for tier in simulation.tiers:
        hits[tier.plan.medium] = hits.get(tier.plan.medium, 0) + tier.num_hits
    return TiersRow(
        backend=list(backend),
        num_hits=simulation.num_hits,
        hit_rate=simulation.num_hits / trace.num_references,
        first_token_s=_per_request(trace, machine, hits),
        tiers=[_tier_row(trace, machine, tier) for tier in simulation.tiers],
    )


def _tier_row(trace: Trace, machine: Machine, use: SimulatedTier) -> TierRow:
    block = trace.tokens_per_block * machine.bytes_per_token if machine.bytes_per_token else None
    written = use.num_written * block if block else None
    days = trace.duration_s / SECONDS_PER_DAY
    return TierRow(
        medium=use.plan.medium,
        policy=use.plan.policy,
        num_slots=use.num_kept if isinstance(use, SimulatedBucket) else use.plan.num_slots,
        num_hits=use.num_hits,
        hit_rate=use.num_hits / trace.num_references,
        num_promoted=use.num_promoted,
        num_evicted=use.num_evicted,
        bytes_read=use.num_read * block if block else None,
        bytes_written=written,
        bytes_written_per_day=written / days if written is not None and days else None,
        objects=_object_use(trace, machine, use, block) if block else None,
    )


def _object_use(
    trace: Trace, machine: Machine, use: SimulatedTier, block_size_bytes: int
) -> ObjectUse | None:
    if not isinstance(use, SimulatedBucket):
        return None
    size = object_size_bytes(block_size_bytes)
    received, kept = use.num_read * size, use.num_kept * size
    requests = {kind: use.requests[kind] for kind in get_args(RequestKind)}
    costs = None
    if machine.prices is not None:
        costs = price(
            machine.prices,
            requests,
            bytes_received=received,
            bytes_kept=kept,
            num_prompts=trace.num_requests,
            days=trace.duration_s / SECONDS_PER_DAY,
        )
    num_requests, seconds = sum(requests.values()), trace.duration_s
    return ObjectUse(
        requests=requests,
        requests_per_s=num_requests / seconds if seconds else None,
        bytes_sent=use.num_sent * size,
        bytes_received=received,
        bytes_kept=kept,
        costs=costs,
    )


def _per_request(trace: Trace, machine: Machine, hits: Mapping[Medium, int]) -> float | None:
    saved = machine.saved_s(trace.tokens_per_block, hits)
    return None if saved is None else saved / trace.num_requests
