"""Plan: what caches of each policy, capacity and list of tiers give, for a trace and a machine."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import object_size_bytes, plan_tiers
from kvxfer.replay.lru_curve import LRUCurve
from kvxfer.replay.simulation import (
    Medium,
    RequestKind,
    SimulatedBucket,
    SimulatedTier,
    TierPlan,
    simulate,
)
from kvxfer.replay.trace import Trace
from kvxfer.storage.eviction.policies import PolicyName

SECONDS_PER_DAY = 86400
GIB = 1 << 30
FOLDER = "/var/cache/kv"
BYTES_NEEDED = "the bytes of a token for sizes: --bytes-per-token or --model"

DEFAULT_BANDWIDTHS: Mapping[Medium, float] = {"host": 10e9, "file": 2e9, "object": 1e9}
"""Bytes per second that a load gets from a tier where nothing else is stated: verified host memory
on a few cores, one NVMe drive, and a bucket of the same region over some 10 Gbit/s."""

MAX_PRICE = 1e9


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of object storage, in any currency; what is not stated costs nothing.

    Attributes:
        put: 1,000 requests that write or list.
        get: 1,000 requests that read, HEAD included.
        gib_egress: 1 GiB that is read.
        gib_month: 1 GiB that is kept for a month.
    """

    put: float = 0.0
    get: float = 0.0
    gib_egress: float = 0.0
    gib_month: float = 0.0


def parse_prices(text: str) -> Prices:
    """Parse prices such as `put=0.005,get=0.0004,gib-egress=0.09,gib-month=0.023`.

    Raises:
        InvalidArgumentError: It is no such text.
    """
    names = [name.replace("_", "-") for name in Prices.__struct_fields__]
    wanted = f"some of {', '.join(f'{name}=PRICE' for name in names)}, each 0 to {MAX_PRICE:,.0f}"
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if name not in names or name in prices or not 0 <= price <= MAX_PRICE:
            raise InvalidArgumentError("prices", text, wanted)
        prices[name] = price
    return Prices(**{name.replace("-", "_"): price for name, price in prices.items()})


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

    def first_token_s(self, trace: Trace, hits: Mapping[Medium, int]) -> float | None:
        """Compute the seconds by which hits let a first token come sooner, on average.

        That is computing their tokens, less loading their bytes.
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
        capacity_bytes: Capacity, None where it was given in blocks of unknown size.
        num_slots: Blocks that fit.
        hit_rate: Share of all blocks of the trace that are hits.
        first_token_s: Seconds by which the first token of a request comes sooner, on average.
    """

    policy: PolicyName
    capacity_bytes: int | None
    num_slots: int
    num_hits: int
    hit_rate: float
    first_token_s: float | None


class ObjectCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the requests of a trace, in the currency of the prices.

    Attributes:
        puts: Requests that write or list.
        gets: Requests that read.
        egress: Bytes that are read.
        per_1000_prompts: All of these for 1,000 requests of the trace, which are prompts.
        per_day: All of these a day, as it would be if the trace went on; None for a moment.
        kept_per_month: Bytes that are kept at the end, for a month.
    """

    puts: float
    gets: float
    egress: float
    per_1000_prompts: float
    per_day: float | None
    kept_per_month: float


class ObjectUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of object storage by a whole trace; bytes are those of objects, headers included.

    Attributes:
        requests: Requests by their kind, without repetitions.
        requests_per_s: Requests a second, on average; None for a moment.
        costs: What that costs; None without prices.
    """

    requests: dict[str, int]
    requests_per_s: float | None
    bytes_sent: int
    bytes_received: int
    bytes_kept: int
    costs: ObjectCosts | None


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a list; bytes are None for blocks of unknown size.

    Attributes:
        policy: Eviction policy; `none` for object storage.
        num_slots: Blocks that fit; in object storage those that are kept at the end.
        num_hits: Hits that this tier gave.
        hit_rate: Share of all blocks of the trace that are hits here.
        num_promoted: Blocks promoted from here to the first tier.
        num_evicted: Blocks evicted.
        bytes_written_per_day: Bytes written, as it would be if the trace went on for a day.
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
    """A list of tiers, fastest first, and what all of them give; fields as of `CapacityRow`.

    Attributes:
        backend: The list as a configuration has it.
    """

    backend: list[str]
    num_hits: int
    hit_rate: float
    first_token_s: float | None
    tiers: list[TierRow]


