"""Report of a replay: the trace, the hits of each cache, and tables of both for a terminal."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from kvxfer.replay.plan import CapacityRow, Machine, Recommendation, TierRow, TiersRow
from kvxfer.replay.trace import Trace, count_ceiling
from kvxfer.text import align, printable
from kvxfer.units import format_size


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Trace in numbers; `ceiling` is the share of hits of a cache that never evicts."""

    name: str
    num_requests: int
    num_references: int
    num_unique: int
    tokens_per_block: int
    duration_s: float
    num_input_tokens: int
    ceiling: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a replay: host memory alone, lists of tiers, and the best one for a budget."""

    trace: TraceSummary
    machine: Machine
    capacities: list[CapacityRow]
    lists: list[TiersRow] = []
    recommendation: Recommendation | None = None


def summarise(trace: Trace) -> TraceSummary:
    """Summarise a trace."""
    return TraceSummary(
        name=trace.name,
        num_requests=trace.num_requests,
        num_references=trace.num_references,
        num_unique=trace.num_unique,
        tokens_per_block=trace.tokens_per_block,
        duration_s=trace.duration_s,
        num_input_tokens=int(trace.input_lengths.sum()),
        ceiling=count_ceiling(trace) / trace.num_references,
    )


def format_report(report: Report) -> str:
    """Format a report as text of 80 columns."""
    parts = [_head(report), _capacities(report.capacities), *map(_tiers, report.lists)]
    if report.recommendation is not None:
        parts.append(_recommendation(report.recommendation))
    return "\n\n".join(parts)


def _head(report: Report) -> str:
    trace, machine = report.trace, report.machine
    requests = f"{trace.num_requests:,} requests in {_duration(trace.duration_s)}"
    blocks = f"{trace.num_references:,} blocks of {trace.tokens_per_block} tokens"
    different = f"{trace.num_unique:,} different blocks"
    ceiling = f"{percent(trace.ceiling)} of the blocks are hits when nothing is evicted"
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
    tiers = (tier for row in report.lists for tier in row.tiers)
    if machine.prefill_tokens_per_s and any(tier.medium == "object" for tier in tiers):
        lines.append(("", f"from object storage {machine.bandwidths['object'] / 1e9:g} GB/s"))
    return "\n".join(f"{name:9}{text}" for name, text in lines)


def _capacities(rows: Sequence[CapacityRow]) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    timed = any(row.first_token_s is not None for row in rows)
    sized = any(row.capacity_bytes is not None for row in rows)
    header = [*["capacity"][:sized], "blocks", *(f"{policy} hits" for policy in policies)]
    table = [[*header, *(f"{policy} saves" for policy in policies if timed)]]
    grid: dict[tuple[int | None, int], dict[str, CapacityRow]] = defaultdict(dict)
    for row in rows:
        grid[row.capacity_bytes, row.num_slots][row.policy] = row
    for (capacity, num_slots), chosen in grid.items():
        sizes = [*[format_size(capacity or 0)][:sized], f"{num_slots:,}"]
        hits = (percent(chosen[policy].hit_rate) for policy in policies)
        saved = (_seconds(chosen[policy].first_token_s) for policy in policies if timed)
        table.append([*sizes, *hits, *saved])
    title = "Host memory alone: hits, % of blocks"
    title += "; how much sooner a first token comes" if timed else ""
    return "\n".join([title, *align_numbers(table)])


def _tiers(row: TiersRow) -> str:
    lines = [f"Tiers {_quoted(row.backend)}", f"{percent(row.hit_rate)} of the blocks are hits"]
    if row.first_token_s is not None:
        lines[1] += f", a first token {_seconds(row.first_token_s)} sooner"
    header = ["tier", "policy", "blocks", "hits", "promoted", "read", "written", "written a day"]
    return "\n".join([*lines, *align_numbers([header, *map(_cells, row.tiers)])])


def _cells(tier: TierRow) -> list[str]:
    moved = tier.bytes_read, tier.bytes_written, tier.bytes_written_per_day
    return [
        tier.medium,
        tier.policy,
        f"{tier.num_slots:,}",
        percent(tier.hit_rate),
        f"{tier.num_promoted:,}",
        *map(_bytes, moved),
    ]


def _recommendation(found: Recommendation) -> str:
    budget = ", ".join(f"{medium} {format_size(size)}" for medium, size in found.budget.items())
    lines = [f"Recommended for {budget}:", *(f"- {reason}" for reason in found.reasons)]
    if found.row is None:
        return "\n".join(lines)
    lines.append(f'"backend": {_quoted(found.row.backend)}')
    return "\n".join([*lines, _tiers(found.row).partition("\n")[2]])


def align_numbers(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align a table: text to the left, numbers to the right."""
    columns = enumerate(zip(*table[1:], strict=True))
    return align(table, [i for i, column in columns if any(cell[:1].isdigit() for cell in column)])


def _quoted(backend: Sequence[str]) -> str:
    text = msgspec.json.encode(list(backend)).decode()
    return text.replace('","', '", "') if len(text) < 68 else text.replace('","', '",\n  "')


def percent(share: float) -> str:
    """Format a share as `72.6 %`."""
    return f"{100 * share:.1f} %"


def _bytes(number: float | None) -> str:
    return "-" if number is None else format_size(int(number))


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.0f} ms"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
