"""The picture of a schedule: its levels cut into tasks, and the graphs of the batch coloured by level."""

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cavs._graphs.counted import counted
from cavs._graphs.draw import layout_of_batch, name_of
from cavs._graphs.files import check_path, replacing
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._schedule.schedule import task_table

if TYPE_CHECKING:
    from cavs._schedule.schedule import Schedule

Colours: TypeAlias = Callable[[np.ndarray], np.ndarray]  # (n,) levels -> (n, 4) RGBA

INK, FAINT, PADDING = "#222222", "#8a8a8a", "#d9d9d9"
# Above these limits a mark would be too small to see: tasks are not outlined, and vertices and graphs are not drawn or named.
MAX_OUTLINED_LEVELS = 120
MAX_BARS = 2000  # a bar stands for several levels if there are more
MAX_OUTLINED_TASKS = 60  # in one level
MAX_NAMED_VERTICES = 48
MAX_DRAWN_VERTICES = 20_000  # of one graph
MAX_BATCH_VERTICES = 600  # of graphs side by side


class Picture(Figure):
    """A figure that a notebook shows as an image, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def plot_schedule(sched: "Schedule", path: str | os.PathLike[str] | None = None, graphs: Graphs | None = None) -> Figure:
    """Draws a schedule and, if they are given, its graphs. `Schedule.plot` documents the arguments.

    On the left are the vertices of every level, divided into the tasks that run them; padding is grey. On the right are the
    graphs, each vertex at its level, above all its children. Both sides have the same colour for a level. The figure does not
    belong to pyplot.
    """
    if not sched.is_concrete:
        raise ValueError("Schedule.plot: this schedule is traced; plot it outside jax.jit.")
    if path is not None:
        check_path("Schedule.plot", path, "Write sched.plot(path, graphs).")
    if graphs is not None:
        check_graphs(graphs, "sched.plot(path, graphs)")
    levels, vertices = len(sched.widths), int(sched.host().num_vertices)
    if not levels:
        raise ValueError("Schedule.plot: got the schedule of no graphs; expected at least one.")
    if graphs is not None and graphs.num_vertices != vertices:
        got = f"got graphs of {counted(graphs.num_vertices, 'vertex')}"
        raise ValueError(f"Schedule.plot: graphs: {got}; expected those of the batch, of {counted(vertices, 'vertex')}.")
    colour = _colours(levels)
    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK}):
        figure = Picture(figsize=(11.0 if graphs is not None and len(graphs) else 6.4, 4.8), layout="constrained", dpi=150)
        if graphs is not None and len(graphs):
            left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
            _draw_graphs(right, graphs, colour)
        else:
            left = figure.subplots()
        _draw_tasks(left, sched, colour)
        if path is not None:
            with replacing(path) as temporary:
                figure.savefig(temporary, format=os.path.splitext(path)[1][1:].lower())
    return figure


def _colours(levels: int) -> Colours:
    """Returns the colours of levels. The ends of the colour map are not used: they look like ink and paper."""
    norm = Normalize(0, max(levels - 1, 1))
    return lambda level: matplotlib.colormaps["viridis"](0.08 + 0.8 * norm(np.asarray(level, float)))


# --- the tasks ---


def _draw_tasks(axes: Axes, sched: "Schedule", colour: Colours) -> None:
    """Draws a bar for every level, divided into tasks; above `MAX_BARS`, one for the largest of a few levels."""
    table = task_table(sched)
    widths = np.asarray(sched.widths)
    levels = len(widths)
    padding = np.bincount(table["level"], table["width"] - table["size"], minlength=max(levels, 1))[:levels]
    step = -(-levels // MAX_BARS)
    x = np.arange(0, levels, step)
    widths, rows = (np.maximum.reduceat(n, x) for n in (widths, widths + padding))
    x = x + (step - 1) / 2
    outlined = levels <= MAX_OUTLINED_LEVELS and np.bincount(table["level"]).max(initial=0) <= MAX_OUTLINED_TASKS
    half = 0.42 if levels <= MAX_OUTLINED_LEVELS else step / 2
    drawn = x, np.zeros(len(x)), widths
    if outlined:
        before = np.cumsum(table["size"]) - table["size"]
        first = np.searchsorted(table["level"], np.arange(levels))  # tasks are sorted by level
        bottom = before - before[first[table["level"]]] if len(before) else before
        drawn = table["level"], bottom, bottom + table["size"]
    edges = {"edgecolors": "white", "linewidths": 0.6} if outlined else {"edgecolors": "none", "linewidths": 0}
    for boxes, fill in ((drawn, colour(drawn[0])), ((x, widths, rows), PADDING)):
        axes.add_collection(PolyCollection(_boxes(*boxes, half), facecolors=fill, **edges))
    top = max(float(rows.max(initial=0)), 1.0)
    axes.set_xlim(-0.75, max(levels, 1) - 0.25)
    axes.set_ylim(0, top * 1.04)
    axes.set_xticks(_whole_ticks(levels - 1))
    axes.set_yticks(_whole_ticks(top))
    if top > 40:
        # Trees have many leaves and few vertices above them; a square-root scale shows both.
        axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        axes.set_yticks(_root_ticks(top))
        axes.set_ylabel("vertices (square-root scale)")
    else:
        axes.set_ylabel("vertices")
    axes.set_xlabel("level (0: the leaves)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    bars = "white lines separate tasks; " if outlined else f"a bar is the widest of {step} levels; " * (step > 1)
    vertices, inner = int(sched.num_vertices), int(sched.num_tasks)
    axes.set_title(
        f"{counted(f'{sched.shape.graphs:,}', 'graph')}, {counted(f'{vertices:,}', 'vertex')} in "
        f"{counted(f'{levels:,}', 'level')}, {counted(f'{inner:,}', 'task')} above the leaves\n"
        f"{bars}grey is padding, {100 * sched.waste:.0f} % of all rows",
        loc="left",
        fontsize=9,
    )


def _boxes(x: np.ndarray, low: np.ndarray, high: np.ndarray, half: float) -> list[np.ndarray]:
    """Returns the corners of n boxes, each (4, 2)."""
    left, right = x - half, x + half
    corners = ((left, low), (left, high), (right, high), (right, low))
    return list(np.stack([np.stack([a, b], -1) for a, b in corners], 1))


def _whole_ticks(top: float) -> list[float]:
    """Returns whole numbers from 0 to `top`."""
    ticks = MaxNLocator(nbins=9, integer=True, min_n_ticks=1).tick_values(0, max(top, 1))
    return [float(tick) for tick in ticks if 0 <= tick <= top]


def _root_ticks(top: float) -> list[float]:
    """Returns 0 and numbers 1, 2 and 5 times powers of ten, with room for their text on a square-root scale."""
    ticks = [0.0]
    for power in range(12):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if value <= top and np.sqrt(value) - np.sqrt(ticks[-1]) >= 0.055 * np.sqrt(top):
                ticks.append(value)
    return ticks


# --- the graphs ---


def _draw_graphs(axes: Axes, graphs: Graphs, colour: Colours) -> None:
    """Draws the graphs of a batch side by side. If they have more than `MAX_BATCH_VERTICES`, it draws only the first ones."""
    shown = max(1, int(np.searchsorted(graphs.vertex_offsets, MAX_BATCH_VERTICES, side="right")) - 1)
    graph = graphs[:shown] if shown < len(graphs) else graphs
    n, y = graph.num_vertices, graph.height.astype(float)
    depth = int(graph.height.max()) + 1
    size = f"{counted(f'{n:,}', 'vertex')}, {counted(f'{graph.num_edges:,}', 'edge')}, {counted(depth, 'level')}"
    if shown < len(graphs):
        drawn = "the first graph" if shown == 1 else f"the first {shown} graphs"
        title = (
            f"only {drawn} of {len(graphs):,}, as more than {MAX_BATCH_VERTICES} vertices\nare not drawn side by side: {size}"
        )
    else:
        title = f"{'the graph' if shown == 1 else f'all {shown} graphs'}: {size}"
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(colors=INK, bottom=False, labelbottom=False)
    if n > MAX_DRAWN_VERTICES:
        axes.set_axis_off()
        text = f"too large to draw:\nthe graph has more than {MAX_DRAWN_VERTICES:,} vertices"
        axes.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=axes.transAxes)
        return
    x = layout_of_batch(graph)
    _draw_edges(axes, graph, x, y)
    size_of_mark = 110 if n <= 25 else 60 if n <= MAX_NAMED_VERTICES else 12 if n <= 400 else 3
    edge = "white" if size_of_mark > 12 else "none"
    axes.scatter(x, y, s=size_of_mark, c=colour(graph.height), edgecolors=edge, linewidths=0.8, zorder=2)
    spread, tall = float(np.ptp(x)), max(depth - 1, 1)
    axes.set_xlim(x.min() - 0.05 * spread - 0.7, x.max() + 0.05 * spread + 0.7)
    axes.set_ylim(-0.06 * tall - 0.04, depth - 1 + 0.06 * tall + 0.04)
    axes.set_yticks(_whole_ticks(depth - 1))
    axes.set_ylabel("level")
    if n <= MAX_NAMED_VERTICES:
        _name_vertices(axes, graph, x, y, tall)


def _draw_edges(axes: Axes, graph: Graphs, x: np.ndarray, y: np.ndarray) -> None:
    """Draws a line from every vertex to each of its children."""
    n, (owner, child) = graph.num_vertices, graph._edges
    corners = [np.stack([x[owner], y[owner]], -1), np.stack([x[child], y[child]], -1)]
    if np.bincount(child, minlength=n).max(initial=0) <= 1:
        # In trees, lines go across and then down. Such lines do not cross, because leaves are in order; slanted ones may.
        corners.insert(1, np.stack([x[child], y[owner]], -1))
    many = n > 200
    axes.add_collection(
        LineCollection(
            list(np.stack(corners, 1)), colors="#b4b4b4", linewidths=0.4 if many else 1.0, alpha=0.5 if many else 1.0, zorder=1
        )
    )


def _name_vertices(axes: Axes, graph: Graphs, x: np.ndarray, y: np.ndarray, tall: int) -> None:
    """Writes the word of each vertex, or else its kind: below leaves, turned if there are many, and beside other vertices."""
    leaf = graph.height == 0
    # matplotlib would render text between dollar signs as mathematics.
    names = [name_of(graph, v).replace("$", r"\$") for v in range(graph.num_vertices)]
    below = int(leaf.sum()) > 1
    longest = max((len(name) for name, is_leaf in zip(names, leaf, strict=True) if is_leaf), default=0)
    turned = below and longest * leaf.sum() > 55
    paper = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    for name, is_leaf, place in zip(names, leaf, zip(x, y, strict=True), strict=True):
        if name and is_leaf and below:
            rotation = 90 if turned else 0
            axes.annotate(name, place, (0, -9), textcoords="offset points", ha="center", va="top", rotation=rotation)
        elif name:
            axes.annotate(name, place, (6, 5), textcoords="offset points", ha="left", va="bottom", fontsize=8, bbox=paper)
    if below:
        axes.set_ylim(bottom=-tall * (0.07 + (0.024 * longest if turned else 0.05)) - 0.05)
