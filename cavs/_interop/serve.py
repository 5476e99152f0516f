"""A batch of any graphs for exported programs: split into parts that fit, and padded to their sizes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule.ladder import schedule_into, why_not
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape

# What the rows of an array belong to; "whole": they are not of the batch.
VERTEX, GRAPH, EDGE, WHOLE = "vertex", "graph", "edge", "whole"


class Serving(NamedTuple):
    """What a server knows about a forward's arguments and results."""

    inputs: dict[str, str]  # of each input by name, what its rows belong to: `"vertex"`, `"graph"`, `"edge"` or `"whole"`
    outputs: tuple[str, ...]  # of each output in turn, what its rows belong to: `"vertex"` or `"graph"`


def rows_of(graphs: Graphs) -> dict[str, int]:
    """Returns how many rows an array has without padding, by what they belong to."""
    return {VERTEX: graphs.num_vertices, GRAPH: len(graphs), EDGE: graphs.num_edges}


def rows_in(shape: Shape) -> dict[str, int]:
    """Returns how many rows an array has with padding, by what they belong to."""
    return {VERTEX: shape.vertices, GRAPH: shape.graphs, EDGE: shape.all_edges}


def parts_of(graphs: Graphs, shapes: Sequence[Shape], first: int = 0) -> list[tuple[Graphs, Schedule]]:
    """Schedules a batch, in halves if it does not fit any of the shapes, and so on.

    `first`: the number of the first graph. Raises `ValueError` if a single graph does not fit.
    """
    sched = schedule_into(graphs, shapes)
    if sched is not None:
        return [(graphs, sched)]
    if len(graphs) < 2:
        raise ValueError(
            f"Exported.serve: graphs: got {why_not(graphs, shapes)}, in graph {first}. Export again, with graphs like this one "
            "among those that choose the sizes: cavs.interop.export_server(forward, params, graphs, inputs)."
        )
    half = len(graphs) // 2
    return parts_of(graphs[:half], shapes, first) + parts_of(graphs[half:], shapes, first + half)


def checked_inputs(named: dict[str, Any], serving: Serving, graphs: Graphs) -> dict[str, Any]:
    """Returns the inputs, those with rows of the batch in host memory. Raises `ValueError` if their number is another."""
    out = dict(named)
    for name, x in named.items():
        rows = rows_of(graphs).get(serving.inputs.get(name, WHOLE))
        if rows is None:
            continue
        out[name] = np.asarray(x)
        if np.shape(x)[:1] != (rows,):
            raise ValueError(
                f"Exported.serve: inputs: got shape {np.shape(x)} at {name!r}; expected ({rows}, ...), one row per "
                f"{serving.inputs[name]} of the batch, without padding."
            )
    return out


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` rows: those given, and then the first one, or zeros if there is none."""
    out = np.empty((count, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    out[len(rows) :] = rows[0] if len(rows) else 0
    return out
