"""Chart of a replay: hit rate against capacity, by policy, with the ceiling."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.lru_curve import LRUCurve
from kvxfer.replay.report import Report
from kvxfer.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"lru": "#2a6f97", "arc": "#c8553d"}
COLOUR_CEILING, COLOUR_LIST = "#555555", "#588157"
DASHES = (":", "--", "-.")
NUM_POINTS = 200


def _grid_lines(report: Report, unit: int) -> Iterator[dict[str, Any]]:
    """Make a line for each policy of host memory and list of tiers below it."""
    lists = list(dict.fromkeys(tuple(each.below) for each in report.grid))
    for number, below in enumerate(lists, start=1):
        rows = [each for each in report.grid if tuple(each.below) == below]
        for policy in dict.fromkeys(each.policy for each in rows):
            points = sorted(
                (each.row.tiers[0].num_slots * unit, 100 * each.row.hit_rate)
                for each in rows
                if each.policy == policy
            )
            lower = " over ".join(tier.medium for tier in rows[0].row.tiers[1:])
            yield {
                "points": points,
                "color": COLOURS.get(policy),
                "linestyle": DASHES[number % len(DASHES)],
                "label": f"{policy} over {lower}" + (f" ({number})" if len(lists) > 1 else ""),
            }


def require_picture(path: Path) -> None:
    """Check, before the replay, that a picture can be drawn, and be written under a name.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the suffix.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as exc:
        wanted = "matplotlib to draw it: pip install 'kvxfer[chart]'"
        raise InvalidArgumentError("chart", str(path), wanted) from exc
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        wanted = f"a picture's name; its suffix one of {', '.join(sorted(known))}"
        raise InvalidArgumentError("chart", str(path), wanted)


def draw(report: Report, curve: LRUCurve, path: Path) -> None:
    """Draw hit rate against capacity: LRU as a line, other policies and lists of tiers as points.

    Args:
        report: The report; its rows are the points.
        curve: Hits with LRU at every capacity.
        path: File to write; its suffix determines the format, e.g. `.svg`.

    Raises:
        InvalidArgumentError: matplotlib does not know the suffix.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same rows give the same file.
    mpl.rcParams.update({"svg.hashsalt": "kvxfer", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    trace, per_token = report.trace, report.machine.bytes_per_token
    unit = trace.tokens_per_block * per_token if per_token else 1
    figure, axes = plt.subplots(figsize=(8, 4.2))
    slots = np.unique(np.geomspace(1, max(trace.num_unique, 2), NUM_POINTS).astype(int))
    rates = [100 * curve.hits(int(number)) / trace.num_references for number in slots]
    axes.plot(slots * unit, rates, color=COLOURS["lru"], label="lru")
    for policy in dict.fromkeys(row.policy for row in report.capacities if row.policy != "lru"):
        rows = sorted(
            (row.num_slots * unit, 100 * row.hit_rate)
            for row in report.capacities
            if row.policy == policy
        )
        colour = COLOURS.get(policy)
        axes.plot(*zip(*rows, strict=True), color=colour, marker="o", markersize=4, label=policy)
    for line in _grid_lines(report, unit):
        axes.plot(*zip(*line.pop("points"), strict=True), marker=".", **line)
    axes.axhline(100 * trace.ceiling, color=COLOUR_CEILING, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"ceiling {100 * trace.ceiling:.1f} %",
        (0, 100 * trace.ceiling),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(6, -12),
        color=COLOUR_CEILING,
    )
    lists = [*report.lists]
    if report.recommendation is not None and report.recommendation.row is not None:
        lists.append(report.recommendation.row)
    for row in lists:
        total = unit * sum(tier.num_slots for tier in row.tiers)
        name = " over ".join(tier.medium for tier in row.tiers)
        axes.plot(
            [total],
            [100 * row.hit_rate],
            color=COLOUR_LIST,
            marker="D",
            markersize=7,
            linestyle="none",
            label=f"{name}, {row.tiers[0].policy}",
        )
    _set_axes(axes, left=unit * max(1, slots[-1] / 3000), in_bytes=bool(per_token))
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as exc:
        raise InvalidArgumentError("chart", str(path), f"a picture's name; {exc}") from exc
    finally:
        plt.close(figure)


def _set_axes(axes: "Axes", *, left: float, in_bytes: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlim(left=left)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity" if in_bytes else "capacity in blocks")
    if in_bytes:
        low, high = axes.get_xlim()
        sizes = [4**power for power in range(40) if low <= 4**power <= high]
        axes.set_xticks(sizes, [format_size(size).replace(".0", "") for size in sizes])
        axes.minorticks_off()
    axes.set_ylabel("hits, % of blocks")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
