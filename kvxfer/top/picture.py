"""Picture of watched processes: tables and lines for a terminal of 80 columns."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvxfer.text import printable
from kvxfer.top.figures import ENGINE, Moves, TierFigures, losses_of, state_of, tier_figures
from kvxfer.top.scrape import EXTERNAL_PREFIX_CACHE, Scrape, Window, share
from kvxfer.top.watched import WatchedProcess
from kvxfer.units import format_duration, format_size

WIDTH = 80
NAME_WIDTH = 8
UNKNOWN = "-"
BAD, NOTE, HEAD = "bold red", "yellow", "bold"
_DIM = "dim"


class _Cut:
    """Picture that fits the height of a terminal, and says how much of it does not."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Rich tells the height to the outermost content only.
        height = console.height if console.is_alt_screen else None
        options = options.update(width=min(options.max_width, WIDTH), height=None)
        lines = console.render_lines(self._content, options, pad=False)
        if height is not None and len(lines) > height:
            hidden = f"... {len(lines) - height + 1} more lines in a taller terminal"
            lines = [*lines[: height - 1], [Segment(hidden)]]
        for line in lines:
            yield from line
            yield Segment.line()


def picture(
    processes: Sequence[WatchedProcess], *, interval_s: float, when: datetime, now_s: float
) -> RenderableType:
    """Draw what is known of processes, at most 80 columns wide and as high as the terminal.

    Processes that do not answer come first.

    Args:
        processes: The processes.
        interval_s: Time between two scrapes.
        when: Time of day, for the first line.
        now_s: The same by `time.monotonic`.
    """
    head = f"kvxfer top  {when:%Y-%m-%d %H:%M:%S}  rates over {interval_s:g} s"
    parts: list[RenderableType] = [Text(head, style=HEAD)]
    for process in sorted(processes, key=lambda each: each.latest is not None):
        parts += ["", _title(process, now_s)]
        if process.latest is not None:
            parts += _body(process.latest, process.window)
    return _Cut(Group(*parts))


def _title(process: WatchedProcess, now_s: float) -> Text:
    title = Text(str(process.endpoint), style=HEAD)
    if process.error:
        since = format_duration(now_s - process.failing_since_s)
        title.append(f"  no metrics for {since}: {process.error}", style=BAD)
    elif process.latest is None:
        title.append("  was asked, no answer yet", style=_DIM)
    else:
        title.append(f"  answered in {_seconds(process.answered_in_s)}", style=_DIM)
        if process.restarted_at_s is not None:
            ago = format_duration(now_s - process.restarted_at_s)
            title.append(f"  restarted {ago} ago: counters began anew", style=NOTE)
    return title


def _body(scrape: Scrape, window: Window | None) -> Iterator[RenderableType]:
    tiers = tier_figures(scrape, window)
    yield from _lookups(scrape, window)
    if tiers:
        yield _rooms(tiers)
        yield _moves(tiers)
    else:
        yield Text("no block was stored or asked for yet", style=_DIM)
    yield from _engine(scrape, window)
    yield from _peers(scrape)
    for each in tiers:
        if state := "; ".join(state_of(each.tier, scrape)):
            yield _line(each.tier, state, NOTE)
    yield from _losses(scrape, [each.tier for each in tiers])


def _rooms(tiers: Sequence[TierFigures]) -> Table:
    heads = "TIER", "USED", "OF", "FULL", "BLOCKS", "HITS", "NOW", "HITS/S", "EVICTED/S"
    table = _table(*heads)
    for each in tiers:
        full = None
        if each.used_bytes is not None and each.capacity_bytes:
            full = each.used_bytes / each.capacity_bytes
        table.add_row(
            Text(_name(each.tier)),
            _size(each.used_bytes),
            _size(each.capacity_bytes),
            _percent(full),
            _number(each.stored_blocks),
            _percent(each.hit_share),
            _percent(each.hit_share_now),
            _number(each.hits_per_s),
            _number(each.evictions_per_s),
        )
    return table


def _moves(tiers: Sequence[TierFigures]) -> Table:
    table = _table("TIER", "STORED/S", "BYTES/S", "EACH", "LOADED/S", "BYTES/S", "EACH")
    for each in tiers:
        table.add_row(Text(_name(each.tier)), *_cells(each.stores), *_cells(each.loads))
    return table


def _cells(moves: Moves | None) -> tuple[str, str, str]:
    if moves is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return _number(moves.blocks_per_s), _size(moves.bytes_per_s), _seconds(moves.mean_s)


