"""`Schedule`: what the scheduler decided for a batch, as one vector of integers and a static `Shape`."""

import html
import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from cavs._graphs.checks import array_of
from cavs._graphs.counted import counted, suggestion
from cavs._graphs.draw import bars
from cavs._graphs.graphs import Graphs
from cavs._schedule.shape import FIELDS, OF_ARITY, Shape as Shape, slots_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 60  # levels that a notebook shows

MSG_STACK = (
    "Schedule.{name}: got a stack of schedules, {stack}, such as the parts of a batch; expected one. Write "
    "cavs.memory.sub_batched(loss)(params, [batch]) for parts, jax.lax.map(lambda batch: ..., stack) for others, or a loader "
    "without parts."
)
MSG_ROW = (
    "Schedule.{name}: got one integer of a schedule; expected all. A schedule was taken for a stack of schedules: write "
    "jax.tree.map(lambda *xs: jnp.stack(xs), *schedules) for a stack, also of one schedule."
)

# NumPy's outside `jax.jit` as `cavs.schedule` creates it, JAX's on a device or traced. Type checkers see JAX's.
Integers: TypeAlias = Any


@jax.tree_util.register_pytree_node_class
class Schedule:
    """What to run for one batch of graphs, and in what order. Created by [`cavs.schedule`][].

    A schedule is a pytree with one int32 vector as its leaf, which takes one transfer to the device, and a `Shape` as its
    static part. It can be an argument of a `jax.jit` function. Schedules of equal `shape` share compiled code.

    Vertices are ordered by (height, kind), so that the rows of every task are contiguous in every dynamic tensor (Cavs,
    section 3.3). All arrays are int32. They are padded; G is the number of graphs, Vp is `shape.vertices`, I and E are the
    sums of `shape.inner` and `shape.edges`, K is the number of kinds, T is `shape.tasks`.

    Attributes:
        data: the int32 vector that contains all arrays below.
        shape: the static part.
        num_vertices: int32[], number of vertices.
        num_tasks: int32[], number of tasks.
        num_rounds: int32[], number of rounds; see `round_end`.
        roots: int32[G], row of each graph's root in `inputs` and in the pushes: `pushed[sched.roots]`. An error is raised if a
            graph of the batch has several roots.
        graph_end: int32[G], number of vertices of each graph and all graphs before it.
        row: int32[Vp], row of each vertex in the dynamic tensors; 0, a row of zeros, in padding.
        input_id: int32[Vp], `Graphs.input_id`, -1 in padding, if included by `fields` of [`cavs.schedule`][].
        label: int32[Vp], like `input_id`.
        kind: int32[Vp], like `input_id`.
        leaf_count: int32[K], number of leaves of each kind.
        inner_count: int32[K], number of inner vertices of each kind.
        leaf_row: int32[K], row of the first leaf of each kind in the dynamic tensors.
        leaf_vertex: leaves in schedule order, kind after kind. Padding repeats a vertex.
        inner_vertex: int32[I], inner vertices in schedule order, kind after kind. Padding repeats a vertex.
        first_edge: int32[I], first edge of each inner row, within its kind.
        num_children: int32[I], number of children of each inner row.
        edge_child: int32[E], row of the child in the dynamic tensors.
        edge_owner: int32[E], inner row of the parent, within its kind.
        task_row: int32[T], first row in the dynamic tensors.
        task_start: int32[T], first inner row, within its kind.
        task_size: int32[T], number of vertices.
        task_edge: int32[T], first edge, within its kind.
        task_edges: int32[T], number of edges.
        task_level: int32[T], level, which is the height of the task's vertices.
        round_end: int32[T, K * number of classes]. Tasks run as loops over tasks of equal (kind, class); a round is one pass
            through all loops. The last task + 1 of each loop in each round.
        num_levels: int32[], number of levels of inner vertices. This and the following arrays are the scripts of engine
            `persistent`; see `scripts` of [`cavs.schedule`][].
        part_start: int32[levels * parts + 1], first inner row of each part of the graphs at each level.
        parent_edge: by row of the dynamic tensors, the edge to the parent, or -1. If vertices have several parents, the edges
            to the parents, sorted by child.
        parent_first: by row, the index of its first edge in `parent_edge`, if vertices have several parents.
        parent_count: by row, the number of its edges in `parent_edge`, if vertices have several parents.
    """

    def __init__(self, data: Integers, shape: Shape):
        self.data, self.shape = data, shape

    def tree_flatten(self) -> tuple[tuple[Integers], Shape]:
        return (self.data,), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Shape, children: tuple[Integers]) -> "Schedule":
        return cls(children[0], shape)

    def __getattr__(self, name: str) -> jax.Array:
        """An integer array by name. `first_edge`, `num_children`, ... are computed if all inner vertices have one arity."""
        # `data` and `shape` are missing while a schedule is copied or unpickled.
        shape = self.__dict__.get("shape")
        if shape is not None and name in OF_ARITY and shape.arity:
            return self._of_arity(name)
        if shape is None or name not in slots_of(shape):
            hint = f"Write cavs.schedule(..., fields=({name!r},)) to include it."
            if name not in FIELDS:
                hint = "" if shape is None or name.startswith("_") else suggestion(name, [*FIELDS, *slots_of(shape)])
            raise AttributeError(f"Schedule has no attribute {name!r}. {hint}".removesuffix(". "))
        if name == "roots" and not shape.rooted:
            raise ValueError(
                "Schedule.roots: got a batch in which a graph has several roots; expected one root per graph. Read out with "
                "schedule.graph (the graph of each vertex), or add a vertex that gathers the roots."
            )
        if len(axes := np.shape(self.data)) != 1:
            raise ValueError(MSG_STACK.format(name=name, stack=list(axes[:-1])) if axes else MSG_ROW.format(name=name))
        begin, end, dims = slots_of(shape)[name]
        return self.data[begin:end].reshape(dims)

    @property
    def graph(self) -> jax.Array:
        """(Vp,) graph of each vertex, G in padding: `jax.ops.segment_sum(h, sched.graph, num_graphs)` sums over each graph.

        Computed from `graph_end`.
        """
        vertices, graphs = self.shape.vertices, self.shape.graphs
        if isinstance(self.data, np.ndarray):
            graph: Any = np.arange(graphs + 1, dtype=np.int32).repeat(np.diff(self.graph_end, prepend=0, append=vertices))
            return graph
        vertex = jnp.arange(vertices, dtype=jnp.int32)
        return jnp.searchsorted(self.graph_end, vertex, side="right", method="scan_unrolled").astype(jnp.int32)

    def _of_arity(self, name: str) -> Integers:
        """An array that follows from the numbers of vertices if all inner vertices have the same number of children."""
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
        """Whether the integers are known, rather than traced inside `jax.jit`."""
        return isinstance(self.data, np.ndarray | jax.Array) and not isinstance(self.data, Tracer)

    def host(self) -> "Schedule":
        """Returns the same schedule with its integers in host memory, as a NumPy array.

        Raises:
            ValueError: the schedule is traced.
        """
        if not self.is_concrete:
            raise ValueError(
                "Schedule: got a traced schedule, inside jax.jit; expected one whose integers are known for pad, pad_edges, "
                "num_edges, widths, waste and explain. Call them before the jitted function, and pass what they return."
            )
        return self if isinstance(self.data, np.ndarray) else Schedule(np.asarray(self.data), self.shape)

    @property
    def vertex_mask(self) -> jax.Array:
        """bool[Vp]: `True` at vertices, `False` in padding."""
        xp: Any = np if isinstance(self.data, np.ndarray) else jnp
        return xp.arange(self.shape.vertices) < self.num_vertices

    @overload
    def pad(self, array: np.ndarray, fill: ArrayLike = 0) -> np.ndarray: ...
    @overload
    def pad(self, array: ArrayLike | None, fill: ArrayLike = 0) -> Any: ...
    def pad(self, array: ArrayLike | None, fill: ArrayLike = 0) -> Any:
        """Pads an array with one row per vertex to (Vp, ...), as [`cavs.run`][] expects under `jax.jit`.

        Args:
            array: any[V, ...], a host array, or keys of `jax.random`. `None` (a field that the graphs lack) is an error.
            fill: the value of the padding, which the dtype of the array can hold.

        Returns:
            (Vp, ...) a NumPy array of the same dtype; keys of `jax.random` for keys.

        Raises:
            ValueError: the array does not have one row per vertex, or its dtype cannot hold `fill`.
        """
        return _padded("Schedule.pad", array, fill, int(self.host().num_vertices), self.shape.vertices, "one row per vertex")

    @overload
    def pad_edges(self, array: np.ndarray, fill: ArrayLike = 0) -> np.ndarray: ...
    @overload
    def pad_edges(self, array: ArrayLike | None, fill: ArrayLike = 0) -> Any: ...
    def pad_edges(self, array: ArrayLike | None, fill: ArrayLike = 0) -> Any:
        """Pads an array with one row per edge to (Ep, ...), as `edges` of [`cavs.run`][] under `jax.jit`.

        Args:
            array: any[E, ...], a host array, such as `graphs.edge_attr`, in the order of `graphs.children`; or keys of
                `jax.random`. `None` (a field that the graphs lack) is an error.
            fill: the value of the padding, which the dtype of the array can hold.

        Returns:
            (Ep, ...) a NumPy array of the same dtype; keys of `jax.random` for keys. Ep is the sum of `shape.edges`.

        Raises:
            ValueError: the array does not have one row per edge, or its dtype cannot hold `fill`.
        """
        return _padded("Schedule.pad_edges", array, fill, self.num_edges, self.shape.all_edges, "one row per edge")

    @property
    def num_edges(self) -> int:
        """The number of edges. Not for a traced schedule."""
        host = self.host()
        return int(host.task_edges[: int(host.num_tasks)].sum())

    @property
    def widths(self) -> np.ndarray:
        """(levels,) number of vertices of each level, leaves first. Not for a traced schedule."""
        host = self.host()
        tasks = int(host.num_tasks)
        inner = np.bincount(host.task_level[:tasks], host.task_size[:tasks], minlength=1)
        inner[0] = host.leaf_count.sum()
        return inner.astype(int) if int(host.num_vertices) else np.zeros(0, int)

    @property
    def waste(self) -> float:
        """The fraction of padding among the rows of leaves and of tasks. Not for a traced schedule."""
        table = task_table(self.host())
        rows = int(table["width"].sum())
        return 1 - int(table["size"].sum()) / rows if rows else 0.0

    def explain(self) -> str:
        """Returns how many rows are computed for how many vertices, for each kind and level. Not for a traced schedule."""
        return explain_padding(self.host())

    def plot(self, path: str | os.PathLike[str] | None = None, graphs: Graphs | None = None) -> "Figure":
        """Draws the levels of the batch, their tasks and their padding. Needs matplotlib.

        Args:
            path: a file to write, which appears when it is complete; its suffix chooses the format (`.png`, `.svg`, `.pdf`).
            graphs: the graphs of the batch, to draw them too, coloured by level. If they have more than 600 vertices, only the
                first ones are drawn, and the picture says so; a single graph may have 20,000.

        Returns:
            The matplotlib figure. A notebook shows it as an image.

        Raises:
            TypeError: `path` is no path, or `graphs` are no graphs.
            ValueError: the schedule is traced, or of no graphs; or `graphs` have other vertices.
        """
        from cavs._schedule.plot import plot_schedule  # imports matplotlib

        return plot_schedule(self, path, graphs)

    def _repr_html_(self) -> str:
        """What a notebook shows: a bar for each level, padding in grey, and the text of `print`."""
        text = f"<code>{html.escape(repr(self))}</code>"
        if not self.is_concrete or self.data.ndim != 1 or len(self.widths) > MOST_BARS:
            return text
        table, widths = task_table(self.host()), self.widths
        padding = np.bincount(table["level"], table["width"] - table["size"], minlength=len(widths))[: len(widths)]
        return f"<div>{text}<br>{bars(widths.tolist(), padding.astype(int).tolist())}</div>"

    def __repr__(self) -> str:
        if not self.is_concrete or self.data.ndim != 1:  # traced, or a stack of schedules
            return f"Schedule({self.shape})"
        widths = self.widths
        shown = ", ".join(map(str, widths[:12])) + (", ..." if len(widths) > 12 else "")
        host = self.host()
        total = in_total(padding_of(host))
        return (
            f"Schedule({counted(self.shape.graphs, 'graph')}, {counted(int(host.num_vertices), 'vertex')}, "
            f"{counted(len(widths), 'level')} of widths [{shown}], {counted(int(host.num_tasks), 'task')}; leaves are "
            f"{total.leaves}, vertices with children {total.levels} in tasks, {total.batches} before and after; on engine "
            "native only XLA computes padding: in the lazy part of F, and in what the library lacks)"
        )


