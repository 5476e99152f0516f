"""`Graphs`: any number of disjoint input graphs as flat arrays (Cavs, section 3: the input graphs G, read once)."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from cavs._graphs.checks import Index, array_of, check_order, check_type, checked_fields, checked_index, checked_structure
from cavs._graphs.counted import counted, suggestion
from cavs._graphs.flat import heights, number_names, offsets, ranges
from cavs._graphs.pytree import PyTree

NAMES = {"vocab": "input_id", "kind_names": "kind", "label_names": "label"}  # fields of names, and of the ids that index them
VALUES = ("kind", "label", "input_id", "graph_label", "edge_attr")  # the fields that are arrays of values
Rows: TypeAlias = np.ndarray | slice

# Up to this many children per vertex, a task of W vertices simply has room for W * fan-in edges.
SMALL_FAN_IN = 4


class Facts(NamedTuple):
    """Facts about G graphs with V vertices, which decide the padded shapes of their batches."""

    sizes: np.ndarray  # (G,) vertices of each graph
    num_children: np.ndarray  # (V,)
    fan_in: np.ndarray  # (G,) largest number of children of a vertex
    levels: np.ndarray  # (G,) number of levels
    roots: np.ndarray  # (G,) number of vertices without parents


@dataclasses.dataclass(frozen=True, eq=False)
class Graphs:
    """G disjoint directed acyclic graphs with V vertices and E edges in all, as flat NumPy arrays.

    Vertices are numbered 0, 1, ... within each graph. The vertices of graph g are the flat rows
    `vertex_offsets[g] : vertex_offsets[g + 1]`. An edge leads from a vertex to one of its children, the vertices it
    depends on. The order of the children is the order in which `v.gather(0)`, `v.gather(1)`, ... read them.

    Create graphs with a reader ([`cavs.read`][], [`cavs.read_trees`][]), a converter ([`cavs.from_parents`][],
    [`cavs.from_lengths`][], [`cavs.from_edges`][]) or `Graphs.build`: these validate their arguments. The constructor
    does not.

    `graphs[index]` selects graphs, `a + b` concatenates, `len(graphs)` is G. To give a development or
    test set the word ids of the training set, write `dev = dev.with_vocab(train.vocab)`.

    Attributes:
        vertex_offsets: int64[G + 1], begins with 0. `vertex_offsets[2] : vertex_offsets[3]` are the rows of the third
            graph.
        child_offsets: int64[V + 1], begins with 0. `children[child_offsets[r] : child_offsets[r + 1]]` are the children
            of the vertex in row r.
        children: int32[E], each child's vertex number within its graph.
        height: int32[V], 0 at a leaf (a vertex without children), otherwise 1 + the largest height of the children.
        kind: int32[V], the kind of each vertex, an index into `kind_names` if there are names. `None` if all vertices
            are of one kind.
        label: int32[V], the label of each vertex, an index into `label_names` if there are names; -1 at a vertex
            without a label. Or numbers of any other dtype or shape (V, ...), such as targets of a regression, in which NaN
            says that there is none. `None` if there are no labels.
        input_id: int32[V], what each vertex reads from outside, such as a word: an index into `vocab` if there is one;
            -1 at a vertex that reads nothing. `None` if no vertex reads anything.
        vocab: tuple of str, the names of `input_id`, or `None`.
        kind_names: tuple of str, the names of `kind`, or `None`.
        label_names: tuple of str, the names of `label`, or `None`.
        graph_label: num[G, ...], the label of each graph, or `None`.
        edge_attr: num[E, ...], a row for each edge in the order of `children`, or `None`: what F reads of
            its edges, `cavs.run(..., edges=graphs.edge_attr)`.
        x: a pytree of num[V, ...], the features of each vertex, such as an array or a dict of arrays: what F
            pulls, `cavs.run(F, params, sched, graphs.x)`. `None` if there are none.
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
    graph_label: np.ndarray | None = None
    edge_attr: np.ndarray | None = None
    x: PyTree = None

    @staticmethod
    def build(
        num_vertices: ArrayLike | Sequence[int],
        num_children: ArrayLike | Sequence[int],
        children: ArrayLike | Sequence[int],
        *,
        kind: ArrayLike | None = None,
        label: ArrayLike | None = None,
        input_id: ArrayLike | None = None,
        vocab: Iterable[str] | None = None,
        kind_names: Iterable[str] | None = None,
        label_names: Iterable[str] | None = None,
        graph_label: ArrayLike | None = None,
        edge_attr: ArrayLike | None = None,
        x: PyTree = None,
    ) -> "Graphs":
        """Validates flat arrays and computes heights.

        The graphs have copies of the arrays, so that later changes of these do not reach them. Arrays that cannot change are
        not copied: those of JAX, memory maps of mode "r", and others after `array.flags.writeable = False`.

        Args:
            num_vertices: int[G], the number of vertices of each graph, at least 1.
            num_children: int[V], the number of children of each vertex.
            children: int[E], the children of all vertices, as vertex numbers within the graph.
            kind: int[V] >= 0, or `None`.
            label: int[V] >= -1, or num[V, ...] of any other dtype or shape, or `None`.
            input_id: int[V] >= -1, or `None`.
            vocab: names of `input_id`.
            kind_names: names of `kind`.
            label_names: names of `label`.
            graph_label: num[G, ...], or `None`.
            edge_attr: num[E, ...], a row for each of `children`, or `None`.
            x: a pytree of num[V, ...], or `None`.

        Returns:
            The graphs.

        Raises:
            ValueError: a graph has no vertex or a cycle, a child is out of range, the length of an array does not fit, an
                id is not an index into its names, or there are 2^31 or more vertices or edges. The message names the graph
                and the vertex.
            TypeError: names are no list of str.
        """
        vertex_offsets, child_offsets, kids, height = checked_structure(num_vertices, num_children, children)
        fields = {"kind": kind, "label": label, "input_id": input_id, "graph_label": graph_label, "edge_attr": edge_attr}
        fields |= {"x": x, "vocab": vocab, "kind_names": kind_names, "label_names": label_names}
        return Graphs(vertex_offsets, child_offsets, kids, height, **checked_fields(vertex_offsets, len(kids), fields))

    def __len__(self) -> int:
        """The number of graphs, G."""
        return len(self.vertex_offsets) - 1

    @property
    def num_graphs(self) -> int:
        """The number of graphs, G, as `len(graphs)`."""
        return len(self)

    @property
    def num_vertices(self) -> int:
        """The number of vertices of all graphs, V."""
        return int(self.vertex_offsets[-1])

    @property
    def num_edges(self) -> int:
        """The number of edges of all graphs, E."""
        return int(self.child_offsets[-1])

    @property
    def max_fan_in(self) -> int:
        """The largest number of children of a vertex."""
        return int(np.diff(self.child_offsets).max(initial=0))

    def equals(self, other: "Graphs") -> bool:
        """Whether all fields are the same: dtypes, values (NaN is NaN) and names. Other objects are not the same."""
        if not isinstance(other, Graphs):
            return False
        flat, other_flat = (jax.tree.flatten([getattr(graphs, name) for name in _FIELDS]) for graphs in (self, other))
        return flat[1] == other_flat[1] and all(map(_same, flat[0], other_flat[0]))

    @functools.cached_property
    def _arity(self) -> int:
        """The number of children of every inner vertex; 0 if it varies or exceeds `SMALL_FAN_IN`.

        It is that of the data set from which these graphs were selected. A few graphs may have an arity by chance. Their
        schedule would then have another shape, and compile again.
        """
        counts = np.diff(self.child_offsets)
        arity = int(counts.max(initial=0))
        return arity if arity <= SMALL_FAN_IN and ((counts == 0) | (counts == arity)).all() else 0

    @functools.cached_property
    def _inner_kinds(self) -> tuple[int, ...]:
        """The kinds of vertices with children, in the data set from which these graphs were selected."""
        return () if self.kind is None else tuple(np.unique(self.kind[self.height > 0]).tolist())

    @functools.cached_property
    def _facts(self) -> Facts:
        sizes, counts, begin = np.diff(self.vertex_offsets), np.diff(self.child_offsets), self.vertex_offsets[:-1]
        levels = np.maximum.reduceat(self.height, begin).astype(np.int64) + 1
        roots = np.add.reduceat(is_root(self), begin, dtype=np.int64)
        return Facts(sizes, counts, np.maximum.reduceat(counts, begin), levels, roots)

    @property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the parent and of the child of each edge, (E,) each."""
        parent = np.arange(self.num_vertices).repeat(np.diff(self.child_offsets))
        return parent, self.children + self._first_rows[parent]

    @property
    def _first_rows(self) -> np.ndarray:
        """(V,) the row of the first vertex of each vertex's graph."""
        return self.vertex_offsets[:-1].repeat(np.diff(self.vertex_offsets))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the fields and the facts of the data set."""
        return {name: getattr(self, name) for name in (*_FIELDS, "_arity", "_inner_kinds")}

    def __getitem__(self, index: Index) -> "Graphs":
        """Selects graphs by an int, a slice, or an array of integers or booleans, in the order of the index.

        The arrays of a contiguous slice are views. An int selects one graph, as `Graphs` of length 1.

        Raises:
            IndexError: the index is out of range, or of another type or shape.
        """
        checked = checked_index(index, len(self))
        return self._slice(checked.start, checked.stop) if isinstance(checked, slice) else self._select(checked)

    def _slice(self, start: int, stop: int) -> "Graphs":
        v0, v1 = int(self.vertex_offsets[start]), int(self.vertex_offsets[stop])
        e0, e1 = int(self.child_offsets[v0]), int(self.child_offsets[v1])
        vertex_offsets, child_offsets = self.vertex_offsets[start : stop + 1] - v0, self.child_offsets[v0 : v1 + 1] - e0
        return self._with_rows(vertex_offsets, child_offsets, slice(v0, v1), slice(e0, e1), slice(start, stop))

    def _select(self, index: np.ndarray) -> "Graphs":
        starts = self.vertex_offsets[index]
        sizes = self.vertex_offsets[index + 1] - starts
        rows = ranges(starts, sizes)
        first = self.child_offsets[starts]
        edges = self.child_offsets[starts + sizes] - first
        edge_offsets = offsets(edges)
        child_offsets = np.append(self.child_offsets.take(rows) - (first - edge_offsets[:-1]).repeat(sizes), edge_offsets[-1])
        return self._with_rows(offsets(sizes), child_offsets, rows, ranges(first, edges), index)

    def _with_rows(
        self, vertex_offsets: np.ndarray, child_offsets: np.ndarray, rows: Rows, edges: Rows, numbers: Rows
    ) -> "Graphs":
        """Selects the vertices `rows`, the edges `edges` and the graphs `numbers`, and keeps the facts of the data set."""
        structure = vertex_offsets, child_offsets, self.children[edges], self.height[rows]
        kind, label, input_id = (None if x is None else x[rows] for x in (self.kind, self.label, self.input_id))
        names = self.vocab, self.kind_names, self.label_names
        graph_label = None if self.graph_label is None else self.graph_label[numbers]
        edge_attr = None if self.edge_attr is None else self.edge_attr[edges]
        x = jax.tree.map(lambda leaf: leaf[rows], self.x)
        part = Graphs(*structure, kind, label, input_id, *names, graph_label, edge_attr, x)
        return part._of_data(self._arity, self._inner_kinds)

    def _of_data(self, arity: int, inner_kinds: tuple[int, ...]) -> "Graphs":
        """Sets facts of the data set from which these graphs were selected, and returns them."""
        self.__dict__.update(_arity=arity, _inner_kinds=inner_kinds)
        return self

    def _with(self, new_kinds: bool = False, **fields: Any) -> "Graphs":
        """Returns the same graphs with other fields than the structure. They keep the facts of the data set."""
        graphs = dataclasses.replace(self, **fields)
        return graphs._of_data(self._arity, (graphs if new_kinds else self)._inner_kinds)

    def __add__(self, other: "Graphs") -> "Graphs":
        """Concatenates graphs. Both sides must have the same fields and the same names (see `with_vocab`)."""
        check_type("graphs + other", other, Graphs, "cavs.Graphs. For a list write cavs.Graphs.concat(parts)")
        return _joined([self, other], renumber=False)

    @staticmethod
    def concat(parts: "Iterable[Graphs]") -> "Graphs":
        """Concatenates any number of graphs, such as those of several files.

        Words, kinds and labels with names are numbered anew if their names differ, by the first appearance of a name.

        Args:
            parts: the graphs, at least one. Either all of them have a field, or none, but for those of empty files.

        Raises:
            TypeError: one of `parts` is no `Graphs`.
            ValueError: there are no graphs; or a field is in some of them only, or has different dtypes or shapes.
        """
        check_type("Graphs.concat: parts", parts, Iterable, "cavs.Graphs, at least one")
        parts = [*parts]
        if not parts or not all(isinstance(part, Graphs) for part in parts):
            got = ", ".join(sorted({type(part).__name__ for part in parts})) or "nothing"
            raise (TypeError if parts else ValueError)(f"Graphs.concat: parts: got {got}; expected cavs.Graphs, at least one.")
        # An empty file has no fields to compare.
        parts = [part for part in parts if len(part) or any(getattr(part, names) for names in NAMES)] or parts[:1]
        return _joined(parts, renumber=True)

    def with_vocab(self, vocab: Iterable[str], unknown: str | None = None) -> "Graphs":
        """Renumbers `input_id` so that it indexes another vocabulary, such as that of the training set.

        ```python
        train = cavs.read_trees("train.txt")
        dev = cavs.read_trees("dev.txt").with_vocab(train.vocab)
        ```

        Args:
            vocab: the words, in the order of their new ids.
            unknown: the word of `vocab` that stands for words that are not in `vocab`. If `None`, their id becomes -1.

        Returns:
            The same graphs with new `input_id` and `vocab`.

        Raises:
            TypeError: `vocab` is a str, a set or no sequence, or has a word that is no str.
            ValueError: these graphs have no `vocab`, or `unknown` is not in `vocab`.
        """
        if not isinstance(vocab, Iterable) or isinstance(vocab, str | set | frozenset):  # a set has an order of each process
            got = f"{vocab!r:.60}"
            raise TypeError(f"with_vocab: vocab: got {got}; expected a list of words. Write with_vocab(train.vocab).")
        check_order("with_vocab: vocab", vocab)
        vocab = tuple(vocab)
        if not_str := [word for word in vocab if not isinstance(word, str)]:
            got = f"{type(not_str[0]).__name__} among the words"
            raise TypeError(f"with_vocab: vocab: got a {got}; expected str. Write with_vocab(train.vocab).")
        if self.vocab is None or self.input_id is None:
            raise ValueError("with_vocab: got graphs without a vocab; expected graphs that were read or built with words.")
        index = {word: i for i, word in enumerate(vocab)}
        if unknown is not None and unknown not in index:
            got = f"got {unknown!r}; expected a word of vocab"
            raise ValueError(f"with_vocab: unknown: {got}. Add it to vocab, or write unknown=None.")
        fallback = -1 if unknown is None else index[unknown]
        table = np.array([index.get(word, fallback) for word in self.vocab] + [-1], np.int32)
        return self._with(input_id=table[self.input_id], vocab=vocab)

    def replace(self, **fields: Any) -> "Graphs":
        """Returns the same graphs with other words, labels or features. These are copied as in `Graphs.build`.

        ```python
        chains, pairs = cavs.vertex_programs.EncoderDecoder.graphs(source_lengths, target_lengths)
        chains, pairs = chains.replace(input_id=words), pairs.replace(input_id=before, label=after)
        ```

        Args:
            fields: any of `kind`, `label`, `input_id`, `vocab`, `kind_names`, `label_names`, `graph_label`, `edge_attr` (in
                the order of `children`) and `x`, as in `Graphs.build`; `None` removes a field.

        Raises:
            TypeError: a field has another name.
            ValueError: an array does not fit the graphs, or an id is not an index into its names.
        """
        known = _FIELDS[4:]  # without those of `checked_structure`
        if unknown := [name for name in fields if name not in known]:
            hint = suggestion(unknown[0], known)
            raise TypeError(f"replace: got {unknown[0]!r}; expected one of {', '.join(known)}. {hint}".rstrip())
        values = {name: getattr(self, name) for pair in NAMES.items() for name in pair} | fields  # ids must fit their names
        checked = checked_fields(self.vertex_offsets, self.num_edges, values)
        return self._with("kind" in fields, **{name: checked[name] for name in values})

    def split(self, fractions: Sequence[float], seed: int | None = 0) -> "tuple[Graphs, ...]":
        """Deals the graphs at random to parts, such as a training, a development and a test set.

        ```python
        train, dev, test = graphs.split([0.8, 0.1, 0.1])
        ```

        Args:
            fractions: the share of the graphs of each part; they add up to 1.
            seed: of the random order; the same seed gives the same parts. `None` keeps the order of the data.

        Returns:
            The parts. Each graph is in one of them.

        Raises:
            ValueError: the fractions are not positive, do not add up to 1, or leave a part without graphs; or `seed` is no
                int >= 0.
        """
        shares = array_of("Graphs.split: fractions", fractions)
        numbers = shares.ndim == 1 and shares.dtype.kind in "iuf"
        if not numbers or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-6:
            raise ValueError(
                f"Graphs.split: fractions: got {fractions}; expected positive numbers that add up to 1. Write [0.8, 0.1, 0.1]."
            )
        if seed is not None and (not isinstance(seed, int | np.integer) or seed < 0):
            raise ValueError(f"Graphs.split: seed: got {seed!r}; expected an int >= 0 or None.")
        ends = np.rint(np.cumsum(shares) * len(self)).astype(int)
        sizes = np.diff(ends, prepend=0)
        if not sizes.all():
            raise ValueError(
                f"Graphs.split: fractions: got {fractions}, which makes parts of {sizes.tolist()} graphs; expected at "
                "least one graph in each."
            )
        order = np.arange(len(self)) if seed is None else np.random.default_rng(seed).permutation(len(self))
        return tuple(self[numbers] for numbers in np.split(order, ends[:-1]))

    def reversed(self) -> "Graphs":
        """Reverses every edge, for a top-down pass over trees or a right-to-left pass over chains.

        Parents become children, ordered by vertex number. All other fields are kept.
        """
        owner, rows = self._edges
        order = np.argsort(rows, kind="stable")
        new_counts = np.bincount(rows, minlength=self.num_vertices)
        kids = (owner - self._first_rows[owner])[order].astype(np.int32)
        height = heights(rows[order], owner[order], new_counts)
        edge_attr = None if self.edge_attr is None else self.edge_attr[order]
        return dataclasses.replace(self, child_offsets=offsets(new_counts), children=kids, height=height, edge_attr=edge_attr)

    def _repr_html_(self) -> str:
        from cavs._graphs.draw import as_html  # which imports this module

        return as_html(self)

    def __repr__(self) -> str:
        extra = [f"{name}={len(value)}" for name in ("vocab", "kind_names", "label_names") if (value := getattr(self, name))]
        depth = int(self.height.max(initial=-1)) + 1
        sizes = {"graph": len(self), "vertex": self.num_vertices, "edge": self.num_edges, "level": depth}
        parts = [counted(number, noun) for noun, number in sizes.items()]
        return f"Graphs({', '.join(parts + extra)})"


_FIELDS = tuple(field.name for field in dataclasses.fields(Graphs))


def _same(a: object, b: object) -> bool:
    """Whether two arrays, or two names, are the same."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return a == b
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact))


