"""The differences that `compare` finds between two results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs.checks import vertex_at
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree


@dataclasses.dataclass(frozen=True)
class Difference:
    """A symbol for which a run and the interpreter differ, at the first vertex where they do.

    Attributes:
        symbol: the symbol: `"state['h']"`, `"push"`, `"gradient of params['w']"`, ...
        row: the flat row of the vertex; `None` for a gradient of params, which has no vertex.
        graph: the graph of the vertex, or `None`.
        vertex: the vertex within its graph, or `None`.
        level: the height of the vertex, or `None`.
        got: the value of the run.
        expected: the value of the interpreter.
        error: their largest absolute difference.
        vertices: the number of vertices at which the symbol differs.
    """

    symbol: str
    row: int | None
    graph: int | None
    vertex: int | None
    level: int | None
    got: np.ndarray
    expected: np.ndarray
    error: float
    vertices: int

    def __str__(self) -> str:
        index = np.unravel_index(int(np.argmax(_distance(self.got, self.expected))), self.got.shape)
        entry = f" (entry {list(map(int, index))})" if index else ""
        values = f"run has {self.got[index]:.9g}, interpret has {self.expected[index]:.9g}{entry}"
        if self.row is None:
            return f"{self.symbol}: {values}"
        at = f"vertex {self.vertex} of graph {self.graph} (row {self.row}, level {self.level})"
        return f"{self.symbol} at {at}: {values}; differs at {counted(self.vertices, 'vertex')}"


class Differences:
    """Collects the first vertex at which each symbol of two results differs."""

    def __init__(self, graphs: Graphs, tolerance: float):
        self.graphs, self.tolerance, self.worst = graphs, tolerance, 0.0
        self.all: list[Difference] = []

    def per_vertex(self, name: str, got: PyTree, want: PyTree, sign: int) -> None:
        """Compares leaves with one row per vertex. The first vertex has the lowest level (`sign` 1) or the highest (-1)."""
        self._per_row(name, got, want, sign, np.arange(self.graphs.num_vertices))

    def per_edge(self, name: str, got: PyTree, want: PyTree) -> None:
        """Compares leaves with one row per edge. The first is one of the vertex with the highest level."""
        counts = np.diff(self.graphs.child_offsets)
        self._per_row(name, got, want, -1, np.arange(self.graphs.num_vertices).repeat(counts))

    def _per_row(self, name: str, got: PyTree, want: PyTree, sign: int, vertex: np.ndarray) -> None:
        for path, a, b in _leaves(got, want):
            bad, error = self._wrong(a, b)
            if bad.any():
                rows = np.flatnonzero(bad)
                one = int(rows[np.argmin(sign * self.graphs.height[vertex[rows]])])
                row, vertices = int(vertex[one]), len(np.unique(vertex[rows]))
                where = (row, *vertex_at(self.graphs.vertex_offsets, row), int(self.graphs.height[row]))
                self.all.append(Difference(f"{name}{path}", *where, a[one], b[one], float(error[one]), vertices))

    def whole(self, name: str, got: PyTree, want: PyTree) -> None:
        """Compares leaves without a vertex axis."""
        for path, a, b in _leaves(got, want):
            bad, error = self._wrong(a[None], b[None])
            if bad.any():
                self.all.append(Difference(f"{name}{path}", None, None, None, None, a, b, float(error[0]), 0))

    def sort(self, sign: int) -> None:
        """Sorts the differences by level and row. Differences at one vertex keep their order."""
        self.all.sort(key=lambda d: (sign * (d.level or 0), d.row))

    def _wrong(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inner = tuple(range(1, a.ndim))
        error = _distance(a, b).max(inner, initial=0)
        size = np.where(np.isfinite(b), np.abs(b), 0) if b.dtype != bool else np.zeros(b.shape)
        size = np.maximum(size.max(inner, initial=0), 1)
        exact = not jnp.issubdtype(b.dtype, jnp.inexact)
        self.worst = max(self.worst, float(error.max(initial=0)))
        return error > (0 if exact else self.tolerance * size), error


def _leaves(got: PyTree, want: PyTree) -> list[tuple[str, np.ndarray, np.ndarray]]:
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    pairs = zip(paths, jax.tree.leaves(got), strict=True)
    skipped = (jax.dtypes.float0, jax.dtypes.extended)
    return [
        (jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))
        for (path, b), a in pairs
        if not any(b.dtype == d or jax.dtypes.issubdtype(b.dtype, d) for d in skipped)
    ]


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|. The distance of NaN or an infinity to itself is 0, and to any other value infinite."""
    if a.dtype == bool or not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.abs(a.astype(np.int64) - b.astype(np.int64)).astype(np.float64)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(distance), np.inf, distance)
