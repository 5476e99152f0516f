"""The picture of a frontier: what a smaller memory costs."""

import os
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from cavs._remat.bytes import text_of
from cavs._schedule.plot import FAINT, INK, Picture


def plot_frontier(
    points: Sequence[tuple[int, float, str]],
    chosen: tuple[int, float],
    axis: str,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draws plans.

    Args:
        points: predicted bytes, cost and name of each plan, the fastest first.
        chosen: bytes and cost of the plan that was chosen.
        axis: what the cost is.
        path: a file to write.
    """
    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK}):
        figure = Picture(figsize=(6.4, 4.0), layout="constrained", dpi=150)
        axes = figure.subplots()
        axes.plot(
            [b for b, _, _ in points], [c for _, c, _ in points], drawstyle="steps-post", color="#4477aa", marker="o", ms=4
        )
        for size, cost, name in points:
            axes.annotate(name, (size, cost), xytext=(4, 4), textcoords="offset points", fontsize=7, color=FAINT)
        axes.plot(*chosen, "o", ms=9, mfc="none", mec="#cc3311")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: text_of(x))
        axes.set_xlabel("predicted peak of temporary memory")
        axes.set_ylabel(axis)
        if path is not None:
            figure.savefig(path)
    return figure
