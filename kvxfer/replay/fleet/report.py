"""Text of a study of a fleet, for a terminal."""

from collections.abc import Sequence

from kvxfer.replay.fleet.study import SOON_S, FleetReport, Spread
from kvxfer.replay.report import align
from kvxfer.units import format_size


def format_fleet(report: FleetReport) -> str:
    """Format a report as text of 80 columns."""
    return "\n\n".join(
        [
            _head(report),
            _holders(report.holders),
            _movement(report),
            _outages(report),
            _etcd(report),
        ]
    )


def _head(report: FleetReport) -> str:
    fleet = report.fleet
    capacity, own = int(fleet["capacity"]), int(fleet["engine_capacity"])
    held = f"{fleet['holders']:,} holders of {format_size(capacity)} ({report.num_slots:,} blocks)"
    lines = [
        ("fleet", f"{held}, {fleet['rack']:,} in a rack"),
        ("", f"{fleet['engines']:,} engines with {format_size(own)} of their own"),
        ("", ", ".join(f"{name} {fleet[name]}" for name in ("groups", "replicas", "routing"))),
        ("hits", f"{_percent(report.hits_own)} of the blocks in engines"),
        (
            "",
            f"{_percent(report.hits_holders)} at holders; {_percent(report.hits_pool)} in one pool",
        ),
        ("", f"of {format_size(capacity * int(fleet['holders']))} in their place"),
    ]
    if report.refused:
        lines.append(("refused", f"{_percent(report.refused)} of what holders are asked: no room"))
        lines.append(("", f"for more than {fleet['max_connections']:,} connections"))
    return "\n".join(f"{name:9}{text}" for name, text in lines)


def _holders(rows: Sequence[Spread]) -> str:
    table = [["of a holder", "mean", "p99", "most", "most/mean"]]
    for row in rows:
        is_size = row.name.startswith("bytes")
        cells = [
            format_size(int(value)) if is_size else _number(value)
            for value in (row.mean, row.p99, row.largest)
        ]
        table.append([row.name, *cells, f"{row.largest / row.mean:.2f}" if row.mean else "-"])
    return "\n".join(align(table))


def _movement(report: FleetReport) -> str:
    table = [["when", "moves", "has to", "needless"]]
    table += [
        [row.event, *(_percent(share, 3) for share in (row.moved, row.least, row.needless))]
        for row in report.movement
    ]
    lines = ["Copies of blocks that belong to another holder", *align(table)]
    if report.both_in_rack is not None:
        share = _percent(report.both_in_rack, 2)
        lines.append(f"Placement knows no racks: {share} of the blocks have all copies in one")
    return "\n".join(lines)


def _outages(report: FleetReport) -> str:
    table = [["a rack fails", f"hits in {SOON_S:g} s", "later", "requests that wait"]]
    table += [
        [row.event, _percent(row.hits_soon), _percent(row.hits_later), _percent(row.late)]
        for row in report.outages
    ]
    return "\n".join(align(table))


def _etcd(report: FleetReport) -> str:
    etcd = report.etcd
    table = [
        ["etcd", "load"],
        ["renewals of leases in a second, each with a read", _number(etcd.renewals_per_s)],
        ["questions in a second whether watches live", _number(etcd.questions_per_s)],
        ["watches", f"{etcd.watches:,}"],
        ["events when a holder comes or goes", f"{etcd.events_of_a_join:,}"],
        ["events when a rack fails", f"{etcd.events_of_a_rack:,}"],
        ["entries that all engines read at their start", f"{etcd.entries_of_a_start:,}"],
    ]
    return "\n".join(align(table))


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
