"""Figures of tiers: what two scrapes say about each, in numbers and in plain words."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.top.scrape import Scrape, Window, share
from kvxfer.units import format_size

# The names are those of `kvxfer.telemetry.metrics`, which imports torch.
ENGINE = "engine"
NO_TIER = "none"
FAST = ("host",)
EVICTIONS = ("evicted", "expired", "low_priority")
GAUGES_OF_TIERS = ("capacity_bytes", "used_bytes", "stored_blocks", "blocks_in_use")
COUNTERS_OF_TIERS = (
    *("store_blocks_total", "load_blocks_total", "lookup_blocks_total", "removed_blocks_total"),
    *("deadline_misses_total", "skipped_blocks_total"),
    *("not_written_back_blocks_total", "not_loaded_blocks_total"),
)
BAD_OUTCOMES = ("corrupt", "failed", "timed_out")


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks that a tier stored, or gave, since the scrape before.

    Attributes:
        blocks_per_s, bytes_per_s: Those that are done.
        mean_s: Mean time of a batch; None where none was counted.
    """

    blocks_per_s: float
    bytes_per_s: float
    mean_s: float | None


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Figures of a tier; None where the process does not say, or before its second scrape.

    Attributes:
        tier: Its name.
        capacity_bytes, used_bytes, stored_blocks: What fits, what is taken, and by how many blocks.
        hit_share: Share of all blocks looked up since the start that this tier gave.
        hit_share_now, hits_per_s: The same since the scrape before, and their number.
        evictions_per_s: Blocks that made room for others.
        stores, loads: Blocks moved.
    """

    tier: str
    capacity_bytes: float | None
    used_bytes: float | None
    stored_blocks: float | None
    hit_share: float | None
    hit_share_now: float | None
    hits_per_s: float | None
    evictions_per_s: float | None
    stores: Moves | None
    loads: Moves | None


def tier_figures(scrape: Scrape, window: Window | None) -> list[TierFigures]:
    """Work out the figures of each tier, host memory first.

    Args:
        scrape: The present metrics of a process.
        window: From its scrape before to the present one; None without one.
    """
    tiers = scrape.label_values("tier", *GAUGES_OF_TIERS, *COUNTERS_OF_TIERS)
    tiers = [tier for tier in tiers if tier not in {ENGINE, NO_TIER}]
    return [
        _figures(tier, scrape, window) for tier in sorted(tiers, key=lambda each: each not in FAST)
    ]


def _figures(tier: str, scrape: Scrape, window: Window | None) -> TierFigures:
    name = "lookup_blocks_total"
    hit = {"tier": tier, "outcome": "hit"}
    now = window if scrape.total(name) else None  # vLLM counts no lookups by tier
    return TierFigures(
        tier=tier,
        capacity_bytes=scrape.find("capacity_bytes", tier=tier),
        used_bytes=scrape.find("used_bytes", tier=tier),
        stored_blocks=scrape.find("stored_blocks", tier=tier),
        hit_share=share(scrape.total(name, **hit), scrape.total(name)),
        hit_share_now=share(now.increase(name, **hit), now.increase(name)) if now else None,
        hits_per_s=now.rate(name, **hit) if now else None,
        evictions_per_s=(
            sum(window.rate("removed_blocks_total", tier=tier, reason=each) for each in EVICTIONS)
            if window
            else None
        ),
        stores=_moves("store", tier, window),
        loads=_moves("load", tier, window),
    )


def _moves(verb: str, tier: str, window: Window | None) -> Moves | None:
    if window is None:
        return None
    return Moves(
        blocks_per_s=window.rate(f"{verb}_blocks_total", tier=tier, outcome="done"),
        bytes_per_s=window.rate(f"{verb}_bytes_total", tier=tier, outcome="done"),
        mean_s=window.mean(f"{verb}_seconds", tier=tier),
    )


def state_of(tier: str, scrape: Scrape) -> Iterator[str]:
    """Say in words what keeps a tier from working at this moment, and what waits for it."""
    if scrape.total("breaker_open", tier=tier):
        yield "writing is paused after repeated errors of the disk"
    if scrape.total("suspended", tier=tier):
        yield "not called for now, since it missed a deadline"
    if number := scrape.total("quarantined_blocks", tier=tier):
        yield f"corrupt files in quarantine: {number:.0f}"
    if num_bytes := scrape.total("quarantined_bytes", tier=tier):
        yield f"{format_size(int(num_bytes))} held back, since late reads may change it"
    if number := scrape.total("write_back_queue_blocks", tier=tier):
        yield f"blocks that wait to be copied to it: {number:.0f}"
    if number := scrape.total("blocks_in_use", tier=tier):
        yield f"chunks in use: {number:.0f}"


def losses_of(tier: str, scrape: Scrape) -> Iterator[str]:
    """Say in words what went wrong in a tier since its process was started."""
    for verb, done in (("store", "stored"), ("load", "loaded")):
        counts = [
            (scrape.total(f"{verb}_blocks_total", tier=tier, outcome=outcome), outcome)
            for outcome in BAD_OUTCOMES
        ]
        parts = [
            f"{number:.0f} {outcome.replace('_', ' ')}" for number, outcome in counts if number
        ]
        if parts:
            yield f"not {done}: {', '.join(parts)}"
    if number := scrape.total("deadline_misses_total", tier=tier):
        yield f"late calls: {number:.0f}"
    if number := scrape.total("skipped_blocks_total", tier=tier):
        yield f"blocks skipped while it was not called: {number:.0f}"
    if number := scrape.total("not_written_back_blocks_total", tier=tier):
        yield f"blocks not copied to it: {number:.0f}"
    if number := scrape.total("not_loaded_blocks_total", tier=tier):
        yield f"blocks computed, which is faster: {number:.0f}"
    if number := scrape.total("removed_blocks_total", tier=tier, reason="corrupt"):
        yield f"removed as corrupt: {number:.0f}"
