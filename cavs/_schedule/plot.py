"""The picture of a schedule: its levels cut into tasks, and one graph of the batch coloured by level."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cavs._graphs.graphs import Graphs

INK, FAINT, PADDING = "#222222", "#8a8a8a", "#d9d9d9"
# Beyond these a mark is too small to see: tasks are not outlined, vertices not named, the graph not drawn.
MAX_OUTLINED_LEVELS = 120
MAX_OUTLINED_TASKS = 60  # in one level
MAX_NAMED_VERTICES = 48
MAX_DRAWN_VERTICES = 20_000


def plot_schedule(sched: Any, path: str | None = None, graphs: Graphs | None = None) -> Figure:
    """Draws a concrete schedule, and the first of `graphs` where given; writes `path` where given, by its suffix.

    Left: the vertices of every level, cut into the tasks that run them; what padding adds, in grey. Right: a graph, each
    vertex at its level, above all its children. One colour a level in both. Returns the figure, which belongs to no
    pyplot state.
    """
    if not sched.is_concrete:
        raise ValueError("Schedule.plot: this schedule is traced; plot it outside jax.jit.")
    levels = len(sched.widths)
    colour = _colours(levels)
    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK}):
        figure = Figure(figsize=(11.0 if graphs is not None and len(graphs) else 6.4, 4.8), layout="constrained", dpi=150)
        if graphs is not None and len(graphs):
            left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
            _draw_graph(right, graphs[0], colour, levels)
        else:
            left = figure.subplots()
        _draw_tasks(left, sched, colour)
        if path is not None:
            figure.savefig(path)
    return figure


def task_table(sched: Any) -> dict[str, np.ndarray]:
    """Per task that runs, the leaves' batches first: its `level`, the vertices it holds (`size`) and is padded to (`width`)."""
    tasks, rounds, shape = int(sched.num_tasks), int(sched.num_rounds), sched.shape
    per_loop = np.diff(np.asarray(sched.round_end)[:rounds].ravel(), prepend=0)
    widths = np.tile([w for w, _ in shape.classes], len(shape.kinds) * rounds)
    leaves = np.array(shape.leaves) > 0
    return {
        "level": np.concatenate([np.zeros(leaves.sum(), int), np.asarray(sched.task_level)[:tasks]]),
        "size": np.concatenate([np.asarray(sched.leaf_count)[leaves], np.asarray(sched.task_size)[:tasks]]),
        "width": np.concatenate([np.array(shape.leaves)[leaves], np.repeat(widths, per_loop).astype(int)]),
    }


def _colours(levels: int) -> Any:
    """Level -> colour; the ends of the map, too dark and too bright to tell apart from ink and paper, are left out."""
    norm = Normalize(0, max(levels - 1, 1))
    return lambda level: matplotlib.colormaps["viridis"](0.08 + 0.8 * norm(np.asarray(level, float)))


# --- the tasks ---


