"""Pictures as SVG text, without another package: graphs with words, labels and predictions, and the bars of a schedule."""

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cavs._graphs.checks import array_of
from cavs._graphs.counted import counted
from cavs._graphs.files import check_path, write_whole
from cavs._graphs.graphs import Graphs, check_graphs

INK, FAINT, WRONG, PADDING = "#222222", "#b4b4b4", "#c62828", "#d9d9d9"
LEVELS = np.array([[72, 26, 108], [57, 86, 140], [31, 150, 139], [85, 198, 103], [173, 220, 48]])  # RGB, leaves first
MOST = 400  # vertices of a picture: more would be too small to read
ROW, COLUMN, LETTER, MARGIN = 44, 30, 6.5, 24  # pixels: between levels, between vertices, of a letter, around the picture
LONGEST = 16  # letters of a text beside a vertex


class Drawing(str):
    """The text of an SVG picture. A notebook shows the picture."""

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Drawing({len(self):,} characters of SVG)"


def draw(
    graphs: Graphs,
    path: str | os.PathLike[str] | None = None,
    *,
    predictions: ArrayLike | Sequence[object] | None = None,
    text: Sequence[str] | None = None,
) -> Drawing:
    """Draws graphs as SVG: each vertex at its level, above its children, with its word, its label and a prediction.

    ```python
    cavs.debug.draw(graphs[:2], "trees.svg", predictions=logits.argmax(-1))
    ```

    A prediction that differs from the label is red, with the label in brackets. Colours are levels. Graphs of more than 400
    vertices in all are drawn up to the last one that fits; [`cavs.Schedule.plot`][] draws larger ones.

    Args:
        graphs: the graphs, drawn side by side.
        path: a file to write, which ends in `.svg` and appears when it is complete; `None` writes none.
        predictions: (V,) one for each vertex: indices of `label_names` like `graphs.label`, other numbers, or texts.
        text: str[V] for the vertices. `None`: their words, or else their kinds.

    Returns:
        The text of the picture, a `str` that a notebook shows.

    Raises:
        TypeError: `graphs` are no graphs.
        ValueError: the first graph has more than 400 vertices, there are no graphs, `path` has another suffix, or
            `predictions` or `text` do not have one entry per vertex.
    """
    check_graphs(graphs, "draw(graphs[:2])")
    if path is not None:
        check_path("draw", path, "Write draw(graphs[:2], path).")
    if path is not None and Path(path).suffix.lower() != ".svg":
        raise ValueError(f"draw: path: got {os.fspath(path)}; expected a name that ends in .svg.")
    for name, values in (("predictions", predictions), ("text", text)):
        if values is not None and (shape := array_of(f"draw: {name}", values).shape) != (graphs.num_vertices,):
            got = repr(values) if isinstance(values, str) else f"shape {shape}"
            raise ValueError(f"draw: {name}: got {got}; expected {graphs.num_vertices} entries, one per vertex.")
    shown = int(np.searchsorted(graphs.vertex_offsets, MOST, side="right")) - 1
    if not shown:
        got = f"a first graph of {graphs.vertex_offsets[1]:,} vertices" if len(graphs) else "no graphs"
        raise ValueError(
            f"draw: graphs: got {got}; expected graphs of at most {MOST}. Write cavs.schedule(graphs).plot(path, graphs)."
        )
    note = "" if shown == len(graphs) else f"the first {shown} of {len(graphs):,} graphs"
    drawing = _picture(graphs[:shown], None if predictions is None else np.asarray(predictions), text, note)
    if path is not None:
        write_whole(path, drawing.encode())
    return drawing


def as_html(graphs: Graphs) -> str:
    """Returns what a notebook shows of graphs: their sizes, and a picture of the first one if it is small."""
    first = draw(graphs[0]) if len(graphs) and graphs[0].num_vertices <= MOST // 4 else ""
    return f"<div><code>{html.escape(repr(graphs))}</code><br>{first}</div>"


