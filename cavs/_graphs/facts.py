"""What scheduling needs to know of graphs and is the same in every batch: found once for all of them."""

from typing import NamedTuple

import numpy as np

from cavs._graphs.segments import ranges

# Fan-in up to which a task of W vertices simply gets room for W * fan-in edges.
SMALL_FAN_IN = 4


class Facts(NamedTuple):
    """Of G graphs with V vertices and E edges."""

    sizes: np.ndarray  # (G,) vertices
    num_children: np.ndarray  # (V,)
    arity: int  # as `arity_of` has it
    back: np.ndarray  # (E,) by how much the parent's number is more than the child's; (arity, V) where there is one
    fan_in: np.ndarray  # (G,) the most children of a vertex
    roots: np.ndarray  # (G,) vertices without parents
    root: np.ndarray  # (G,) the number of the first of them


class Widths(NamedTuple):
    """How many vertices each level of G graphs has, leaves' first, graph after graph."""

    levels: np.ndarray  # (G,)
    first: np.ndarray  # (G,) where those of each graph begin
    count: np.ndarray  # (sum of levels,)

    def of(self, index: np.ndarray) -> "Widths":
        """Those of graphs `index`."""
        levels = self.levels[index]
        return Widths(levels, levels.cumsum() - levels, self.count.take(ranges(self.first[index], levels)))


def widths_of(vertex_offsets: np.ndarray, height: np.ndarray) -> Widths:
    """The widths of graphs whose vertices have these heights."""
    begin = vertex_offsets[:-1]
    levels = np.maximum.reduceat(height, begin).astype(np.int64) + 1 if len(begin) else np.zeros(0, np.int64)
    first = levels.cumsum() - levels
    key = first.repeat(np.diff(vertex_offsets))
    key += height
    return Widths(levels, first, np.bincount(key, minlength=int(levels.sum())))


def arity_of(num_children: np.ndarray) -> int:
    """The children of every vertex that has any; 0 where they differ, or are more than `SMALL_FAN_IN`."""
    arity = int(num_children.max(initial=0))
    return arity if arity <= SMALL_FAN_IN and ((num_children == 0) | (num_children == arity)).all() else 0


def facts_of(vertex_offsets: np.ndarray, child_offsets: np.ndarray, children: np.ndarray, arity: int) -> Facts:
    """The facts of graphs with these arrays; see `Graphs`. `arity` as `arity_of` has it."""
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
