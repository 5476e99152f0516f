"""`cavs inspect FILE`: shows the contents of a file of graphs and the schedule of its first batch."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._readers import read
from cavs._readers.source import printable
from cavs._schedule.schedule import Schedule, Shape
from cavs._schedule.scheduler import schedule

if TYPE_CHECKING:
    from rich.table import Table

BAR = 44  # characters of the longest bar
MAX_BARS = 24  # more levels than this are shown as ranges of levels
MAX_SHAPES = 256  # at most this many batches are scheduled to count their shapes


def inspect(
    path: str | os.PathLike[str],
    batch: int = 64,
    out: str | os.PathLike[str] | None = None,
    read: Callable[[str], Graphs] = read,
) -> None:
    """Prints a summary of a file of graphs, the schedule of its first batch, and the number of shapes of all batches.

    Args:
        path: the file.
        batch: graphs per batch.
        out: a file for a picture of the schedule: PNG, PDF or SVG, by its suffix; `None` for no picture.
        read: the function that reads the file.

    Raises:
        ValueError: `batch` is below 1, the file contains no graphs, or `out` has another suffix. Errors of the reader
            propagate.
        OSError: `out` cannot be written.
    """
    if batch < 1:
        raise ValueError(f"--batch: got {batch}; expected an integer >= 1, the number of graphs to schedule together.")
    graphs = read(os.fspath(path))
    if not len(graphs):
        raise ValueError(f"FILE: got {os.fspath(path)} without graphs; expected at least one.")
    from rich.console import Console  # imported here because `cavs.debug` does not need it

    console = Console(highlight=False)
    first = graphs[:batch]
    sched = schedule(first)
    if out is not None:  # first, as it may fail
        sched.plot(os.fspath(out), first)
    console.print(_facts_table(os.path.basename(os.fspath(path)), graphs_facts(graphs)))
    console.print(_levels_table(sched))
    console.print(_facts_table("Schedule", schedule_facts(graphs, sched, batch)))
    if out is not None:
        console.print(f"A picture of this schedule is in {os.fspath(out)}", soft_wrap=True)


def graphs_facts(graphs: Graphs) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of the facts about a file."""
    facts = graphs._facts
    yield "graphs", f"{len(graphs):,}"
    yield "vertices", f"{graphs.num_vertices:,}   per graph: {_spread(facts.sizes)}"
    yield "edges", f"{graphs.num_edges:,}"
    yield "levels", f"per graph: {_spread(facts.levels)}"
    inner = facts.num_children[facts.num_children > 0]
    leaves = graphs.num_vertices - len(inner)
    yield "leaves", f"{leaves:,}, {100 * leaves / graphs.num_vertices:.0f} % of the vertices"
    if len(inner):
        yield "children", f"per inner vertex: {_spread(inner)}"
    yield "form", _form(graphs)
    for name, ids, names in (("kinds", graphs.kind, graphs.kind_names), ("labels", graphs.label, graphs.label_names)):
        if ids is not None:
            yield name, _histogram(ids, names) if ids.dtype == np.int32 and ids.ndim == 1 else _range(ids)
    for name, values in (("labels of graphs", graphs.graph_label), ("values of edges", graphs.edge_attr)):
        if values is not None:
            yield name, _range(values)
    if graphs.input_id is not None:
        reading = graphs.input_id >= 0
        words = f", {counted(f'{len(graphs.vocab):,}', 'word')} in the vocabulary" if graphs.vocab is not None else ""
        different = len(np.unique(graphs.input_id[reading]))
        yield "inputs", f"on {counted(f'{reading.sum():,}', 'vertex')}, {different:,} different{words}"