def check_graphs(graphs: object, call: str) -> None:
    """Raises `TypeError` if the argument `graphs` is something else. `call` says how to write it: "save_npz(graphs, path)"."""
    expected = f"cavs.Graphs. Write {call}, with graphs such as cavs.read_trees(path)"
    check_type(f"{call.partition('(')[0]}: graphs", graphs, Graphs, expected)


def is_root(graphs: Graphs) -> np.ndarray:
    """Returns which vertices have no parent, bool[V]. Raises a `TypeError` if `graphs` is something else."""
    check_graphs(graphs, "is_root(graphs)[v]")
    roots = np.ones(graphs.num_vertices, bool)
    roots[graphs._edges[1]] = False
    return roots


def _joined(parts: Sequence[Graphs], renumber: bool) -> Graphs:
    """Concatenates graphs, at least one.

    `renumber`: whether ids of different names are numbered anew, by the first appearance of the names. Raises `ValueError` if
    the graphs differ in their names, or some lack a field that others have, or dtypes or shapes differ.
    """
    vertex_offsets = offsets(np.concatenate([np.diff(part.vertex_offsets) for part in parts]))
    child_offsets = offsets(np.concatenate([np.diff(part.child_offsets) for part in parts]))
    children, height = (np.concatenate([getattr(part, name) for part in parts]) for name in ("children", "height"))
    caller = "Graphs.concat" if renumber else "graphs + other"
    with_edges = [part for part in parts if part.num_edges] or parts  # a file of graphs without edges need not have edge_attr
    holders = dict.fromkeys(VALUES, parts) | {"edge_attr": with_edges}
    fields: dict[str, Any] = {n: _values(caller, n, [getattr(part, n) for part in some]) for n, some in holders.items()}
    leaves, trees = zip(*(jax.tree.flatten(part.x) for part in parts), strict=True)
    if any(tree != trees[0] for tree in trees):
        raise ValueError(f"{caller}: x: got {trees[0]} and others; expected the same structure in all graphs.")
    fields["x"] = trees[0].unflatten([_values(caller, "x", arrays) for arrays in zip(*leaves, strict=True)])
    for names, ids in NAMES.items():
        part_names = [getattr(part, names) for part in parts]
        fields[names] = part_names[0]
        if all(x == part_names[0] for x in part_names):
            continue
        if not renumber or None in part_names:
            hint = "cavs.Graphs.concat([graphs, other]), which numbers them anew"
            hint += ", or graphs + other.with_vocab(graphs.vocab)" * (names == "vocab")
            if renumber:  # numbers without names beside names
                hint = f"graphs.replace({names}=names), or cavs.data.named(graphs), for those without {names}"
            raise ValueError(f"{caller}: got different {names}; expected the same in all. Write {hint}.")
        new_ids, distinct = number_names([*chain.from_iterable(part_names)])
        fields[names] = tuple(distinct)
        tables = np.split(new_ids, np.cumsum([len(x) for x in part_names])[:-1])
        if fields[ids] is not None:
            pairs = zip(parts, tables, strict=True)
            fields[ids] = np.concatenate([np.append(table, np.int32(-1))[getattr(part, ids)] for part, table in pairs])
    return Graphs(vertex_offsets, child_offsets, children, height, **fields)


def _values(caller: str, name: str, arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [x for x in arrays if x is not None]
    if present and len(present) < len(arrays):
        raise ValueError(
            f"{caller}: got {name} in some graphs only; expected it in all or in none. Write graphs.replace({name}=None) to "
            "leave it out."
        )
    kinds = dict.fromkeys(f"{x.dtype}{list(x.shape[1:])}" for x in present)
    if len(kinds) > 1:
        raise ValueError(f"{caller}: {name}: got {' and '.join(kinds)}; expected the same dtype and shape in all graphs.")
    return np.concatenate(present) if present else None