class GridRow(msgspec.Struct, frozen=True, kw_only=True):
    """One capacity of host memory of one policy, above lower tiers.

    Attributes:
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
        for num_slots, capacity in zip(slots, capacities, strict=True):
            num_hits = curve.hits(num_slots)
            if policy != "lru" and num_slots < trace.num_unique:  # else nothing is evicted
                num_hits = simulate(trace, [TierPlan("host", policy, num_slots)]).num_hits
            rows.append(
                CapacityRow(
                    policy=policy,
                    capacity_bytes=capacity,
                    num_slots=num_slots,
                    num_hits=num_hits,
                    hit_rate=num_hits / trace.num_references,
                    first_token_s=machine.first_token_s(trace, {"host": num_hits}),
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
    return _plan(trace, machine, backend, plans)


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
                row = _plan(trace, machine, backend, plans)
                rows.append(
                    GridRow(policy=policy, capacity_bytes=capacity, below=[*lower], row=row)
                )
    return rows


def tier_url(medium: Medium, capacity: int, policy: PolicyName) -> str:
    """Write the URL of a tier of host memory or files, its size in the largest whole unit."""
    place = "" if medium == "host" else FOLDER
    eviction = "" if policy == "lru" else f"&eviction={policy}"
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, ""))
    power, unit = next(each for each in units if capacity % 1024 ** each[0] == 0)
    return f"{medium}://{place}?capacity={capacity // 1024**power}{unit}{eviction}"


def _plan(
    trace: Trace, machine: Machine, backend: Sequence[str], plans: Sequence[TierPlan]
) -> TiersRow:
    simulation = simulate(trace, plans)
    hits: dict[Medium, int] = {}
    for tier in simulation.tiers:
        hits[tier.plan.medium] = hits.get(tier.plan.medium, 0) + tier.num_hits
    return TiersRow(
        backend=list(backend),
        num_hits=simulation.num_hits,
        hit_rate=simulation.num_hits / trace.num_references,
        first_token_s=machine.first_token_s(trace, hits),
        tiers=[_tier_row(trace, machine, tier) for tier in simulation.tiers],
    )


def _tier_row(trace: Trace, machine: Machine, tier: SimulatedTier) -> TierRow:
    block = trace.tokens_per_block * machine.bytes_per_token if machine.bytes_per_token else None
    written = tier.num_written * block if block else None
    days, objects, num_slots = trace.duration_s / SECONDS_PER_DAY, None, tier.plan.num_slots
    if isinstance(tier, SimulatedBucket):
        num_slots = tier.num_kept
        objects = _object_use(trace, machine, tier, object_size_bytes(block)) if block else None
    return TierRow(
        medium=tier.plan.medium,
        policy=tier.plan.policy,
        num_slots=num_slots,
        num_hits=tier.num_hits,
        hit_rate=tier.num_hits / trace.num_references,
        num_promoted=tier.num_promoted,
        num_evicted=tier.num_evicted,
        bytes_read=tier.num_read * block if block else None,
        bytes_written=written,
        bytes_written_per_day=written / days if written is not None and days else None,
        objects=objects,
    )


def _object_use(trace: Trace, machine: Machine, bucket: SimulatedBucket, size: int) -> ObjectUse:
    requests = {kind: bucket.requests[kind] for kind in get_args(RequestKind)}
    received, kept, costs = bucket.num_read * size, bucket.num_kept * size, None
    days, seconds = trace.duration_s / SECONDS_PER_DAY, trace.duration_s
    if prices := machine.prices:
        puts = prices.put * (requests["PUT"] + requests["LIST"]) / 1000
        gets = prices.get * (requests["GET"] + requests["HEAD"]) / 1000
        egress = prices.gib_egress * received / GIB
        costs = ObjectCosts(
            puts=puts,
            gets=gets,
            egress=egress,
            per_1000_prompts=1000 * (puts + gets + egress) / trace.num_requests,
            per_day=(puts + gets + egress) / days if days else None,
            kept_per_month=prices.gib_month * kept / GIB,
        )
    return ObjectUse(
        requests=requests,
        requests_per_s=sum(requests.values()) / seconds if seconds else None,
        bytes_sent=bucket.num_sent * size,
        bytes_received=received,
        bytes_kept=kept,
        costs=costs,
    )