def bars(sizes: Iterable[int], padding: Iterable[int]) -> Drawing:
    """Draws a bar for each level: its vertices, and grey above them its padding.

    `sizes`: (levels,) vertices of each level, leaves first. `padding`: (levels,) rows of padding.
    """
    rows = [*zip(sizes, padding, strict=True)]
    top, height, step = max((a + b for a, b in rows), default=1) or 1, 120.0, 24
    groups = []
    for level, (colour, (size, padded)) in enumerate(zip(_colours(np.arange(len(rows))), rows, strict=True)):
        x, bottom, boxes = MARGIN + step * level, MARGIN + height, ""
        for fill, tall in ((colour, height * size / top), (PADDING, height * padded / top)):
            bottom -= tall
            boxes += f'<rect x="{x}" y="{bottom:.1f}" width="20" height="{tall:.1f}" fill="{fill}"/>'
        tip = f"<title>level {level}: {counted(size, 'vertex')}, {counted(padded, 'row')} of padding</title>"
        groups.append(f"<g>{tip}{boxes}{_text(x + 10, MARGIN + height + 14, str(level), 'middle')}</g>")
    return _svg(2 * MARGIN + step * len(rows), height + 2 * MARGIN, groups)


def _picture(graphs: Graphs, predictions: np.ndarray | None, text: Sequence[str] | None, note: str) -> Drawing:
    """Draws all of these graphs; `predictions` and `text` may have further entries."""
    n, height, top_level = graphs.num_vertices, graphs.height, int(graphs.height.max(initial=0))
    names = [_short(text[v]) if text is not None else name_of(graphs, v) for v in range(n)]
    marks = [_mark(graphs, predictions, v) for v in range(n)]
    leaf, lengths = height == 0, np.array([len(name) for name in names])
    beside = lengths * ~leaf + [len(mark) + 1 for mark, _ in marks]
    x = layout_of_batch(graphs)
    column = max(COLUMN, LETTER * lengths[leaf].max(initial=0) + 8, LETTER * beside.max(initial=0) + 10)
    x = MARGIN + (x - x.min(initial=0)) * column
    y = MARGIN + ROW * (top_level - height)
    owner, child = graphs._edges
    is_tree = np.bincount(child, minlength=n).max(initial=0) <= 1  # whose lines go across and then down, and do not cross
    elements = []
    for a, b in zip(owner.tolist(), child.tolist(), strict=True):
        to = f"H{x[b]:.1f}V{y[b]}" if is_tree else f"L{x[b]:.1f} {y[b]}"
        elements.append(f'<path d="M{x[a]:.1f} {y[a]}{to}" fill="none" stroke="{FAINT}"/>')
    graph, colours = np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets)), _colours(height)
    for v, (mark, wrong) in enumerate(marks):
        tip = f"<title>graph {graph[v]}, vertex {v - graphs.vertex_offsets[graph[v]]}, level {height[v]}</title>"
        texts = [_text(x[v], y[v] + 20, names[v], "middle")] if leaf[v] else []
        side = mark if leaf[v] else " ".join(filter(None, (names[v], mark)))
        texts.append(_text(x[v] + 8, y[v] - 6, side, "start", WRONG if wrong else INK))
        ring = f' stroke="{WRONG}" stroke-width="2"' if wrong else ""
        elements.append(f'<g>{tip}<circle cx="{x[v]:.1f}" cy="{y[v]}" r="6" fill="{colours[v]}"{ring}/>{"".join(texts)}</g>')
    bottom = 2 * MARGIN + ROW * top_level + 8
    elements += [_text(MARGIN, bottom + 8, note, "start")] if note else []
    right = max(x.max(initial=0) + MARGIN + LETTER * (beside.max(initial=0) + 1), LETTER * len(note) + 2 * MARGIN)
    return _svg(right, bottom + (20 if note else 0), elements)


def name_of(graphs: Graphs, v: int) -> str:
    """Returns the word of a vertex, or else its kind, or else nothing."""
    for ids, names in ((graphs.input_id, graphs.vocab), (graphs.kind, graphs.kind_names)):
        if ids is not None and ids[v] >= 0:
            return _short(names[ids[v]] if names is not None else ids[v])
    return ""


def _mark(graphs: Graphs, predictions: np.ndarray | None, v: int) -> tuple[str, bool]:
    """Returns the text of a vertex's label and prediction, and whether they differ."""
    names = graphs.label_names
    label = "" if graphs.label is None else _value(graphs.label[v], names)
    if predictions is None:
        return label, False
    guess = _value(predictions[v], names)
    exact = bool(label) and predictions.dtype.kind != "f"  # numbers of a regression always differ a little
    wrong = exact and guess != label
    return f"{guess} ({label})" if wrong or label and not exact else guess, wrong


