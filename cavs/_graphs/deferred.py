"""Batches whose graphs nobody has looked at yet: where a schedule carries all that a step reads, they are never selected."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs


class Pass:
    """Consecutive batches of `graphs[index]`, of `counts` graphs each; `arrays`, of all of them, where they are known."""

    def __init__(self, graphs: Graphs, index: np.ndarray, counts: np.ndarray, arrays: tuple[Any, ...] | None):
        self._graphs, self._index, self._counts, self._arrays = graphs, index, counts, arrays

    @functools.cached_property
    def batches(self) -> list[Graphs]:
        of, arrays = self._graphs, self._arrays
        names = (getattr(of, name) for name in ("vocab", "kind_names", "label_names"))
        together = of[self._index] if arrays is None else Graphs(*arrays, *names)._remember(of, self._index)
        return list(consecutive(together, self._counts))


class LaterGraphs(Graphs):
    """Batch `number` of a pass. It becomes a `Graphs` as any other when it is asked for the first of its attributes."""

    def __init__(self, of: Pass, number: int):
        object.__setattr__(self, "_later", (of, number))

    def __getattribute__(self, name: str) -> Any:
        mine = object.__getattribute__(self, "__dict__")
        later = mine.get("_later")
        if later is not None:  # None where another thread was faster
            of, number = later
            mine.update(vars(of.batches[number]))
            object.__setattr__(self, "__class__", Graphs)
            mine.pop("_later", None)
        return object.__getattribute__(self, name)


def consecutive(graphs: Graphs, counts: np.ndarray) -> Iterator[Graphs]:
    """`graphs` in parts of `counts` (K,) graphs each, one after another: slices, and cheaper than taken one by one."""
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
        )
        yield part._remember(graphs, np.arange(start, stop))