def _padded(function: str, array: ArrayLike | None, fill: ArrayLike, count: int, size: int, expected: str) -> Any:
    """Pads an array of `count` rows to `size` rows of `fill`; `function` and `expected` are for an error message."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        bits = _padded(function, jax.random.key_data(array), fill, count, size, expected)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    rows = array_of(f"{function}: array", array)
    if rows.shape[:1] != (count,):
        method = function.removeprefix("Schedule.")
        got, write = "None" if array is None else f"shape {rows.shape}", ""
        if isinstance(array, dict):
            got, write = "a dict", f" For a pytree of arrays, write jax.tree.map(sched.{method}, rows)."
        raise ValueError(f"{function}: array: got {got}; expected ({count}, ...), {expected}.{write}")
    if not _holds(rows.dtype, fill):
        raise ValueError(
            f"{function}: fill: got {fill!r}; expected a value of {rows.dtype}, which the array has. Write array.astype(...), "
            "or another fill."
        )
    out = np.full((size, *rows.shape[1:]), fill, rows.dtype.newbyteorder("="))  # JAX refuses any other byte order
    out[:count] = rows
    return out


def _holds(dtype: np.dtype, value: ArrayLike) -> bool:
    """Whether an array of a dtype can hold the number `value`. NumPy would wrap integers around, and drop imaginary parts."""
    number = np.asarray(value)
    if dtype.kind in "OSU":
        return True
    if number.dtype.kind in "OSU" or number.dtype.kind == "c" != dtype.kind:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        held = number.astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):  # which rounds
        return bool((np.isfinite(held) | ~np.isfinite(number)).all())
    return np.array_equal(held, number)


@jax.tree_util.register_pytree_node_class
class ExportedSchedule(Schedule):
    """A traced schedule of code that runs in other processes: `run` uses neither host callbacks nor engine `native` for it.

    A vertex with too many children gives NaN instead of an error.
    """


def check_schedule(function: str, sched: object) -> None:
    """Raises `TypeError` if the argument `sched` of `function` is something else."""
    if isinstance(sched, Schedule):
        return
    got = type(sched).__name__
    hint = "Write cavs.schedule(graphs)."
    if got == "Batches":  # of `cavs._feed`, which imports this room
        hint = "Write @cavs.data.step above the function of one batch, or cavs.data.Loader(..., steps=1)."
    raise TypeError(f"{function}: sched: got a {got}; expected a cavs.Schedule. {hint}")


# --- padding: rows of vertices, and rows that are computed or allocated for them; of schedules in host memory ---


class Filled(NamedTuple):
    """Rows of a stage."""

    vertices: int  # that the stage computes
    rows: int  # that it computes for them

    def __str__(self) -> str:
        share = f" ({100 * (1 - self.vertices / self.rows):.1f} % padding)" if self.rows else ""
        return f"{self.vertices} of {counted(self.rows, 'row')}{share}"


class KindPadding(NamedTuple):
    """The padding of the vertices of one kind."""

    leaves: Filled  # one batch
    batches: Filled  # vertices with children in the eager and in the lazy part: one batch each, of all rows that are allocated
    levels: Filled  # vertices with children in the tasks of the levels


def task_table(sched: Schedule) -> dict[str, np.ndarray]:
    """Returns facts about each task that runs, where the leaves of each kind are one task and come first.

    Returns:
        (tasks,) ints: `level`, `kind`, the number of vertices (`size`), and the number to which they are padded (`width`).
    """
    tasks, rounds, shape = int(sched.num_tasks), int(sched.num_rounds), sched.shape
    kinds, widths = len(shape.kinds), [w for w, _ in shape.classes]
    per_loop = np.diff(np.asarray(sched.round_end)[:rounds].ravel(), prepend=0)
    leaves = np.array(shape.leaves) > 0

    def of_tasks(of_leaves: np.ndarray, of_loops: np.ndarray) -> np.ndarray:
        return np.concatenate([of_leaves, np.repeat(np.tile(of_loops, rounds), per_loop).astype(int)])

    return {
        "level": np.concatenate([np.zeros(leaves.sum(), int), np.asarray(sched.task_level)[:tasks]]),
        "kind": of_tasks(np.flatnonzero(leaves), np.repeat(np.arange(kinds), len(widths))),
        "size": np.concatenate([np.asarray(sched.leaf_count)[leaves], np.asarray(sched.task_size)[:tasks]]),
        "width": of_tasks(np.array(shape.leaves)[leaves], np.tile(widths, kinds)),
    }


def padding_of(sched: Schedule) -> list[KindPadding]:
    """Returns the padding of each kind."""
    table, shape, by_kind = task_table(sched), sched.shape, []
    for kind, (leaves, inner) in enumerate(zip(sched.leaf_count.tolist(), sched.inner_count.tolist(), strict=True)):
        rows = int(table["width"][(table["kind"] == kind) & (table["level"] > 0)].sum())
        by_kind.append(KindPadding(Filled(leaves, shape.leaves[kind]), Filled(inner, shape.inner[kind]), Filled(inner, rows)))
    return by_kind


def in_total(by_kind: list[KindPadding]) -> KindPadding:
    """Returns the padding of all kinds together."""
    return KindPadding(*(Filled(*map(sum, zip(*stage, strict=True))) for stage in zip(*by_kind, strict=True)))


def explain_padding(sched: Schedule) -> str:
    """Returns the padding of each kind and level as lines of text."""
    table, by_kind, lines = task_table(sched), padding_of(sched), []
    inner = np.flatnonzero(table["level"])
    for kind, (name, padding) in enumerate(zip(sched.shape.kinds, by_kind, strict=True)):
        lines += [f"Kind {name!r}:"] * bool(name)
        lines.append(f"leaves, one batch: {padding.leaves}")
        lines.append(f"vertices with children, one batch in each of the eager and the lazy part: {padding.batches}")
        lines.append(f"vertices with children, in tasks: {padding.levels}")
        tasks_of_kind = inner[table["kind"][inner] == kind]  # sorted by level
        levels, begins = np.unique(table["level"][tasks_of_kind], return_index=True)
        for level, of_level in zip(levels.tolist(), np.split(tasks_of_kind, begins)[1:], strict=True):
            widths = table["width"][of_level].tolist()
            tasks = " + ".join(f"{widths.count(w)} x {w}" if widths.count(w) > 1 else f"{w}" for w in dict.fromkeys(widths))
            lines.append(f"  level {level}: {Filled(int(table['size'][of_level].sum()), sum(widths))}, tasks {tasks}")
    return "\n".join(lines)
