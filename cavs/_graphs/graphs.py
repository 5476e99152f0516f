"""`Graphs`: any number of disjoint input graphs as flat arrays (Cavs section 3: the input graphs G, read once)."""

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from cavs._graphs.facts import Facts, Widths, arity_of, facts_of, widths_of
from cavs._graphs.heights import heights, offsets
from cavs._graphs.integers import check_total, integers
from cavs._graphs.segments import ranges


@dataclasses.dataclass(frozen=True, eq=False)
class Graphs:
    """G disjoint directed acyclic graphs with V vertices and E child edges in all, as flat arrays.

    Vertices are numbered 0, 1, ... WITHIN each graph; graph g owns the flat rows
    `vertex_offsets[g] : vertex_offsets[g + 1]`. An edge leads from a vertex to one of its children (the vertex it
    depends on); the order of a vertex's children is the order `v.gather(0)`, `v.gather(1)`, ... sees.

    Build one with [`Graphs.build`][], a reader (`cavs.read_trees`, ...) or a converter (`cavs.from_parents`, ...): they
    validate. The constructor itself does not.

    **Fields** (numpy arrays; V, E, G as above):

    - `vertex_offsets`: (G + 1,) int64, starts with 0. `vertex_offsets[2] : vertex_offsets[3]` are the third graph's rows.
    - `child_offsets`: (V + 1,) int64, starts with 0. `children[child_offsets[r] : child_offsets[r + 1]]` are the
      children of the vertex in flat row r.
    - `children`: (E,) int32, child as vertex number within its graph, so slices of graphs share it unchanged.
    - `height`: (V,) int32, 0 at a leaf (no children), else 1 + the largest height of its children. Computed when built.
    - `kind`: (V,) int32 or `None`; index into `kind_names` where there are such. `None`: all vertices are of one kind.
    - `label`: (V,) int32 or `None`; -1 where a vertex has no label.
    - `input_id`: (V,) int32 or `None`: what the vertex reads from outside, such as its word: index into `vocab`; -1
      where it reads nothing.
    - `vocab`, `kind_names`, `label_names`: tuple of str or `None`: what the ids stand for.
    """

    vertex_offsets: np.ndarray
    child_offsets: np.ndarray
    children: np.ndarray
    height: np.ndarray
    kind: np.ndarray | None = None
    label: np.ndarray | None = None
    input_id: np.ndarray | None = None
    vocab: tuple[str, ...] | None = None
    kind_names: tuple[str, ...] | None = None
    label_names: tuple[str, ...] | None = None
    # Of a selection: of what, which is not kept alive, and which; its facts are found once.
    _selected: ClassVar["tuple[weakref.ref[Graphs], np.ndarray] | None"] = None

    @staticmethod
    def build(
        num_vertices: Sequence[int] | np.ndarray,
        num_children: Sequence[int] | np.ndarray,
        children: Sequence[int] | np.ndarray,
        *,
        kind: Any = None,
        label: Any = None,
        input_id: Any = None,
        vocab: Iterable[str] | None = None,
        kind_names: Iterable[str] | None = None,
        label_names: Iterable[str] | None = None,
    ) -> "Graphs":
        """Validated `Graphs` from flat arrays.

        **Arguments:** `num_vertices` (G,), at least 1 each; `num_children` (V,); `children` (E,) vertex numbers within
        the graph, vertex after vertex; `kind`, `label`, `input_id` (V,) integers or `None`; names as tuples of str.

        **Raises:** `ValueError` that names graph and vertex for an empty graph, a child out of range, a self-loop or a
        longer cycle, arrays of unlike length, an id outside its names, or 2^31 vertices or edges.
        """
        n = integers("num_vertices", num_vertices, np.int64)
        counts = integers("num_children", num_children, np.int64)
        kids = integers("children", children, np.int32)
        if (n < 1).any():
            g = int(np.flatnonzero(n < 1)[0])
            raise ValueError(f"num_vertices[{g}] is {n[g]}: graph {g} is empty. Every graph needs at least one vertex.")
        check_total("num_vertices", n)
        vertex_offsets = offsets(n)
        num_rows = int(vertex_offsets[-1])
        if len(counts) != num_rows or (counts < 0).any():
            raise ValueError(
                f"num_children has {len(counts)} entries (least {counts.min(initial=0)}), "
                f"wanted {num_rows} entries >= 0: one per vertex, the sum of num_vertices."
            )
        check_total("num_children", counts)
        child_offsets = offsets(counts)
        if len(kids) != child_offsets[-1]:
            raise ValueError(f"children has {len(kids)} entries, wanted {child_offsets[-1]}: the sum of num_children.")
        owner = np.repeat(np.arange(num_rows), counts)
        graph = np.repeat(np.arange(len(n)), n)
        bad = np.flatnonzero((kids < 0) | (kids >= n[graph[owner]]))
        if len(bad):
            g, v = _where(vertex_offsets, owner[bad[0]])
            raise ValueError(
                f"children: vertex {v} of graph {g} has child {kids[bad[0]]}, wanted a vertex number within the graph, "
                f"0 to {n[g] - 1}."
            )
        rows = kids + vertex_offsets[graph[owner]]
        height = heights(owner, rows, counts)
        if (height < 0).any():
            g, v = _where(vertex_offsets, int(np.flatnonzero(height < 0)[0]))
            raise ValueError(
                f"children: graph {g} has a cycle through or below vertex {v}; wanted a directed acyclic graph "
                "(a vertex may not depend on itself)."
            )
        fields = dict(kind=kind, label=label, input_id=input_id, vocab=vocab, kind_names=kind_names, label_names=label_names)
        return Graphs._of(vertex_offsets, child_offsets, kids, height, fields)

    @staticmethod
    def _of(
        vertex_offsets: np.ndarray, child_offsets: np.ndarray, children: np.ndarray, height: np.ndarray, fields: dict[str, Any]
    ) -> "Graphs":
        """Graphs of arrays that are known to be right, with the optional arguments of `build`, which are checked."""
        optional: dict[str, Any] = {}
        for name, its_names in (("kind", "kind_names"), ("label", "label_names"), ("input_id", "vocab")):
            value, names = fields.get(name), fields.get(its_names)
            names = None if names is None else tuple(names)
            if value is not None:
                value = integers(name, value, np.int32)
                if len(value) != len(height):
                    raise ValueError(f"{name} has {len(value)} entries, wanted {len(height)}: one per vertex.")
                low, high = 0 if name == "kind" else -1, np.iinfo(np.int32).max if names is None else len(names) - 1
                bad = np.flatnonzero((value < low) | (value > high))
                if len(bad):
                    g, v = _where(vertex_offsets, bad[0])
                    raise ValueError(f"{name} of vertex {v} of graph {g} is {value[bad[0]]}, wanted {low} to {high}.")
            optional |= {name: value, its_names: names}
        return Graphs(vertex_offsets, child_offsets, children, height, **optional)

    def __len__(self) -> int:
        """The number of graphs, G."""
        return len(self.vertex_offsets) - 1

    @property
    def num_vertices(self) -> int:
        """V, over all graphs."""
        return int(self.vertex_offsets[-1])

    @property
    def num_edges(self) -> int:
        """E, over all graphs."""
        return int(self.child_offsets[-1])

    @property
    def max_fan_in(self) -> int:
        """The most children that any vertex has."""
        return int(np.diff(self.child_offsets).max(initial=0))

    @functools.cached_property
    def _arity(self) -> int:
        """That of the data set that these are a selection of: a few graphs may have one by chance, and compile anew."""
        return arity_of(np.diff(self.child_offsets))

    @functools.cached_property
    def _facts(self) -> Facts:
        return facts_of(self.vertex_offsets, self.child_offsets, self.children, self._arity)

    @functools.cached_property
    def _widths(self) -> Widths:
        return widths_of(self.vertex_offsets, self.height)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the fields, and the arity."""
        return {name: getattr(self, name) for name in (*(f.name for f in dataclasses.fields(self)), "_arity")}

    def __getitem__(self, index: Any) -> "Graphs":
        """Graphs `index` (int, slice, integer or boolean array), in that order; the arrays of a contiguous slice are views."""
        if isinstance(index, (int, np.integer)):
            i = int(index)
            if not -len(self) <= i < len(self):
                raise IndexError(f"graph {i} of {len(self)}")
            index = slice(i % len(self), i % len(self) + 1)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._contiguous(start, max(start, stop))
            index = np.arange(start, stop, step)
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a boolean index of shape {index.shape} for {len(self)} graphs")
            index = np.flatnonzero(index)
        if index.ndim != 1 or (index.size and not np.issubdtype(index.dtype, np.integer)):
            raise IndexError(f"index of dtype {index.dtype} and shape {index.shape}; wanted an int, a slice or a 1-d array")
        index = index.astype(np.int64)
        if index.size and (index.min() < -len(self) or index.max() >= len(self)):
            raise IndexError(f"graphs {index.min()} to {index.max()} of {len(self)}")
        return self._select(np.where(index < 0, index + len(self), index))

    def _contiguous(self, start: int, stop: int) -> "Graphs":
        v0, v1 = int(self.vertex_offsets[start]), int(self.vertex_offsets[stop])
        e0, e1 = int(self.child_offsets[v0]), int(self.child_offsets[v1])
        vertex_offsets, child_offsets = self.vertex_offsets[start : stop + 1] - v0, self.child_offsets[v0 : v1 + 1] - e0
        some = self._with_rows(vertex_offsets, child_offsets, slice(v0, v1), slice(e0, e1))
        return some._remember(self, np.arange(start, stop))

    def _select(self, index: np.ndarray) -> "Graphs":
        starts = self.vertex_offsets[index]
        sizes = self.vertex_offsets[index + 1] - starts
        vertex_offsets = offsets(sizes)
        rows = ranges(starts, sizes)
        first = self.child_offsets[starts]
        edges = self.child_offsets[starts + sizes] - first
        edge_offsets = offsets(edges)
        child_offsets = np.append(self.child_offsets.take(rows) - (first - edge_offsets[:-1]).repeat(sizes), edge_offsets[-1])
        return self._with_rows(vertex_offsets, child_offsets, rows, ranges(first, edges))._remember(self, index)

    def _remember(self, of: "Graphs", index: np.ndarray) -> "Graphs":
        source, which = of._source()
        self.__dict__["_selected"] = weakref.ref(source), index if which is None else which[index]
        self.__dict__["_arity"] = of._arity
        return self

    def _source(self) -> "tuple[Graphs, np.ndarray | None]":
        """What these are a selection of, and which; themselves and None where they are none, or it is gone."""
        if self._selected is not None and (source := self._selected[0]()) is not None:
            return source, self._selected[1]
        return self, None

    def _with_rows(self, vertex_offsets: np.ndarray, child_offsets: np.ndarray, rows: Any, edges: Any) -> "Graphs":
        def take(a: np.ndarray | None) -> np.ndarray | None:
            return None if a is None else a[rows]

        return Graphs(
            vertex_offsets,
            child_offsets,
            self.children[edges],
            self.height[rows],
            take(self.kind),
            take(self.label),
            take(self.input_id),
            self.vocab,
            self.kind_names,
            self.label_names,
        )

    def __add__(self, other: "Graphs") -> "Graphs":
        """These graphs, then the other's. Both must name vocabulary, kinds and labels alike (see `with_vocab`)."""
        fields: dict[str, Any] = {}
        for name in ("vocab", "kind_names", "label_names"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"graphs + graphs: {name} differ; wanted the same. For words: other.with_vocab(graphs.vocab).")
            fields[name] = getattr(self, name)
        for name in ("kind", "label", "input_id"):
            a, b = getattr(self, name), getattr(other, name)
            if (a is None) != (b is None):
                raise ValueError(f"graphs + graphs: one side has {name}, the other has None.")
            fields[name] = None if a is None else np.concatenate([a, b])
        return Graphs(
            np.concatenate([self.vertex_offsets, other.vertex_offsets[1:] + self.vertex_offsets[-1]]),
            np.concatenate([self.child_offsets, other.child_offsets[1:] + self.child_offsets[-1]]),
            np.concatenate([self.children, other.children]),
            np.concatenate([self.height, other.height]),
            **fields,
        )

    def with_vocab(self, vocab: Iterable[str], unknown: str | None = None) -> "Graphs":
        """The same graphs with `input_id` renumbered to index `vocab`.

        Words that `vocab` lacks become the word `unknown`, or -1 where that is `None`.

        **Raises:** `ValueError` where the graphs name no words, or `unknown` is not in `vocab`.
        """
        vocab = tuple(vocab)
        if self.vocab is None or self.input_id is None:
            raise ValueError("with_vocab: these graphs have no vocab; wanted graphs whose reader kept words.")
        index = {word: i for i, word in enumerate(vocab)}
        if unknown is not None and unknown not in index:
            raise ValueError(f"with_vocab: unknown={unknown!r} is not in vocab; add it, or pass unknown=None.")
        fallback = -1 if unknown is None else index[unknown]
        table = np.array([index.get(word, fallback) for word in self.vocab] + [-1], np.int32)
        return dataclasses.replace(self, input_id=table[self.input_id], vocab=vocab)

    def reversed(self) -> "Graphs":
        """The same vertices with every edge turned round: a top-down pass over trees, a right-to-left one over chains.

        Parents become children, in the order of their vertex numbers. Everything else is kept.
        """
        n = np.diff(self.vertex_offsets)
        counts = np.diff(self.child_offsets)
        owner = np.repeat(np.arange(self.num_vertices), counts)
        base = np.repeat(self.vertex_offsets[:-1], n)
        rows = self.children + base[owner]
        order = np.argsort(rows, kind="stable")
        new_counts = np.bincount(rows, minlength=self.num_vertices)
        kids = (owner - base[owner])[order].astype(np.int32)
        height = heights(rows[order], owner[order], new_counts)
        return dataclasses.replace(self, child_offsets=offsets(new_counts), children=kids, height=height)

    def __repr__(self) -> str:
        extra = [f"{name}={len(value)}" for name in ("vocab", "kind_names", "label_names") if (value := getattr(self, name))]
        depth = int(self.height.max(initial=-1)) + 1
        parts = [f"{len(self)} graphs", f"{self.num_vertices} vertices", f"{self.num_edges} edges", f"{depth} levels"]
        return f"Graphs({', '.join(parts + extra)})"


def _where(vertex_offsets: np.ndarray, row: Any) -> tuple[int, int]:
    """(graph, vertex within it) of a flat row, for messages."""
    graph = int(np.searchsorted(vertex_offsets, row, side="right")) - 1
    return graph, int(row - vertex_offsets[graph])
