"""Plan: what caches of each policy, capacity and list of tiers give, for a trace and a machine."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.block_size import plan_tiers
from kvxfer.replay.simulation import Medium, SimulatedTier, TierPlan, simulate
from kvxfer.replay.trace import Trace, count_ceiling
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
    """

    bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None
    bandwidths: dict[Medium, float] = msgspec.field(default_factory=lambda: {**DEFAULT_BANDWIDTHS})

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


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a list.

    Attributes:
        policy: Eviction policy; `none` for object storage.
        num_slots: Blocks that fit; in object storage all of the trace.
        num_hits: Hits that this tier gave.
        hit_rate: Share of all blocks of the trace that are hits here.
        num_promoted: Blocks promoted from here to the first tier.
        num_evicted: Blocks evicted.
        bytes_written_per_day: Bytes written if the trace went on for a day; None for a moment.
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
    """A list of tiers, fastest first, and what all of them give; fields as of `CapacityRow`.

    Attributes:
        backend: The list as a configuration has it.
    """

    backend: list[str]
    num_hits: int
    hit_rate: float
    first_token_s: float | None
    tiers: list[TierRow]


def plan_capacities(
    trace: Trace,
    machine: Machine,
    policies: Sequence[PolicyName],
    slots: Sequence[int],
    capacities: Sequence[int | None],
) -> list[CapacityRow]:
    """Plan host memory alone, for each policy and capacity in blocks, and in bytes where known."""
    rows, ceiling = [], count_ceiling(trace)
    for policy in policies:
        for num_slots, capacity in zip(slots, capacities, strict=True):
            num_hits = ceiling
            if num_slots < trace.num_unique:  # else nothing is evicted
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


def tier_url(medium: Medium, capacity: int, policy: PolicyName) -> str:
    """Write the URL of a tier of host memory or files, its size in the largest whole unit."""
    place = "" if medium == "host" else FOLDER
    eviction = "" if policy == "lru" else f"&eviction={policy}"
    units = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, ""))
    power, unit = next(each for each in units if capacity % 1024 ** each[0] == 0)
    return f"{medium}://{place}?capacity={capacity // 1024**power}{unit}{eviction}"


def _tier_row(trace: Trace, machine: Machine, tier: SimulatedTier) -> TierRow:
    block = machine.block_size_bytes(trace.tokens_per_block)
    written, days = tier.num_written * block, trace.duration_s / SECONDS_PER_DAY
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
