"""Batches whose arrays are selected only when they are first read.

If a schedule includes all fields that a training step reads, nothing reads the graphs of its batch, and selecting them
would cost time for nothing.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs


class Pass:
    """Consecutive batches that are scheduled together: `graphs[index]`, of which batch k takes the next `counts[k]` graphs."""

    def __init__(self, graphs: Graphs, index: np.ndarray, counts: np.ndarray, selected: Graphs | None = None):
        """`selected` is `graphs[index]` if it is known already."""
        self.graphs, self.index, self.counts, self.ends = graphs, index, counts, counts.cumsum()
        self._selected = selected

    @functools.cached_property
    def batches(self) -> list[Graphs]:
        """All batches. They are selected at once: the arrays of each are views."""
        selected = self.graphs[self.index] if self._selected is None else self._selected
        return list(consecutive(selected, self.counts))


def _read_on_first_use(field: str) -> Any:  # a descriptor, which stands for a value of any field's type
    return functools.cached_property(lambda batch: getattr(batch._select(), field))


class DeferredGraphs(Graphs):
    """One batch of a `Pass`: graphs whose fields are cached properties, which select the batch when one is first read."""

    _held: "Graphs | tuple[Pass, int]"

    @staticmethod
    def of(batches: Pass, number: int) -> "DeferredGraphs":
        """Batch `number` of a pass."""
        # The constructor takes the fields, as `dataclasses.replace` expects.
        batch = object.__new__(DeferredGraphs)
        object.__setattr__(batch, "_held", (batches, number))
        end = batches.ends[number]
        batch._selected_from(batches.graphs, batches.index[end - batches.counts[number] : end])
        return batch

    def _select(self) -> Graphs:
        if isinstance(self._held, Graphs):
            return self._held
        batches, number = self._held
        selected = batches.batches[number]
        # The batch takes the place of its pass, which would keep the whole data set in memory.
        object.__setattr__(self, "_held", selected)
        return selected

    vertex_offsets = _read_on_first_use("vertex_offsets")
    child_offsets = _read_on_first_use("child_offsets")
    children = _read_on_first_use("children")
    height = _read_on_first_use("height")
    kind = _read_on_first_use("kind")
    label = _read_on_first_use("label")
    input_id = _read_on_first_use("input_id")
    vocab = _read_on_first_use("vocab")
    kind_names = _read_on_first_use("kind_names")
    label_names = _read_on_first_use("label_names")
    graph_label = _read_on_first_use("graph_label")
    edge_attr = _read_on_first_use("edge_attr")


def consecutive(graphs: Graphs, counts: np.ndarray) -> Iterator[Graphs]:
    """Cuts `graphs` into consecutive parts of `counts` (K,) graphs. Faster than a slice for each part."""
    end = counts.cumsum()
    vertices = graphs.vertex_offsets[np.append(0, end)]
    rows, edges = vertices.tolist(), graphs.child_offsets[vertices].tolist()
    for i, (start, stop) in enumerate(zip((end - counts).tolist(), end.tolist(), strict=True)):
        (v0, v1), (e0, e1) = rows[i : i + 2], edges[i : i + 2]
        part = graphs._with_rows(
            graphs.vertex_offsets[start : stop + 1] - v0,
            graphs.child_offsets[v0 : v1 + 1] - e0,
            slice(v0, v1),
            slice(e0, e1),
            slice(start, stop),
        )
        yield part._selected_from(graphs, np.arange(start, stop))
