"""Batches whose arrays are selected only when they are first read.

If a schedule includes all fields that a training step reads, nothing reads the graphs of its batch, and selecting them
would cost time for nothing.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs


def _read_on_first_use(field: str) -> Any:
    found = functools.cached_property(lambda batch: getattr(batch._select(), field))
    found.__set_name__(Graphs, field)
    return found


class DeferredGraphs(Graphs):
    """The graphs of a batch, whose fields are cached properties: they select the batch when one is first read."""

    _held: "Graphs | tuple[Graphs, np.ndarray]"

    @staticmethod
    def of(graphs: Graphs, index: np.ndarray) -> "DeferredGraphs":
        """Returns `graphs[index]`, which is selected later."""
        # The constructor takes the fields, as `dataclasses.replace` expects.
        batch = object.__new__(DeferredGraphs)
        object.__setattr__(batch, "_held", (graphs, index))
        batch._of_data(graphs._arity, graphs._inner_kinds)
        return batch

    def _select(self) -> Graphs:
        if isinstance(self._held, Graphs):
            return self._held
        graphs, index = self._held
        selected = graphs[index]
        # The batch takes the place of the data set, which would stay in memory.
        object.__setattr__(self, "_held", selected)
        return selected


for _field in dataclasses.fields(Graphs):
    setattr(DeferredGraphs, _field.name, _read_on_first_use(_field.name))
