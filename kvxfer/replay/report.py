"""Report of a replay: what was asked, what each cache gives, and tables of that for a terminal."""

from collections.abc import Iterator, Sequence

import msgspec

from kvxfer.replay.plan import CapacityRow, GridRow, Machine, ObjectUse, TierRow, TiersRow
from kvxfer.replay.real import RealRow
from kvxfer.replay.recommendation import Recommendation
from kvxfer.replay.trace import Trace
from kvxfer.text import printable
from kvxfer.units import format_size

SIGNIFICANT_S = 1.0


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Trace in numbers; those of `Trace`.

    Attributes:
        ceiling: Share of the blocks that are hits of a cache that never evicts.
    """

    name: str
    num_requests: int
    num_references: int
    num_unique: int
    tokens_per_block: int
    duration_s: float
    num_input_tokens: int
    ceiling: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a replay.

    Attributes:
        trace: The trace.
        machine: What was assumed of model and machine.
        capacities: Host memory alone, by policy and capacity.
        grid: Host memory above lower tiers, by policy and capacity.
        lists: Lists of tiers that were asked for.
        recommendation: Recommended list, where a budget was given.
        real: Replays against real backends.
    """

    trace: TraceSummary
    machine: Machine
    capacities: list[CapacityRow]
    grid: list[GridRow] = []
    lists: list[TiersRow] = []
    recommendation: Recommendation | None = None
    real: list[RealRow] = []


def summarise(trace: Trace, ceiling: int) -> TraceSummary:
    """Summarise a trace, of whose blocks `ceiling` are hits of a cache that never evicts."""
    return TraceSummary(
        name=trace.name,
        num_requests=trace.num_requests,
        num_references=trace.num_references,
        num_unique=trace.num_unique,
        tokens_per_block=trace.tokens_per_block,
        duration_s=trace.duration_s,
        num_input_tokens=int(trace.input_lengths.sum()),
        ceiling=ceiling / trace.num_references,
    )


def format_report(report: Report) -> str:
    """Format a report as text of 80 columns."""
    parts = [_head(report), _capacities(report.capacities), *_grids(report.grid)]
    parts += [_tiers(row) for row in report.lists]
    if report.recommendation is not None:
        parts.append(_recommendation(report.recommendation))
    if report.real:
        parts.append(_real(report.real))
    return "\n\n".join(parts)


def _head(report: Report) -> str:
    trace, machine = report.trace, report.machine
    requests = f"{trace.num_requests:,} requests in {_duration(trace.duration_s)}"
    blocks = f"{trace.num_references:,} blocks of {trace.tokens_per_block} tokens"
    different = f"{trace.num_unique:,} different blocks"
    ceiling = f"{_percent(trace.ceiling)} % of the blocks are hits when nothing is evicted"
    lines = [("trace", printable(trace.name)), ("", f"{requests}, {blocks}")]
    if machine.bytes_per_token:
        num_bytes = trace.num_unique * trace.tokens_per_block * machine.bytes_per_token
        different += f", {format_size(num_bytes)}"
    lines += [("", different), ("ceiling", ceiling)]
    if machine.bytes_per_token:
        lines.append(("assumed", f"{format_size(machine.bytes_per_token)} for each token"))
    if machine.prefill_tokens_per_s:
        speed = f"{machine.prefill_tokens_per_s:,.0f} tokens/s computed"
        loads = (
            f"{medium} {machine.bandwidths[medium] / 1e9:g} GB/s" for medium in ("host", "file")
        )
        lines.append(("", f"{speed}; loaded from {', '.join(loads)}"))
    rows = [*(each.row for each in report.grid), *report.lists]
    tiers = (tier for row in rows for tier in row.tiers)
    if machine.prefill_tokens_per_s and any(tier.medium == "object" for tier in tiers):
        lines.append(("", f"from object storage {machine.bandwidths['object'] / 1e9:g} GB/s"))
    if prices := machine.prices:
        requests = f"{prices.put:g} for 1,000 PUT or LIST, {prices.get:g} for 1,000 GET or HEAD"
        lines.append(("", f"prices: {requests},"))
        lines.append(("", f"{prices.gib_egress:g} a GiB read, {prices.gib_month:g} a GiB a month"))
    return "\n".join(f"{name:9}{text}" for name, text in lines)


def _capacities(rows: Sequence[CapacityRow]) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    timed = any(row.first_token_s is not None for row in rows)
    sized = any(row.capacity_bytes is not None for row in rows)
    header = ["capacity"] if sized else []
    header += ["blocks", *(f"{policy} hits" for policy in policies)]
    if timed:
        header += [f"{policy} saves" for policy in policies]
    table = [header]
    for num_slots in dict.fromkeys(row.num_slots for row in rows):
        chosen = {row.policy: row for row in rows if row.num_slots == num_slots}
        first = next(iter(chosen.values()))
        cells = [format_size(first.capacity_bytes or 0)] if sized else []
        cells.append(f"{num_slots:,}")
        cells += [f"{_percent(chosen[policy].hit_rate)} %" for policy in policies]
        if timed:
            cells += [_seconds(chosen[policy].first_token_s) for policy in policies]
        table.append(cells)
    title = "Host memory alone: hits, % of blocks"
    title += "; how much sooner a first token comes" if timed else ""
    return "\n".join([title, *align(table)])