def _table(*heads: str) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style=_DIM
    )
    table.add_column(heads[0], min_width=NAME_WIDTH, overflow="fold")
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True, min_width=len(head))
    return table


def _lookups(scrape: Scrape, window: Window | None) -> Iterator[Table]:
    blocks = "lookup_blocks_total"
    if looked_up := scrape.total(blocks):
        parts = [_found(scrape.total(blocks, outcome="hit"), looked_up, "since the start")]
        if window is not None:
            parts += [
                _found(window.increase(blocks, outcome="hit"), window.increase(blocks), "now"),
                f"{_number(window.rate(blocks))} blocks/s",
                f"{_seconds(window.mean('lookup_seconds', tier=ENGINE))} a lookup",
            ]
        yield _line("lookups", ", ".join(parts))
    asked, hits = (f"{EXTERNAL_PREFIX_CACHE}{each}_total" for each in ("queries", "hits"))
    if tokens := scrape.total(asked):
        parts = [_found(scrape.total(hits), tokens, "since the start")]
        if window is not None:
            parts += [
                _found(window.increase(hits), window.increase(asked), "now"),
                f"{_number(window.rate(asked))} tokens/s",
            ]
        yield _line("lookups", f"{', '.join(parts)} (vLLM)")


def _found(hits: float, of: float, when: str) -> str:
    return f"{_percent(share(hits, of))} found {when}"


def _engine(scrape: Scrape, window: Window | None) -> Iterator[Table]:
    queued = scrape.find("queued_batches", tier=ENGINE)
    in_flight = scrape.find("in_flight_bytes", tier=ENGINE)
    if queued is None and in_flight is None and not scrape.total("batch_seconds_count"):
        return
    late = scrape.total("deadline_misses_total", tier=ENGINE)
    parts = f"waiting: {_number(queued)}", f"in flight: {_size(in_flight)}"
    misses = f"deadlines missed since the start: {late:.0f}"
    yield _line(ENGINE, ", ".join((*parts, misses)), BAD if late else "")
    if window is None:
        return
    for verb in ("store", "load"):
        mean = window.mean("batch_seconds", operation=verb)
        if mean is not None:
            waited = _seconds(window.mean("queue_wait_seconds", operation=verb))
            yield _line("", f"a {verb} takes {_seconds(mean)}, {waited} of it in the queue")


def _peers(scrape: Scrape) -> Iterator[Table]:
    connected = scrape.find("peers_connected")
    if connected is None and scrape.find("leases") is None:
        return
    pinned, leases = scrape.total("pinned_batches"), scrape.total("leases")
    parts = [f"connected: {_number(connected)}"]
    if (known := scrape.find("peers_known")) is not None:
        parts.append(f"known: {_number(known)}")
    parts += [f"batches pinned: {pinned:.0f}", f"leases: {leases:.0f}"]
    yield _line("peers", ", ".join(parts))
    if scrape.find("discovery_failing"):
        yield _line("", "discovery gets no answers; the peers known last are used", BAD)


def _losses(scrape: Scrape, tiers: Sequence[str]) -> Iterator[Table]:
    lines = [(tier, "; ".join(losses_of(tier, scrape))) for tier in tiers]
    for tier, losses in lines:
        if losses:
            yield _line(tier, f"since the start {losses}", BAD)
    if not any(losses for _, losses in lines):
        yield _line("trouble", "no block corrupt, failed or late since the start")


def _line(head: str, text: str, style: str = "") -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_column(min_width=NAME_WIDTH, overflow="fold", style=_DIM)
    line.add_column(overflow="fold", style=style)
    line.add_row(Text(_name(head)), Text(text))
    return line


def _name(tier: str) -> str:
    return printable(tier, WIDTH)


def _number(number: float | None) -> str:
    """Format a count, or a rate, in at most five characters."""
    if number is None:
        return UNKNOWN
    if 0 < number < 9.95:
        return f"{number:.1f}".removesuffix(".0")
    if number < 99_999.5:
        return f"{number:.0f}"
    units = iter("kMGT")
    unit = next(units)
    number /= 1000
    while number >= 999.5:
        number, unit = number / 1000, next(units, "T")
    return f"{number:.0f}{unit}" if number >= 99.5 else f"{number:.1f}{unit}"


def _size(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else format_size(round(num_bytes))


def _percent(part: float | None) -> str:
    return UNKNOWN if part is None else f"{part:.0%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length:
            value = seconds / length
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