def _value(value: Any, names: tuple[str, ...] | None) -> str:
    """Returns the text of a label or a prediction: a name, a number, or "" for none."""
    if np.ndim(value):
        return ""
    if isinstance(value, np.integer):
        return "" if value < 0 else _short(names[value] if names is not None and value < len(names) else value)
    if isinstance(value, np.floating):
        return "" if np.isnan(value) else f"{value:.3g}"
    return _short(value)


def _short(text: object) -> str:
    """Returns a text of at most `LONGEST` letters, without characters that SVG does not allow."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in str(text))
    return printable if len(printable) <= LONGEST else printable[: LONGEST - 1] + "…"


def _colours(levels: np.ndarray) -> list[str]:
    place = levels / max(int(levels.max(initial=0)), 1) * (len(LEVELS) - 1)
    rgb = np.stack([np.interp(place, np.arange(len(LEVELS)), channel) for channel in LEVELS.T], -1).astype(int)
    return ["#{:02x}{:02x}{:02x}".format(*colour) for colour in rgb.tolist()]


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    """Returns a text at a place; nothing if it is empty."""
    return text and f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'


def _svg(width: float, height: float, parts: Iterable[str]) -> Drawing:
    """Returns a whole picture, on white, as the page of a notebook may be dark."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return Drawing(f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>')


# --- the places of vertices: their levels are the heights ---

GAP = 1.5  # between neighbouring graphs; vertices of a level are at least 1 apart


def layout_of_batch(graphs: Graphs) -> np.ndarray:
    """Returns the x of every vertex of a batch, (V,): the layouts of its graphs, side by side."""
    places, begin = [np.zeros(0)], 0.0
    for graph in graphs:
        x = layout(graph)
        x += begin - x.min()
        begin = x.max() + GAP
        places.append(x)
    return np.concatenate(places)


def layout(graph: Graphs) -> np.ndarray:
    """Returns the x of every vertex of ONE graph, (V,).

    The leaves follow each other in the order in which a depth-first search from the roots reaches them. Every other vertex is
    above the middle of its children. Vertices of a level are at least 1 apart. If the graph is not a tree, some sweeps then
    move vertices towards their neighbours (Sugiyama, 1981).
    """
    n, height = graph.num_vertices, graph.height
    owner, children = graph._edges
    counts, parents = np.diff(graph.child_offsets), np.bincount(children, minlength=n)
    children_of = np.split(children, graph.child_offsets[1:-1])
    x = np.full(n, -1.0)
    seen, stack, leaves = np.zeros(n, bool), np.flatnonzero(parents == 0)[::-1].tolist(), 0
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if counts[v] == 0:
            x[v], leaves = leaves, leaves + 1
        stack.extend(children_of[v][::-1].tolist())
    levels = np.split(np.argsort(height, kind="stable"), np.bincount(height).cumsum()[:-1])
    for row in levels[1:]:
        x[row] = _apart(np.array([x[children_of[v]].mean() for v in row]))
    if parents.max(initial=0) > 1:
        degree = np.maximum(counts + parents, 1)
        for _ in range(12):
            pull = np.bincount(owner, x[children], minlength=n) + np.bincount(children, x[owner], minlength=n)
            x = np.where(counts + parents > 0, pull / degree, x)
            for row in levels:
                x[row] = _apart(x[row])
    return x


def _apart(x: np.ndarray) -> np.ndarray:
    """Returns the places that are nearest to `x` (least squares), in the same order and at least 1 apart.

    This is isotonic regression, computed by pooling adjacent violators.
    """
    order = np.argsort(x, kind="stable")
    target = x[order] - np.arange(len(x))
    pools: list[tuple[float, int]] = []  # mean, size
    for mean in target.tolist():
        size = 1
        while pools and pools[-1][0] >= mean:
            previous, count = pools.pop()
            mean, size = (previous * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    means, sizes = zip(*pools, strict=True)
    out = np.empty(len(x))
    out[order] = np.repeat(means, sizes) + np.arange(len(x))
    return out