def _grids(grid: Sequence[GridRow]) -> Iterator[str]:
    """Make a table for each list of lower tiers."""
    for below in dict.fromkeys(tuple(each.below) for each in grid):
        of_below = [each for each in grid if tuple(each.below) == below]
        timed = any(each.row.first_token_s is not None for each in of_below)
        table = [["host", "policy", "tier", "hits", "read", "written", "written a day"]]
        table[0] += ["saves"] if timed else []
        for each in of_below:
            first = [format_size(each.capacity_bytes), each.policy]
            saved = [_seconds(each.row.first_token_s)] if timed else []
            for tier in each.row.tiers:
                table.append([*first, tier.medium, *_use(tier), *saved])
                first, saved = ["", ""], [""] if timed else []
        yield "\n".join([f"Host memory over {_quoted(below)}", *align(table)])


def _use(tier: TierRow) -> list[str]:
    moved = tier.bytes_read, tier.bytes_written, tier.bytes_written_per_day
    return [f"{_percent(tier.hit_rate)} %", *map(_bytes, moved)]


def _tiers(row: TiersRow) -> str:
    lines = [f"Tiers {_quoted(row.backend)}"]
    saved = (
        "" if row.first_token_s is None else f", a first token {_seconds(row.first_token_s)} sooner"
    )
    costs = [tier.objects.costs for tier in row.tiers if tier.objects and tier.objects.costs]
    lines.append(f"{_percent(row.hit_rate)} % of the blocks are hits{saved}")
    if costs:
        paid = sum(each.per_1000_prompts for each in costs)
        lines.append(f"1,000 prompts cost {paid:,.2f} for requests and egress of object storage")
    header = ["tier", "policy", "blocks", "hits", "promoted", "read", "written", "written a day"]
    rows = [
        [
            tier.medium,
            tier.policy,
            f"{tier.num_slots:,}",
            hits,
            f"{tier.num_promoted:,}",
            *moved,
        ]
        for tier in row.tiers
        for hits, *moved in [_use(tier)]
    ]
    objects = (line for tier in row.tiers if tier.objects for line in _objects(tier.objects))
    return "\n".join([*lines, *align([header, *rows]), *objects])


def _objects(use: ObjectUse) -> Iterator[str]:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in use.requests.items())
    rate = "" if use.requests_per_s is None else f"; {use.requests_per_s:,.1f} a second"
    sent, received, kept = map(_bytes, (use.bytes_sent, use.bytes_received, use.bytes_kept))
    lines = [
        ("requests", f"{kinds}{rate}"),
        ("bytes", f"{sent} sent, {received} received, {kept} kept at the end"),
    ]
    if costs := use.costs:
        puts, gets, egress = (f"{each:,.2f}" for each in (costs.puts, costs.gets, costs.egress))
        lines.append(("cost", f"{puts} PUT and LIST, {gets} GET and HEAD, {egress} egress"))
        day = "" if costs.per_day is None else f"{costs.per_day:,.2f} a day at this rate; "
        lines.append(("", f"{day}{costs.kept_per_month:,.2f} a month for what is kept"))
    return (f"{name:9}{text}" for name, text in lines)


def _recommendation(found: Recommendation) -> str:
    budget = ", ".join(f"{medium} {format_size(size)}" for medium, size in found.budget.items())
    lines = [f"Recommended for {budget}:", *(f"- {reason}" for reason in found.reasons)]
    if found.row is None:
        return "\n".join(lines)
    lines.append(f'"backend": {_quoted(found.row.backend)}')
    return "\n".join([*lines, _tiers(found.row).partition("\n")[2]])


def _real(rows: Sequence[RealRow]) -> str:
    table = [["real backends", "hits", "model", "difference", "took"]]
    table += [
        [
            row.tiers,
            f"{row.num_hits:,}",
            f"{row.num_hits_modelled:,}",
            f"{100 * row.difference:.2f} %",
            f"{row.seconds:.1f} s",
        ]
        for row in rows
    ]
    return "\n".join(align(table))


def align(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align a table: text to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    numeric = [
        any(cell[:1].isdigit() for cell in column) for column in zip(*table[1:], strict=True)
    ]
    for row in table:
        cells = zip(row, widths, numeric, strict=True)
        yield "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells
        ).rstrip()


def _quoted(backend: Sequence[str]) -> str:
    text = msgspec.json.encode(list(backend)).decode()
    return text.replace('","', '", "') if len(text) < 68 else text.replace('","', '",\n  "')


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _bytes(number: float | None) -> str:
    return "-" if number is None else format_size(int(number))


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) >= SIGNIFICANT_S else f"{1000 * seconds:.0f} ms"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
