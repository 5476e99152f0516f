"""Draws the pictures of docs/how: `python docs/images/diagrams.py` writes them beside this file, as SVG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

FOLDER = Path(__file__).parent
LEVELS = ["#9ecae1", "#a1d99b", "#fdae6b", "#bcbddc"]
GREY, DARK = "#dddddd", "#333333"
plt.rcParams |= {"svg.hashsalt": "cavs", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}

Point = tuple[float, float]
ORIGIN: Point = (0, 0)


def picture(width: float, height: float) -> Axes:
    """Axes without a frame, in units of about an inch."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return axes


def save(axes: Axes, name: str) -> None:
    """Writes the picture; the same bytes every time."""
    axes.figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close("all")


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str = "", color: str = "white", size: float = 11) -> None:
    """A rectangle with text in its middle."""
    axes.add_patch(plt.Rectangle((x, y), w, h, facecolor=color, edgecolor=DARK, linewidth=1))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size)


def arrow(
    axes: Axes, begin: Point, end: Point, text: str = "", color: str = DARK, bend: float = 0, shift: Point = ORIGIN
) -> None:
    """An arrow, with text beside its middle."""
    style = {"arrowstyle": "-|>", "color": color, "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=style)
    if text:
        axes.text((begin[0] + end[0]) / 2 + shift[0], (begin[1] + end[1]) / 2 + shift[1], text, ha="center", va="center")


def tree(axes: Axes, places: Sequence[Point], parents: Sequence[int], heights: Sequence[int], first: int) -> None:
    """A tree whose vertices are coloured by level and numbered from `first`."""
    for place, parent in zip(places, parents, strict=True):
        if parent >= 0:
            axes.plot(*zip(place, places[parent], strict=True), color=DARK, zorder=1, linewidth=1)
    for n, (place, height) in enumerate(zip(places, heights, strict=True)):
        axes.add_patch(plt.Circle(place, 0.2, facecolor=LEVELS[height], edgecolor=DARK, zorder=2))
        axes.text(*place, str(first + n), ha="center", va="center", fontsize=10, zorder=3)


def vertex() -> None:
    """The four operations of a vertex function."""
    axes = picture(6.6, 3)
    box(axes, 2.4, 1.1, 1.8, 0.8, "F(params, v)", LEVELS[0])
    arrow(axes, (2.9, 0.2), (2.9, 1.1), "gather(0)", shift=(-0.6, -0.1))
    arrow(axes, (3.7, 0.2), (3.7, 1.1), "gather(1)", shift=(0.6, -0.1))
    arrow(axes, (3.3, 1.9), (3.3, 2.8), "scatter", shift=(0.5, 0))
    arrow(axes, (0.9, 1.5), (2.4, 1.5), "pull", shift=(0, 0.17))
    arrow(axes, (4.2, 1.5), (5.7, 1.5), "push", shift=(0, 0.17))
    for x, y, text in ((0.45, 1.5, "inputs"), (6.15, 1.5, "outputs"), (2.75, 0.05, "child 0"), (3.85, 0.05, "child 1")):
        axes.text(x, y, text, ha="center", va="center", style="italic")
    axes.text(3.3, 2.92, "parents", ha="center", va="center", style="italic")
    save(axes, "vertex")


def schedule() -> None:
    """Two trees, their levels, and the tasks of the batch."""
    axes = picture(8.2, 3.4)
    tree(axes, [(0.5, 0.8), (1.1, 0.8), (0.8, 1.6), (1.7, 0.8), (1.25, 2.4)], [2, 2, 4, 4, -1], [0, 0, 1, 0, 2], 0)
    tree(axes, [(2.4, 0.8), (3.0, 0.8), (2.7, 1.6)], [2, 2, -1], [0, 0, 1], 5)
    axes.text(1.1, 0.25, "graph 0", ha="center")
    axes.text(2.7, 0.25, "graph 1", ha="center")
    for level, (y, rows, pad) in enumerate(((0.6, (0, 1, 3, 5, 6), 1), (1.4, (2, 7), 0), (2.2, (4,), 1))):
        axes.text(4.1, y + 0.2, f"level {level}", ha="right", va="center")
        for i, row in enumerate(rows):
            box(axes, 4.3 + 0.5 * i, y, 0.5, 0.4, str(row), LEVELS[level], 10)
        for i in range(len(rows), len(rows) + pad):
            box(axes, 4.3 + 0.5 * i, y, 0.5, 0.4, "", GREY)
    axes.text(7.8, 0.8, "leaves:\none batch", ha="center", va="center", fontsize=10)
    axes.text(6.3, 1.6, "task of width 2", va="center", fontsize=10)
    axes.text(6.3, 2.4, "task of width 2, one row of padding", ha="left", va="center", fontsize=10)
    axes.set_xlim(0, 9.2)
    save(axes, "schedule")


def split() -> None:
    """Eager before, recurrent within, lazy after the levels."""
    axes = picture(8.6, 2.3)
    box(axes, 0.1, 0.6, 1.7, 1.0, "eager\none batch,\nall vertices", LEVELS[1], 10)
    for i, height in enumerate((1.0, 0.7, 0.5, 0.35)):
        box(axes, 2.3 + 0.85 * i, 1.1 - height / 2, 0.6, height, str(i + 1), LEVELS[0], 10)
        if i:
            arrow(axes, (2.05 + 0.85 * i, 1.1), (2.3 + 0.85 * i, 1.1))
    arrow(axes, (1.8, 1.1), (2.3, 1.1))
    arrow(axes, (5.45, 1.1), (5.95, 1.1))
    axes.text(3.9, 0.3, "recurrent, level by level", ha="center", fontsize=10)
    box(axes, 5.95, 0.6, 1.7, 1.0, "lazy\none batch,\nall vertices", LEVELS[2], 10)
    axes.text(0.95, 1.85, "pull, W x", ha="center", style="italic")
    axes.text(3.9, 1.85, "gather ... scatter", ha="center", style="italic")
    axes.text(6.8, 1.85, "push, parameter gradients", ha="center", style="italic")
    save(axes, "split")


def tensors() -> None:
    """A dynamic tensor, sorted by level; a task gathers rows and writes a contiguous window."""
    axes = picture(8.2, 2.2)
    order = [(0, 0), (1, 0), (3, 0), (5, 0), (6, 0), (2, 1), (7, 1), (4, 2)]
    box(axes, 0.3, 0.9, 0.6, 0.5, "zeros", GREY, 9)
    for i, (row, level) in enumerate(order):
        box(axes, 0.9 + 0.7 * i, 0.9, 0.7, 0.5, str(row), LEVELS[level])
    box(axes, 6.5, 0.9, 0.7, 0.5, "slack", GREY, 9)
    centre = {row: 1.25 + 0.7 * i for i, (row, _) in enumerate(order)}
    for child, parent in ((0, 2), (1, 2), (5, 7), (6, 7)):
        arrow(axes, (centre[child], 1.4), (centre[parent], 1.4), bend=-0.35)
    axes.plot([4.4, 4.4, 5.8, 5.8], [0.85, 0.7, 0.7, 0.85], color=DARK)
    axes.text(5.1, 0.45, "window of the task of level 1:\noffset 5, batch size 2", ha="center", va="center", fontsize=10)
    axes.text(3, 0.45, "rows sorted by level", ha="center", va="center", style="italic")
    axes.set_ylim(0.1, 2.3)
    save(axes, "tensors")


def derivative() -> None:
    """Forward and backward at one vertex: each arrow turns round."""
    axes = picture(8.4, 3.1)
    for x, name, colour, forth in ((0.6, "F", LEVELS[0], True), (4.8, "transpose of F", LEVELS[3], False)):
        box(axes, x + 0.8, 1.15, 1.5, 0.7, name, colour, 10)
        turn = (lambda a, b: (a, b)) if forth else (lambda a, b: (b, a))
        arrow(axes, *turn((x + 1.55, 0.3), (x + 1.55, 1.15)), "gather" if forth else "add to the\nchildren", shift=(0.6, -0.05))
        arrow(axes, *turn((x + 1.55, 1.85), (x + 1.55, 2.7)), "scatter" if forth else "from the\nparents", shift=(0.6, 0.05))
        arrow(axes, *turn((x, 1.5), (x + 0.8, 1.5)), "pull" if forth else "dx", shift=(-0.05, 0.2))
        arrow(axes, *turn((x + 2.3, 1.5), (x + 3.1, 1.5)), "push" if forth else "dy", shift=(0.05, 0.2))
    axes.text(2.15, 0.08, "forward: children first", ha="center", style="italic")
    axes.text(6.35, 0.08, "backward: parents first", ha="center", style="italic")
    save(axes, "derivative")


def persistent() -> None:
    """Groups of thread blocks that keep the weights, over the levels of their own graphs."""
    axes = picture(8.4, 3)
    for group in range(2):
        y = 1.65 - 1.5 * group
        axes.text(0.1, y + 0.6, f"group {group}\nits graphs", va="center", fontsize=10)
        for block in range(2):
            box(axes, 1.3, y + 0.62 * block, 1.9, 0.55, f"block {1 - block}: weights\nof half the units", GREY, 8.5)
        for level in range(4):
            x, rows = 3.7 + 1.1 * level, 4 - level
            for block in range(2):
                box(axes, x, y + 0.62 * block, 0.2 * rows, 0.55, "", LEVELS[level])
            if level:
                arrow(axes, (x - 0.9 + 0.2 * rows, y + 0.3), (x, y + 0.9))
                arrow(axes, (x - 0.9 + 0.2 * rows, y + 0.9), (x, y + 0.3))
    for level in range(4):
        axes.text(3.7 + 1.1 * level, 2.95, f"level {level + 1}", fontsize=10, va="center")
    axes.set_ylim(0, 3.1)
    save(axes, "persistent")


def story() -> None:
    """One batch on its way through the system: forward to the right, backward to the left."""
    axes = picture(10.6, 4.7)
    for y, text in ((4.05, "once"), (2.45, "forward"), (0.85, "backward")):
        axes.text(0, y, text, va="center", style="italic")
    box(axes, 1.2, 3.65, 1.6, 0.8, "F(params, v)\nfor one vertex", size=10)
    box(axes, 3.4, 3.65, 1.6, 0.8, "equations\n(a jaxpr)", size=10)
    box(axes, 6.1, 3.65, 1.2, 0.8, "eager", LEVELS[1], 10)
    box(axes, 7.3, 3.65, 1.2, 0.8, "recurrent", LEVELS[0], 10)
    box(axes, 8.5, 3.65, 1.2, 0.8, "lazy", LEVELS[2], 10)
    arrow(axes, (2.8, 4.05), (3.4, 4.05), "trace", shift=(0, 0.17))
    arrow(axes, (5.0, 4.05), (6.1, 4.05), "split", shift=(0, 0.17))
    box(axes, 1.2, 2.05, 1.3, 0.8, "graphs\n(integers)", size=10)
    box(axes, 3.0, 2.05, 1.3, 0.8, "schedule\n(levels)", size=10)
    arrow(axes, (2.5, 2.45), (3.0, 2.45))
    arrow(axes, (4.3, 2.45), (4.8, 2.45))
    forward, backward = ("eager,\none batch", "lazy,\none batch"), ("gradients\nof inputs", "gradients\nof pushes")
    for y, names in ((2.05, forward), (0.45, backward)):
        forth = y > 1
        box(axes, 4.8, y, 1.2, 0.8, names[0], LEVELS[1] if forth else "white", 10)
        box(axes, 8.75, y, 0.95, 0.8, names[1], LEVELS[2] if forth else "white", 10)
        for i, height in enumerate((0.95, 0.7, 0.5)):
            x = 6.4 + 0.72 * i
            box(axes, x, y + 0.4 - height / 2, 0.5, height, str(i + 1), LEVELS[0], 10)
            if i:
                ends = (x - 0.22, y + 0.4), (x, y + 0.4)
                arrow(axes, *(ends if forth else ends[::-1]))
        for begin, end in (((6.0, y + 0.4), (6.4, y + 0.4)), ((8.34, y + 0.4), (8.75, y + 0.4))):
            arrow(axes, *((begin, end) if forth else (end, begin)))
    arrow(axes, (9.7, 2.45), (10.15, 2.45))
    axes.text(10.2, 2.45, "loss", va="center", fontsize=10)
    arrow(axes, (10.35, 2.25), (9.7, 0.95), bend=-0.3)
    axes.text(7.4, 3.2, "an engine runs the levels", ha="center", fontsize=10)
    arrow(axes, (7.4, 1.9), (7.4, 1.4), "kept values", shift=(0.6, 0))
    box(axes, 1.2, 0.45, 3.1, 0.8, "lazy gradients: one product\n$A^T dY$ for each weight", LEVELS[2], 10)
    arrow(axes, (7.35, 0.38), (2.75, 0.38), bend=-0.13)
    axes.text(5.4, -0.12, "cut cotangents of all levels", ha="center", fontsize=10)
    axes.set_ylim(-0.3, 4.6)
    save(axes, "story")


if __name__ == "__main__":
    for draw in (story, vertex, schedule, split, tensors, derivative, persistent):
        draw()
