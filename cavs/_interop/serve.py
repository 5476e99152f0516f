"""A batch of any graphs through an exported forward: scheduled, padded, run, and cut to the rows of its own graphs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._interop.names import named_leaves
from cavs._schedule.ladder import schedule_into, why_not
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape

# What the rows of an array belong to; "whole": they are not of the batch.
VERTEX, GRAPH, EDGE, WHOLE = "vertex", "graph", "edge", "whole"

Run: TypeAlias = Callable[[int, PyTree, Schedule, dict[str, Any]], PyTree]


class Serving(NamedTuple):
    """What a server knows about a forward's arguments and results."""

    inputs: dict[str, str]  # of each input by name, what its rows belong to: `"vertex"`, `"graph"`, `"edge"` or `"whole"`
    outputs: tuple[str, ...]  # of each output in turn, what its rows belong to: `"vertex"` or `"graph"`


class Part(NamedTuple):
    """Consecutive graphs of a batch, from `first` to `last - 1`, and their schedule."""

    first: int
    last: int
    sched: Schedule


def serve(run: Run, shapes: Sequence[Shape], serving: Serving, params: PyTree, graphs: Graphs, inputs: PyTree) -> PyTree:
    """Runs a forward on a batch; see `Exported.serve`.

    Args:
        run: runs the program of one of `shapes`: `run(number, params, sched, inputs)`.
        shapes: the shapes of the programs.
        serving: what the rows of inputs and outputs belong to.
        inputs: the inputs of the batch, without padding.
    """
    if not isinstance(graphs, Graphs):
        raise TypeError(
            f"Exported.serve: graphs: got a {type(graphs).__name__}; expected cavs.Graphs, which are not scheduled yet."
        )
    named = _checked_inputs(named_leaves(inputs, "Exported.serve: inputs"), serving, graphs)
    by_size = sorted(shapes, key=lambda shape: shape.vertices)
    found = []
    for part in parts_of(graphs, by_size):
        padded = {name: _padded(x, serving.inputs.get(name, WHOLE), graphs, part) for name, x in named.items()}
        found.append((part, run(shapes.index(part.sched.shape), params, part.sched, padded)))
    leaves, tree = zip(*(jax.tree.flatten(out) for _, out in found), strict=True)
    rows = []
    for of, *each in zip(serving.outputs, *leaves, strict=True):
        counts = (int(part.sched.data[0]) if of == VERTEX else part.last - part.first for part, _ in found)
        own = [np.asarray(x)[:n] for x, n in zip(each, counts, strict=True)]
        rows.append(own[0] if len(own) == 1 else np.concatenate(own))
    return jax.tree.unflatten(tree[0], rows)


def parts_of(graphs: Graphs, shapes: Sequence[Shape], first: int = 0) -> list[Part]:
    """Schedules a batch, in halves if it does not fit any of the shapes, and so on.

    `first`: the number of the first graph. Raises `ValueError` if a single graph does not fit.
    """
    sched = schedule_into(graphs, shapes)
    if sched is not None:
        return [Part(first, first + len(graphs), sched)]
    if len(graphs) < 2:
        raise ValueError(
            f"Exported.serve: graphs: got {why_not(graphs, shapes)}, in graph {first}. Export again, with graphs like this one "
            "among those that choose the sizes: cavs.interop.export_server(forward, params, graphs, inputs)."
        )
    half = len(graphs) // 2
    return parts_of(graphs[:half], shapes, first) + parts_of(graphs[half:], shapes, first + half)


def _checked_inputs(named: dict[str, Any], serving: Serving, graphs: Graphs) -> dict[str, Any]:
    """The inputs, those with rows of the batch in host memory."""
    expected, out = {VERTEX: graphs.num_vertices, GRAPH: len(graphs), EDGE: graphs.num_edges}, dict(named)
    for name, x in named.items():
        rows = expected.get(serving.inputs.get(name, WHOLE))
        if rows is None:
            continue
        out[name] = np.asarray(x)
        if np.shape(x)[:1] != (rows,):
            raise ValueError(
                f"Exported.serve: inputs: got shape {np.shape(x)} at {name!r}; expected ({rows}, ...), one row per "
                f"{serving.inputs[name]} of the batch, without padding."
            )
    return out


def _padded(x: Any, of: str, graphs: Graphs, part: Part) -> Any:
    """The rows of an input that belong to a part of the batch, padded with its first row."""
    if of == WHOLE:
        return x
    a, b = part.first, part.last
    if of != GRAPH:
        a, b = int(graphs.vertex_offsets[a]), int(graphs.vertex_offsets[b])
    if of == EDGE:
        a, b = int(graphs.child_offsets[a]), int(graphs.child_offsets[b])
    shape = part.sched.shape
    out = np.empty(({VERTEX: shape.vertices, GRAPH: shape.graphs, EDGE: shape.all_edges}[of], *x.shape[1:]), x.dtype)
    out[: b - a] = x[a:b]
    out[b - a :] = x[a] if b > a else 0
    return out