def _draw_tasks(axes: Any, sched: Any, colour: Any) -> None:
    table = task_table(sched)
    widths = np.asarray(sched.widths)
    levels = len(widths)
    padding = np.bincount(table["level"], table["width"] - table["size"], minlength=max(levels, 1))[:levels]
    x = np.arange(levels)
    outlined = levels <= MAX_OUTLINED_LEVELS and np.bincount(table["level"]).max(initial=0) <= MAX_OUTLINED_TASKS
    half = 0.42 if levels <= MAX_OUTLINED_LEVELS else 0.5
    if outlined:
        before = np.cumsum(table["size"]) - table["size"]
        first = np.searchsorted(table["level"], np.arange(levels))  # tasks come level after level
        bottom = before - before[first[table["level"]]] if len(before) else before
        boxes, fill = _boxes(table["level"], bottom, bottom + table["size"], half), colour(table["level"])
    else:
        boxes, fill = _boxes(x, np.zeros(levels), widths, half), colour(x)
    axes.add_collection(
        PolyCollection(boxes, facecolors=fill, edgecolors="white" if outlined else "none", linewidths=0.6 if outlined else 0)
    )
    axes.add_collection(
        PolyCollection(
            _boxes(x, widths, widths + padding, half),
            facecolors=PADDING,
            edgecolors="white" if outlined else "none",
            linewidths=0.6 if outlined else 0,
            label="padding",
        )
    )
    top = max(float((widths + padding).max(initial=0)), 1.0)
    axes.set_xlim(-0.75, max(levels, 1) - 0.25)
    axes.set_ylim(0, top * 1.04)
    axes.set_xticks(_whole_ticks(levels - 1))
    axes.set_yticks(_whole_ticks(top))
    if top > 40:
        # Trees are wide at the leaves and narrow above; on a root scale both can be seen.
        axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        axes.set_yticks(_root_ticks(top))
        axes.set_ylabel("vertices (square-root scale)")
    else:
        axes.set_ylabel("vertices")
    axes.set_xlabel("level (0: the leaves)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    vertices, inner = int(sched.num_vertices), int(sched.num_tasks)
    axes.set_title(
        f"{_count(sched.shape.graphs, 'graph')}, {_count(vertices, 'vertex', 'vertices')} in {_count(levels, 'level')}, "
        f"{_count(inner, 'task')} above the leaves\n"
        f"{'white lines part tasks; ' if outlined else ''}grey is padding, {100 * sched.waste:.0f} % of all rows",
        loc="left",
        fontsize=9,
    )


def _boxes(x: np.ndarray, low: np.ndarray, high: np.ndarray, half: float) -> list[np.ndarray]:
    """n arrays (4, 2): the corners."""
    left, right = x - half, x + half
    corners = ((left, low), (left, high), (right, high), (right, low))
    return list(np.stack([np.stack([a, b], -1) for a, b in corners], 1))


def _whole_ticks(top: float) -> list[float]:
    ticks = MaxNLocator(nbins=9, integer=True, min_n_ticks=1).tick_values(0, max(top, 1))
    return [float(tick) for tick in ticks if 0 <= tick <= top]


def _root_ticks(top: float) -> list[float]:
    """1, 2 and 5 times powers of ten, as far apart as text needs on a root scale."""
    ticks = [0.0]
    for power in range(12):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if value <= top and np.sqrt(value) - np.sqrt(ticks[-1]) >= 0.055 * np.sqrt(top):
                ticks.append(value)
    return ticks


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# --- the graph ---


def _draw_graph(axes: Any, graph: Graphs, colour: Any, levels: int) -> None:
    n, y = graph.num_vertices, graph.height.astype(float)
    depth = int(graph.height.max(initial=0)) + 1
    axes.set_title(
        f"the first graph: {_count(n, 'vertex', 'vertices')}, {_count(graph.num_edges, 'edge')}, {_count(depth, 'level')}",
        loc="left",
        fontsize=9,
    )
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(colors=INK, bottom=False, labelbottom=False)
    if n > MAX_DRAWN_VERTICES:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "too large to draw", ha="center", va="center", color=FAINT, transform=axes.transAxes)
        return
    x = layout(graph)
    owner, child = np.repeat(np.arange(n), np.diff(graph.child_offsets)), graph.children
    corners = [np.stack([x[owner], y[owner]], -1), np.stack([x[child], y[child]], -1)]
    if np.bincount(child, minlength=n).max(initial=0) <= 1:
        # Lines of a tree with corners: across, then down. Between ordered leaves they never cross, slanted ones may.
        corners.insert(1, np.stack([x[child], y[owner]], -1))
    many = n > 200
    axes.add_collection(
        LineCollection(
            list(np.stack(corners, 1)), colors="#b4b4b4", linewidths=0.4 if many else 1.0, alpha=0.5 if many else 1.0, zorder=1
        )
    )
    size = 110 if n <= 25 else 60 if n <= MAX_NAMED_VERTICES else 12 if n <= 400 else 3
    axes.scatter(x, y, s=size, c=colour(graph.height), edgecolors="white" if size > 12 else "none", linewidths=0.8, zorder=2)
    spread, tall = float(np.ptp(x)), max(depth - 1, 1)
    axes.set_xlim(x.min() - 0.05 * spread - 0.7, x.max() + 0.05 * spread + 0.7)
    axes.set_ylim(-0.06 * tall - 0.04, depth - 1 + 0.06 * tall + 0.04)
    axes.set_yticks(_whole_ticks(depth - 1))
    axes.set_ylabel("level")
    if n <= MAX_NAMED_VERTICES:
        _name_vertices(axes, graph, x, y, tall)


