"""Chart of a benchmark's rows, for `make bench NAME=--chart`."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import BenchRow

COLOUR_MET, COLOUR_MISSED, COLOUR_FREE = "#2a6f97", "#c8553d", "#8d99ae"
INCHES_PER_ROW = 0.32


def draw(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw the ratios as bars, with their spread, a line at 1 and a mark at each goal.

    Args:
        rows: The rows, from the top down.
        path: File to write; its suffix determines the format, e.g. `.svg`.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same rows give the same file.
    mpl.rcParams.update({"svg.hashsalt": "kvxfer", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + INCHES_PER_ROW * len(rows)))
    for place, row in enumerate(reversed(rows)):
        met = COLOUR_MET if row.meets_goal else COLOUR_MISSED
        colour = met if row.goal else COLOUR_FREE
        axes.barh(place, row.ratio, xerr=row.spread, color=colour, ecolor="#555555", height=0.7)
        if row.goal:
            limit = float(row.goal.split()[1])
            axes.plot([limit, limit], [place - 0.42, place + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [row.case for row in reversed(rows)], fontsize=8)
    axes.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_xlabel("ratio to the baseline of the same run; black: goal")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
