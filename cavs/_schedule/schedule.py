"""`Schedule`: what the scheduler decided for a batch, as one vector of integers; and its static `Shape`."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cavs._graphs.graphs import Graphs
from cavs.kernels import PARTS as PARTS

FIELDS = ("input_id", "label", "kind")  # of `Graphs`, that may come along
# Not sent where all inner vertices have as many children.
_OF_ARITY = ("first_edge", "num_children", "edge_owner", "task_edge", "task_edges")
# A schedule's integers are a multiple of so many: 64 bytes, at which XLA reads NumPy's memory in place on a CPU.
ALIGNED = 16


class Shape(NamedTuple):
    """The static part of a `Schedule`: two schedules of one shape run the same compiled code."""

    vertices: int  # rows of inputs and pushes, padded
    leaves: tuple[int, ...]  # leaf rows, padded, per kind
    inner: tuple[int, ...]  # inner rows, padded, per kind
    edges: tuple[int, ...]  # edges below the inner rows, padded, per kind
    tasks: int  # tasks, padded
    graphs: int  # graphs, exact
    classes: tuple[tuple[int, int], ...]  # (vertices, edges) of a task, widest first
    kinds: tuple[str, ...]  # names of the kinds; ("",) where there is one
    rooted: bool  # every graph has exactly one root
    fan_in: int  # the largest number of children; 8 stands for more than 4
    arity: int  # children of every inner vertex of the data set, at most 4; 0 where they differ
    windows: tuple[int, int, int]  # windows of the backward's lazy batching; inner rows and edges of each, at most
    fields: tuple[str, ...] = ()  # of the graphs, that come along
    # Scripts of the persistent engine (`_schedule.group_rows`); without any `levels` is 0.
    levels: int = 0  # levels of inner vertices, padded
    forest: bool = True  # no vertex has two parents

    @property
    def pad(self) -> int:
        """Rows of zeros before and of slack after the vertices in every dynamic tensor: the widest task."""
        return max(w for w, _ in self.classes)

    @property
    def window_rows(self) -> tuple[int, ...]:
        """Inner rows of each kind in a window of lazy batching."""
        return tuple(min(n, self.windows[1]) for n in self.inner)

    @property
    def window_edges(self) -> tuple[int, ...]:
        """Edges of each kind in a window of lazy batching."""
        return tuple(min(n, self.windows[2]) for n in self.edges)

    @property
    def most_children(self) -> int:
        """Children that a vertex of such a batch has at most: as many as there is room for in a task of few vertices."""
        a_row = {edges // width for width, edges in self.classes}
        return min(a_row) if len(a_row) == 1 else self.classes[-1][1]

    @property
    def rows(self) -> int:
        """Rows of the dynamic tensors that hold scattered states."""
        return 2 * self.pad + sum(self.leaves) + sum(self.inner)


@functools.lru_cache(maxsize=256)
def layout_of(shape: Shape) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Where each integer array lies in the packed vector: name -> (begin, end, array shape)."""
    kinds, inner, edges = len(shape.kinds), sum(shape.inner), sum(shape.edges)
    fields = {
        "num_vertices": (),
        "num_tasks": (),
        "num_rounds": (),
        "num_windows": (),
        "leaf_count": (kinds,),
        "inner_count": (kinds,),
        "leaf_row": (kinds,),
        "leaf_vertex": (sum(shape.leaves),),
        "inner_vertex": (inner,),
        "row": (shape.vertices,),
        "graph_end": (shape.graphs,),
        "edge_child": (edges,),
        "first_edge": (inner,),
        "num_children": (inner,),
        "edge_owner": (edges,),
        "task_row": (shape.tasks,),
        "task_start": (shape.tasks,),
        "task_size": (shape.tasks,),
        "task_edge": (shape.tasks,),
        "task_edges": (shape.tasks,),
        "task_level": (shape.tasks,),
        "round_end": (shape.tasks, kinds * len(shape.classes)),
        "window_round": (shape.windows[0] + 1,),
        "window_start": (shape.windows[0], kinds),
        "window_edge": (shape.windows[0], kinds),
        "roots": (shape.graphs,),
        **dict.fromkeys(shape.fields, (shape.vertices,)),
    }
    if shape.arity:
        fields = {name: dims for name, dims in fields.items() if name not in _OF_ARITY}
    if shape.levels:
        fields |= {"num_levels": (), "part_start": (shape.levels * PARTS + 1,), "parent_edge": (shape.rows,)}
        if not shape.forest:
            fields |= {"parent_edge": (edges,), "parent_first": (shape.rows,), "parent_count": (shape.rows,)}
    layout, offset = {}, 0
    for name, dims in fields.items():
        begin, offset = offset, offset + math.prod(dims)
        layout[name] = (begin, offset, dims)
    return layout


