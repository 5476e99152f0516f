"""Facts about graphs that the scheduler needs for every batch, computed once for the whole data set."""

from typing import NamedTuple

import numpy as np

from cavs._graphs.segments import ranges

# Up to this many children per vertex, a task of W vertices simply has room for W * fan-in edges.
SMALL_FAN_IN = 4


class Facts(NamedTuple):
    """Facts about G graphs with V vertices and E edges."""

    sizes: np.ndarray  # (G,) vertices of each graph
    num_children: np.ndarray  # (V,)
    arity: int  # see `arity_of`
    back: np.ndarray  # (E,) the parent's vertex number minus the child's; (arity, V) if there is an arity
    fan_in: np.ndarray  # (G,) largest number of children of a vertex
    roots: np.ndarray  # (G,) number of vertices without parents
    root: np.ndarray  # (G,) vertex number of the first of them


class Widths(NamedTuple):
    """The number of vertices of each level of G graphs, graph after graph, leaves first."""

    levels: np.ndarray  # (G,) number of levels
    first: np.ndarray  # (G,) index into `count` of each graph's level 0
    count: np.ndarray  # (sum of levels,) vertices

    def of(self, index: np.ndarray) -> "Widths":
        """The widths of the graphs `index`."""
        levels = self.levels[index]
        return Widths(levels, levels.cumsum() - levels, self.count.take(ranges(self.first[index], levels)))


def widths_of(vertex_offsets: np.ndarray, height: np.ndarray) -> Widths:
    """The widths of graphs with these `vertex_offsets` (G + 1,) and heights (V,)."""
    begin = vertex_offsets[:-1]
    levels = np.maximum.reduceat(height, begin).astype(np.int64) + 1 if len(begin) else np.zeros(0, np.int64)
    first = levels.cumsum() - levels
    key = first.repeat(np.diff(vertex_offsets))
    key += height
    return Widths(levels, first, np.bincount(key, minlength=int(levels.sum())))


def arity_of(num_children: np.ndarray) -> int:
    """The number of children that every inner vertex has; 0 if it varies or exceeds `SMALL_FAN_IN`."""
    arity = int(num_children.max(initial=0))
    return arity if arity <= SMALL_FAN_IN and ((num_children == 0) | (num_children == arity)).all() else 0


def facts_of(vertex_offsets: np.ndarray, child_offsets: np.ndarray, children: np.ndarray, arity: int) -> Facts:
    """The facts about graphs with these arrays (see `Graphs`) and this arity (see `arity_of`)."""
    sizes, num_children, begin = np.diff(vertex_offsets), np.diff(child_offsets), vertex_offsets[:-1]
    if not len(sizes):
        return Facts(sizes, num_children, arity, children, sizes, sizes, sizes)
    number = np.arange(vertex_offsets[-1]) - begin.repeat(sizes)
    back = number.repeat(num_children) - children
    is_root = np.ones(len(number), bool)
    is_root[np.arange(len(number)).repeat(num_children) - back] = False
    if arity:
        table = np.zeros((len(number), arity), np.int64)
        table[num_children > 0] = back.reshape(-1, arity)
        back = np.ascontiguousarray(table.T)
    return Facts(
        sizes,
        num_children,
        arity,
        back,
        np.maximum.reduceat(num_children, begin),
        np.add.reduceat(is_root, begin, dtype=np.int64),
        np.minimum.reduceat(np.where(is_root, number, len(number)), begin),
    )