def _name_vertices(axes: Any, graph: Graphs, x: np.ndarray, y: np.ndarray, tall: int) -> None:
    """Words (else kinds) below the leaves, turned where they are many; above and to the right of the vertices higher up."""
    leaf = graph.height == 0
    names = [_name(graph, v) for v in range(graph.num_vertices)]
    below = int(leaf.sum()) > 1
    longest = max((len(name) for name, at in zip(names, leaf, strict=True) if at), default=0)
    turned = below and longest * leaf.sum() > 55
    paper = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    for name, at, place in zip(names, leaf, zip(x, y, strict=True), strict=True):
        if name and at and below:
            rotation = 90 if turned else 0
            axes.annotate(name, place, (0, -9), textcoords="offset points", ha="center", va="top", rotation=rotation)
        elif name:
            axes.annotate(name, place, (6, 5), textcoords="offset points", ha="left", va="bottom", fontsize=8, bbox=paper)
    if below:
        axes.set_ylim(bottom=-tall * (0.07 + (0.024 * longest if turned else 0.05)) - 0.05)


def _name(graph: Graphs, v: int) -> str:
    for ids, names in ((graph.input_id, graph.vocab), (graph.kind, graph.kind_names)):
        if ids is not None and ids[v] >= 0 and (names is not None or ids is graph.input_id):
            name = names[ids[v]] if names is not None else str(int(ids[v]))
            # matplotlib reads a pair of dollar signs as mathematics.
            return (name if len(name) <= 16 else name[:15] + "…").replace("$", r"\$")
    return ""


def layout(graph: Graphs) -> np.ndarray:
    """(n,) x of every vertex of ONE graph: leaves in the order in which the roots reach them, the others above the middle
    of their children, at least 1 apart within a level; then a few sweeps that pull vertices towards their neighbours
    (Sugiyama 1981), which for trees change nothing.
    """
    n, height = graph.num_vertices, graph.height
    counts = np.diff(graph.child_offsets)
    owner = np.repeat(np.arange(n), counts)
    parents = np.bincount(graph.children, minlength=n)
    x = np.full(n, -1.0)
    seen, stack, leaves = np.zeros(n, bool), np.flatnonzero(parents == 0)[::-1].tolist(), 0
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if counts[v] == 0:
            x[v], leaves = leaves, leaves + 1
        stack.extend(graph.children[graph.child_offsets[v] : graph.child_offsets[v + 1]][::-1].tolist())
    by_level = np.argsort(height, kind="stable")
    bounds = np.searchsorted(height[by_level], np.arange(int(height.max(initial=0)) + 2))
    rows = [by_level[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    for row in rows[1:]:
        for v in row:
            x[v] = x[graph.children[graph.child_offsets[v] : graph.child_offsets[v + 1]]].mean()
        x[row] = _apart(x[row])
    if parents.max(initial=0) > 1:
        degree = np.maximum(counts + parents, 1)
        for _ in range(12):
            pull = np.bincount(owner, x[graph.children], minlength=n) + np.bincount(graph.children, x[owner], minlength=n)
            x = np.where(counts + parents > 0, pull / degree, x)
            for row in rows:
                x[row] = _apart(x[row])
    return x


def _apart(x: np.ndarray) -> np.ndarray:
    """The nearest places (least squares) in the same order that are at least 1 apart: isotonic regression, by pooling."""
    order = np.argsort(x, kind="stable")
    target = x[order] - np.arange(len(x))
    means: list[float] = []
    sizes: list[int] = []
    for value in target.tolist():
        mean, size = value, 1
        while means and means[-1] >= mean:
            other = sizes.pop()
            mean = (means.pop() * other + mean * size) / (other + size)
            size += other
        means.append(mean)
        sizes.append(size)
    out = np.empty(len(x))
    out[order] = np.repeat(means, sizes) + np.arange(len(x))
    return out
