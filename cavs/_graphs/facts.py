"""Facts about the graphs of a data set that decide the padded shapes of its batches, computed once."""

from typing import NamedTuple

import numpy as np

# Up to this many children per vertex, a task of W vertices simply has room for W * fan-in edges.
SMALL_FAN_IN = 4


class Facts(NamedTuple):
    """Facts about G graphs with V vertices."""

    sizes: np.ndarray  # (G,) vertices of each graph
    num_children: np.ndarray  # (V,)
    fan_in: np.ndarray  # (G,) largest number of children of a vertex
    levels: np.ndarray  # (G,) number of levels
    roots: np.ndarray  # (G,) number of vertices without parents


def arity_of(num_children: np.ndarray) -> int:
    """Returns the number of children that every inner vertex has; 0 if it varies or exceeds `SMALL_FAN_IN`."""
    arity = int(num_children.max(initial=0))
    return arity if arity <= SMALL_FAN_IN and ((num_children == 0) | (num_children == arity)).all() else 0


def facts_of(vertex_offsets: np.ndarray, child_offsets: np.ndarray, height: np.ndarray, root: np.ndarray) -> Facts:
    """Returns the facts about graphs, given which vertices have no parent."""
    begin = vertex_offsets[:-1]
    sizes, num_children = np.diff(vertex_offsets), np.diff(child_offsets)
    if not len(sizes):
        return Facts(sizes, num_children, sizes, sizes, sizes)
    return Facts(
        sizes,
        num_children,
        np.maximum.reduceat(num_children, begin),
        np.maximum.reduceat(height, begin).astype(np.int64) + 1,
        np.add.reduceat(root, begin, dtype=np.int64),
    )