def schedule_facts(graphs: Graphs, sched: Schedule, batch: int) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of the facts about the first batch's schedule and about the shapes of all batches."""
    shape, size, levels = sched.shape, int(sched.num_vertices), len(sched.widths)
    batched = f"{counted(f'{shape.graphs:,}', 'graph')}, {counted(f'{size:,}', 'vertex')} in {counted(f'{levels:,}', 'level')}"
    yield "batch", f"{batched}: {size / levels:,.1f} per level"
    classes = ", ".join(f"{w}" for w, _ in shape.classes)
    yield "tasks", f"{int(sched.num_tasks):,} above the leaves, {classes} vertices wide"
    yield "padding", f"{100 * sched.waste:.0f} % of the computed rows"
    yield "bucket", _shape(shape)
    starts = range(0, len(graphs), batch)
    shapes = {schedule(graphs[start : start + batch]).shape for start in starts[:MAX_SHAPES]}
    num_batches = f"{len(starts):,}" if len(starts) <= MAX_SHAPES else f"first {MAX_SHAPES} of {len(starts):,}"
    yield "shapes", f"{len(shapes):,} in the file's {counted(num_batches, 'batch')}; each shape is compiled once"


def _table(title: str) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    return Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)


def _facts_table(title: str, facts: Iterator[tuple[str, str]]) -> "Table":
    from rich.markup import escape

    table = _table(title)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts:
        # Names in a file may look like rich's markup.
        table.add_row(name, escape(value))
    return table


def _levels_table(sched: Schedule) -> "Table":
    widths = np.asarray(sched.widths)
    table = _table("Vertices per level")
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(style="cyan", no_wrap=True)
    edges = np.unique(np.linspace(0, len(widths), min(len(widths), MAX_BARS) + 1).round().astype(int)).tolist()
    means = [widths[a:b].mean() for a, b in pairwise(edges)]
    for (a, b), mean in zip(pairwise(edges), means, strict=True):
        level, number = (f"{a}", f"{mean:,.0f}") if b == a + 1 else (f"{a}-{b - 1}", f"{mean:,.1f}")
        eighths = max(1, round(mean / max(means) * BAR * 8))  # of a character
        table.add_row(level, number, "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip())
    return table


def _spread(counts: np.ndarray) -> str:
    if counts.min() == counts.max():
        return f"{counts[0]:,}"
    return f"{counts.min():,} to {counts.max():,}, {counts.mean():,.1f} on average"


def _form(graphs: Graphs) -> str:
    roots, fan_in = graphs._facts.roots, graphs.max_fan_in
    max_parents = np.bincount(graphs._edges[1], minlength=1).max()
    rooted = (roots == 1).all()
    name = "forests" if not rooted else "sequences" if fan_in <= 1 else "trees"
    if max_parents > 1:
        name = f"directed acyclic graphs, a vertex has up to {max_parents:,} parents"
    return name if rooted else f"{name}; roots per graph: {_spread(roots)}"


def _histogram(ids: np.ndarray, names: tuple[str, ...] | None) -> str:
    values, counts = np.unique(ids[ids >= 0], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:8]
    shown = ", ".join(f"{printable(names[values[i]]) if names is not None else values[i]} ({counts[i]:,})" for i in order)
    more = f", and {len(values) - len(order):,} more" if len(values) > len(order) else ""
    none = f"; {counted(f'{(ids < 0).sum():,}', 'vertex')} without" if (ids < 0).any() else ""
    return f"{len(values):,}: {shown}{more}{none}"


def _range(values: np.ndarray) -> str:
    present = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    numbers = f"{present.min():g} to {present.max():g}, {present.mean():g} on average" if present.size else "none"
    return f"{values.dtype}{list(values.shape[1:])}, {numbers}"


def _shape(shape: Shape) -> str:
    sizes = {"leaf": sum(shape.leaves), "inner vertex": sum(shape.inner), "edge": sum(shape.edges), "task": shape.tasks}
    parts = [counted(f"{number:,}", noun) for noun, number in sizes.items()]
    return ", ".join(parts + [f"{len(shape.kinds)} kinds"] * (len(shape.kinds) > 1))