def end_of(shape: Shape) -> int:
    """Integers of the packed vector that are in use."""
    return max(end for _, end, _ in layout_of(shape).values())


def length_of(shape: Shape) -> int:
    """Integers in the packed vector."""
    return -(-end_of(shape) // ALIGNED) * ALIGNED


@jax.tree_util.register_pytree_node_class
class Schedule:
    """What to run, in what order, for one batch of graphs: integers only. Made by [`cavs.schedule`][].

    A pytree with ONE int32 vector as its leaf (one transfer to the device) and a `Shape` as static part, so it passes
    through `jax.jit`; schedules of equal `shape` share the compiled code.

    Vertices are ordered by (height, kind), so that the rows of every task are contiguous in every dynamic tensor
    (Cavs section 3.3). Integer arrays, as attributes (padded; Vp = `shape.vertices`):

    - `num_vertices`, `num_tasks`, `num_rounds`: scalars.
    - `roots`: (G,) row of the one root of each graph in `inputs` and in the pushes.
    - `graph_end`: (G,) vertices of each graph and those before it; and, not in the vector, as it follows from that,
      `graph`: (Vp,) the graph of each vertex; G in padding: `jax.ops.segment_sum(h, sched.graph, num_graphs)` reads out.
    - `row`: (Vp,) row of each vertex in the dynamic tensors; 0, a row of zeros, in padding.
    - `input_id`, `label`, `kind`: (Vp,) those of the graphs, -1 in padding, where `cavs.schedule` was asked for them.
    - `leaf_vertex`, `inner_vertex`: vertices in schedule order, kind after kind; padding repeats a real vertex.
    - `first_edge`, `num_children`: per inner row; `edge_child` (dynamic tensor row), `edge_owner` (inner row): per edge.
    - `task_row`, `task_start`, `task_size`, `task_edge`, `task_edges`, `task_level`: per task: first row in the dynamic
      tensors, first inner row of its kind, vertices, first edge, edges, height.
      Where all inner vertices have `shape.arity` children, `first_edge`, `num_children`, `edge_owner`, `task_edge` and
      `task_edges` follow from it and are not in the vector.
    - `round_end`: (rounds, kinds x classes) the tasks run as loops over equal (kind, class); a round is one pass
      through all of them, and this is each loop's last task + 1.
    - `num_levels`, `part_start` (levels x parts + 1): first inner row of each part of the graphs at each level; and
      `parent_edge`: by row of the dynamic tensors, the edge to the parent, -1 without; where vertices have several
      parents, their edges by child, `parent_count` of them from `parent_first`. Only with scripts for the GPU's engine.
    - `window_round`, `window_start`, `window_edge`: first round, inner rows and edges of each window of lazy batching.
    """

    def __init__(self, data: Any, shape: Shape):
        self.data, self.shape = data, shape

    def tree_flatten(self) -> tuple[tuple[Any], Shape]:
        return (self.data,), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Shape, children: tuple[Any]) -> "Schedule":
        return cls(children[0], shape)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ARITY and self.shape.arity:
            return self._of_arity(name)
        if name.startswith("_") or name in ("data", "shape") or name not in layout_of(self.shape):
            asked = f"; it comes along with cavs.schedule(..., fields=({name!r},))" if name in FIELDS else ""
            raise AttributeError(f"Schedule has no attribute {name!r}{asked}")
        if name == "roots" and not self.shape.rooted:
            raise ValueError(
                "schedule.roots: a graph of this batch has several roots, so there is no one root row per graph. "
                "Read out with schedule.graph (the graph of each vertex), or push from a vertex that gathers the roots."
            )
        begin, end, dims = layout_of(self.shape)[name]
        return self.data[begin:end].reshape(dims)

    @property
    def graph(self) -> Any:
        """(Vp,) the graph of each vertex; G in padding."""
        vertices, graphs = self.shape.vertices, self.shape.graphs
        if isinstance(self.data, np.ndarray):
            return np.arange(graphs + 1, dtype=np.int32).repeat(np.diff(self.graph_end, prepend=0, append=vertices))
        vertex = jnp.arange(vertices, dtype=jnp.int32)
        return jnp.searchsorted(self.graph_end, vertex, side="right", method="scan_unrolled").astype(jnp.int32)

    def _of_arity(self, name: str) -> Any:
        """What follows from the number of vertices where all have the same number of children."""
        arity, out = self.shape.arity, []
        if name in ("task_edge", "task_edges"):
            return (self.task_start if name == "task_edge" else self.task_size) * arity
        xp: Any = np if isinstance(self.data, np.ndarray) else jnp
        for size, edges, count in zip(self.shape.inner, self.shape.edges, self.inner_count, strict=True):
            row, owner = xp.arange(size, dtype=np.int32), xp.arange(edges, dtype=np.int32) // arity
            if name == "first_edge":
                out.append(xp.where(row < count, row * arity, 0))
            elif name == "num_children":
                out.append(xp.where(count > 0, xp.full_like(row, arity), 0))
            else:
                out.append(xp.where(owner < count, owner, size))
        return xp.concatenate(out).astype(np.int32)

    @property
    def is_concrete(self) -> bool:
        """Whether the integers are known (outside `jax.jit`) rather than traced."""
        return not isinstance(self.data, Tracer)

    def host(self) -> "Schedule":
        """The same schedule with its integers in host memory; not for a traced one."""
        return self if isinstance(self.data, np.ndarray) else Schedule(np.asarray(self.data), self.shape)

    @property
    def vertex_mask(self) -> Any:
        """(Vp,) bool: `True` at vertices, `False` in padding."""
        xp: Any = np if isinstance(self.data, np.ndarray) else jnp
        return xp.arange(self.shape.vertices) < self.num_vertices

    def pad(self, array: Any, fill: Any = 0) -> Any:
        """A host array (V, ...) with one row per vertex, padded with `fill` to (Vp, ...), as `run` under jit wants it.

        Keys of `jax.random` stay keys.
        """
        if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return jax.random.wrap_key_data(self.pad(jax.random.key_data(array)), impl=jax.random.key_impl(array))
        array, vertices = np.asarray(array), int(self.host().data[0])  # `num_vertices` lies first
        if array.shape[:1] != (vertices,):
            raise ValueError(f"schedule.pad: array has shape {array.shape}, wanted ({vertices}, ...).")
        out = np.full((self.shape.vertices, *array.shape[1:]), fill, array.dtype)
        out[: len(array)] = array
        return out

    @property
    def widths(self) -> np.ndarray:
        """(levels,) vertices at each height, leaves first. Outside jit only."""
        here = self.host()
        tasks = int(here.num_tasks)
        inner = np.bincount(here.task_level[:tasks], here.task_size[:tasks], minlength=1)
        inner[0] = here.leaf_count.sum()
        return inner.astype(int) if int(here.num_vertices) else np.zeros(0, int)

    @property
    def waste(self) -> float:
        """Share of the rows that tasks execute which are padding. Outside jit only."""
        here = self.host()
        rounds = int(here.num_rounds)
        per_loop = np.diff(here.round_end[:rounds].ravel(), prepend=0)
        widths = np.tile(np.array([w for w, _ in self.shape.classes]), len(self.shape.kinds) * rounds)
        rows = int((per_loop * widths).sum()) + sum(self.shape.leaves)
        return 1 - int(here.num_vertices) / rows if rows else 0.0

    def plot(self, path: str | None = None, graphs: Graphs | None = None) -> Any:
        """A picture of the levels and widths of the batch; with `graphs`, of its first graph coloured by level too.

        Returns the matplotlib figure; writes it where `path` is given.
        """
        from cavs._schedule.plot import plot_schedule  # matplotlib only where it is used

        return plot_schedule(self, path, graphs)

    def __repr__(self) -> str:
        if not self.is_concrete:
            return f"Schedule({self.shape})"
        widths = self.widths
        shown = ", ".join(map(str, widths[:12])) + (", ..." if len(widths) > 12 else "")
        return (
            f"Schedule({self.shape.graphs} graphs, {int(self.host().num_vertices)} vertices, {len(widths)} levels of widths "
            f"[{shown}], {int(self.host().num_tasks)} tasks, {100 * self.waste:.0f}% padding)"
        )
