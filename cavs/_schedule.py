"""The BFS scheduler: Cavs Algorithm 1 as one counting sort by height, and the `Schedule` it returns."""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from cavs._graphs import Graphs

# A task costs about as much as this many rows more than it holds (loop, slices, reading the weights): measured on CPU,
# Tree-LSTM, hidden 64 (about 6 rows) to 256 (about 12 rows). It decides between one wide and several narrow tasks.
TASK_OVERHEAD_ROWS = 8
# No task is narrower. XLA turns a gather of ONE row into a slice, fuses it into whatever reads it, and then has to copy
# the whole tensor in every iteration of the loop, because the tensor is written there too (seen with JAX 0.10.2 on CPU).
SMALLEST_TASK = 2
# Inner vertices whose parameter gradients make one lazy product. 4 to 8 thousand saturate it, but each window costs a pass
# over its tensors besides (Tree-FC, 16,320 vertices, hidden 256: 91 ms a step in four windows, 65 ms in one).
LAZY_WINDOW = 32768
# Fan-in up to which a task of W vertices simply gets room for W * fan-in edges.
SMALL_FAN_IN = 4
# Children of one vertex above which it becomes a task of its own.
LARGE_FAN_IN = 64


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
    fan_in: int  # the largest number of children, rounded up to a power of two; 8 stands for more than 4
    windows: tuple[int, int, int]  # windows of the backward's lazy batching; inner rows and edges of each, at most

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
    def rows(self) -> int:
        """Rows of the dynamic tensors that hold scattered states."""
        return 2 * self.pad + sum(self.leaves) + sum(self.inner)


@functools.lru_cache(maxsize=256)
def _layout(shape: Shape) -> dict[str, tuple[int, int, tuple[int, ...]]]:
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
        "graph": (shape.vertices,),
        "first_edge": (inner,),
        "num_children": (inner,),
        "edge_child": (edges,),
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
    }
    layout, offset = {}, 0
    for name, dims in fields.items():
        begin, offset = offset, offset + math.prod(dims)
        layout[name] = (begin, offset, dims)
    return layout


@jax.tree_util.register_pytree_node_class
class Schedule:
    """What to run, in what order, for one batch of graphs: integers only. Made by [`cavs.schedule`][].

    A pytree with ONE int32 vector as its leaf (one transfer to the device) and a `Shape` as static part, so it passes
    through `jax.jit`; schedules of equal `shape` share the compiled code.

    Vertices are ordered by (height, kind), so that the rows of every task are contiguous in every dynamic tensor
    (Cavs section 3.3). Integer arrays, as attributes (padded; Vp = `shape.vertices`):

    - `num_vertices`, `num_tasks`, `num_rounds`: scalars.
    - `roots`: (G,) row of the one root of each graph in `inputs` and in the pushes.
    - `graph`: (Vp,) the graph of each vertex; G in padding: `jax.ops.segment_sum(h, sched.graph, num_graphs)` reads out.
    - `row`: (Vp,) row of each vertex in the dynamic tensors; 0, a row of zeros, in padding.
    - `leaf_vertex`, `inner_vertex`: vertices in schedule order, kind after kind; padding repeats a real vertex.
    - `first_edge`, `num_children`: per inner row; `edge_child` (dynamic tensor row), `edge_owner` (inner row): per edge.
    - `task_row`, `task_start`, `task_size`, `task_edge`, `task_edges`, `task_level`: per task: first row in the dynamic
      tensors, first inner row of its kind, vertices, first edge, edges, height.
    - `round_end`: (rounds, kinds x classes) the tasks run as loops over equal (kind, class); a round is one pass
      through all of them, and this is each loop's last task + 1.
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
        if name.startswith("_") or name in ("data", "shape") or name not in _layout(self.shape):
            raise AttributeError(f"Schedule has no attribute {name!r}")
        if name == "roots" and not self.shape.rooted:
            raise ValueError(
                "schedule.roots: a graph of this batch has several roots, so there is no one root row per graph. "
                "Read out with schedule.graph (the graph of each vertex), or push from a vertex that gathers the roots."
            )
        begin, end, dims = _layout(self.shape)[name]
        return self.data[begin:end].reshape(dims)

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
        return self.graph < self.shape.graphs

    def pad(self, array: Any, fill: Any = 0) -> np.ndarray:
        """A host array (V, ...) with one row per vertex, padded with `fill` to (Vp, ...), as `run` under jit wants it."""
        array, vertices = np.asarray(array), int(self.host().num_vertices)
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
        from cavs._plot import plot_schedule  # matplotlib only where it is used

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


def schedule(
    graphs: Graphs, *, policy: str = "batching", kinds: bool = True, exact: bool = False, window: int = LAZY_WINDOW
) -> Schedule:
    """Schedules a batch of graphs: Cavs Algorithm 1, where task t is the set of all activated vertices.

    A vertex is activated once its children are evaluated, so its level is its height, known since reading: the
    breadth-first search of a batch is a counting sort, and the backward replays the tasks in reverse.

    **Arguments:**

    - `graphs`: the batch.
    - `policy`: `"batching"` evaluates whole levels (cut into tasks of a few fixed widths); `"serial"` one vertex at a
      time, Cavs' baseline.
    - `kinds`: whether tasks hold one kind each where the graphs have kinds; `False` schedules all as one kind, for a
      vertex function that treats kinds alike.
    - `exact`: sizes are rounded up to a ladder of buckets (at most 19 % and 8 more) so that batches share compiled code;
      `True` keeps exact sizes instead: no padding, but every new size compiles.

    - `window`: the backward batches parameter gradients lazily over windows of tasks of at most this many inner vertices
      (one product per weight and window). More needs memory for the cotangents of all of them.

    **Raises:** `ValueError` for an unknown policy or a window below 256, `TypeError` where `graphs` is not a `cavs.Graphs`.
    """
    if not isinstance(graphs, Graphs):
        raise TypeError(
            f"schedule: graphs is a {type(graphs).__name__}, wanted a cavs.Graphs, such as cavs.read_trees(path)[:64]."
        )
    if policy not in ("batching", "serial"):
        raise ValueError(f"schedule: policy is {policy!r}, wanted 'batching' or 'serial'.")
    if not isinstance(window, int) or window < 256:
        raise ValueError(f"schedule: window is {window!r}, wanted an int >= 256: inner vertices whose gradients are batched.")
    num_vertices, num_graphs = graphs.num_vertices, len(graphs)
    kind = graphs.kind if kinds else None
    names = _kind_names(graphs, kind) if kind is not None else ("",)
    num_kinds = len(names)

    # 1. Vertices by (height, kind). 16-bit keys make numpy's stable sort a counting (radix) sort.
    key = graphs.height if kind is None else graphs.height * num_kinds + kind
    levels = int(graphs.height.max(initial=0)) + 1
    if levels * num_kinds < 1 << 16:
        key = key.astype(np.uint16)
    order = np.argsort(key, kind="stable")
    position = np.empty(num_vertices, np.int64)
    position[order] = np.arange(num_vertices)
    counts = np.bincount(key, minlength=levels * num_kinds).reshape(levels, num_kinds)
    leaf_count, inner_counts = counts[0], counts[1:]
    inner_count = inner_counts.sum(0)
    num_leaves = int(leaf_count.sum())
    inner = order[num_leaves:]
    if kind is not None:
        inner = inner[np.argsort(kind[inner].astype(np.uint16), kind="stable")]

    # 2. Edges in the order of their owners.
    first = graphs.child_offsets[inner]
    num_children = graphs.child_offsets[inner + 1] - first
    edge_end = np.cumsum(num_children)
    num_edges = graphs.num_edges
    picked = np.arange(num_edges) + np.repeat(first - edge_end + num_children, num_children)
    sizes = np.diff(graphs.vertex_offsets)
    graph = np.repeat(np.arange(num_graphs), sizes)
    child = graphs.children + np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.child_offsets[graphs.vertex_offsets]))
    has_parent = np.zeros(num_vertices, bool)
    has_parent[child] = True
    root_rows = np.flatnonzero(~has_parent)
    rooted = len(root_rows) == num_graphs and bool((graph[root_rows] == np.arange(num_graphs)).all())

    # 3. Sizes.
    size = int if exact else bucket if num_kinds == 1 else lambda n: bucket(n) if n else 0
    padded_leaves = tuple(size(n) for n in leaf_count.tolist())
    padded_inner = tuple(size(n) for n in inner_count.tolist())
    kind_edges = np.bincount(np.repeat(np.arange(num_kinds), inner_count), num_children, minlength=num_kinds).astype(int)
    classes = _classes(sum(padded_inner), int(num_children.max(initial=1)), policy)
    tasks = _tasks(counts, num_children, inner_count, classes, serial=policy == "serial")
    num_tasks = len(tasks["class"])
    padded_edges = tuple(n * _power_of_two(-(-e // max(n, 1))) for n, e in zip(padded_inner, kind_edges.tolist(), strict=True))
    windows, window_of = _windows(tasks, padded_inner, padded_edges, classes, window)
    shape = Shape(
        vertices=sum(padded_leaves) + sum(padded_inner),
        leaves=padded_leaves,
        inner=padded_inner,
        edges=padded_edges,
        tasks=max(128, 4 ** int(np.ceil(np.log(max(num_tasks, 1)) / np.log(4)))) if not exact else num_tasks,
        graphs=num_graphs,
        classes=classes,
        kinds=names,
        rooted=rooted,
        fan_in=min(_power_of_two(int(num_children.max(initial=0))), 2 * SMALL_FAN_IN),
        windows=windows,
    )

    # 4. Pack. Padding of per-vertex arrays repeats the first real entry: it computes what a real row computes.
    layout = _layout(shape)
    data = np.zeros(layout["roots"][1], np.int32)
    out = SimpleNamespace(**{name: data[begin:end].reshape(dims) for name, (begin, end, dims) in layout.items()})
    pad = shape.pad
    out.num_vertices[...] = num_vertices
    out.num_tasks[...] = num_tasks
    out.leaf_count[:] = leaf_count
    out.inner_count[:] = inner_count
    leaf_start = np.cumsum(leaf_count) - leaf_count
    out.leaf_row[:] = pad + leaf_start
    rows = position + pad
    out.row[:num_vertices] = rows
    out.graph[:num_vertices] = graph
    out.graph[num_vertices:] = num_graphs
    edge_child = rows[child[picked]] if num_edges else np.zeros(0, np.int64)
    starts = np.cumsum(inner_count) - inner_count
    edge_starts = np.cumsum(kind_edges) - kind_edges
    leaf_at = inner_at = edge_at = 0
    for k in range(num_kinds):
        _fill(out.leaf_vertex, leaf_at, shape.leaves[k], order[leaf_start[k] : leaf_start[k] + leaf_count[k]])
        here = slice(starts[k], starts[k] + inner_count[k])
        _fill(out.inner_vertex, inner_at, shape.inner[k], inner[here])
        _fill(out.first_edge, inner_at, shape.inner[k], edge_end[here] - num_children[here] - edge_starts[k])
        _fill(out.num_children, inner_at, shape.inner[k], num_children[here])
        edges = slice(edge_starts[k], edge_starts[k] + kind_edges[k])
        _fill(out.edge_child, edge_at, shape.edges[k], edge_child[edges])
        owner = out.edge_owner[edge_at : edge_at + shape.edges[k]]
        owner[: kind_edges[k]] = np.repeat(np.arange(inner_count[k]), num_children[here])
        owner[kind_edges[k] :] = shape.inner[k]
        leaf_at, inner_at, edge_at = leaf_at + shape.leaves[k], inner_at + shape.inner[k], edge_at + shape.edges[k]
    out.task_row[:num_tasks] = tasks["row"] + pad + num_leaves
    out.task_start[:num_tasks] = tasks["start"]
    out.task_size[:num_tasks] = tasks["size"]
    out.task_edge[:num_tasks] = tasks["edge"]
    out.task_edges[:num_tasks] = tasks["edges"]
    out.task_level[:num_tasks] = tasks["level"]
    ends, first_rounds = _rounds(tasks["class"], window_of, num_kinds * len(classes))
    out.num_rounds[...] = len(ends)
    out.round_end[: len(ends)] = ends
    out.num_windows[...] = len(first_rounds)
    out.window_round[: len(first_rounds)] = first_rounds
    out.window_round[len(first_rounds) :] = len(ends)
    if windows[0] > 1:
        task_kind = tasks["class"] // len(classes)
        for k in range(num_kinds):
            mine = np.flatnonzero(task_kind == k)
            if len(mine):
                firsts = mine[np.searchsorted(window_of[mine], np.arange(len(first_rounds))).clip(max=len(mine) - 1)]
                out.window_start[: len(firsts), k] = tasks["start"][firsts]
                out.window_edge[: len(firsts), k] = tasks["edge"][firsts]
    if rooted:
        out.roots[:] = root_rows
    return Schedule(data, shape)


def bucket(n: int) -> int:
    """`n` rounded up to a geometric ladder of ratio 2^(1/4), in multiples of 8: at most 19 % and 8 more."""
    if n <= 8:
        return 8
    octave = 1 << ((n - 1).bit_length() - 1)
    return next(step for x in (1.19, 1.415, 1.682, 2.0) if (step := -(-int(octave * x) // 8) * 8) >= n)


def _power_of_two(n: int) -> int:
    return 1 << max(0, int(n) - 1).bit_length()


def _fill(out: np.ndarray, at: int, size: int, values: np.ndarray) -> None:
    out[at : at + len(values)] = values
    out[at + len(values) : at + size] = values[0] if len(values) else 0


def _kind_names(graphs: Graphs, kind: np.ndarray) -> tuple[str, ...]:
    return graphs.kind_names or tuple(str(k) for k in range(int(kind.max(initial=0)) + 1))


def _classes(num_inner: int, fan_in: int, policy: str) -> tuple[tuple[int, int], ...]:
    """The (vertices, edges) that tasks are padded to, widest first: a ladder of ratio 2 to 4.

    Equal for all batches of a bucket unless the largest fan-in crosses a power of two.
    """
    fan = _power_of_two(fan_in)
    room = min(fan, SMALL_FAN_IN)
    if policy == "serial":
        return ((SMALLEST_TASK, SMALLEST_TASK * fan),)
    top = 4 if num_inner <= 64 else 64 if num_inner <= 512 else 128 if num_inner <= 8192 else 1024
    widths = (1024, 256, 64, 16, 4, SMALLEST_TASK) if top == 1024 else (128, 64, 16, 4, SMALLEST_TASK)
    ladder = [w for w in widths if w <= top]
    classes = [(w, w * room) for w in ladder]
    if fan > SMALL_FAN_IN:
        # One vertex of 16 children, then of 64, fits the narrowest tasks; the same classes for all fan-ins up to that.
        classes[-1:] = [(SMALLEST_TASK, 4 * SMALL_FAN_IN), (SMALLEST_TASK, LARGE_FAN_IN)]
    if fan > LARGE_FAN_IN:
        classes.append((SMALLEST_TASK, 2 * fan))
    return tuple(classes)


@functools.lru_cache(maxsize=32)
def _decomposition(widths: tuple[int, ...]) -> np.ndarray:
    """For n = 0 .. widths[0]: how many tasks of each width cover n vertices at the least cost, the last one padded."""
    top = widths[0]
    best = np.full(top + 1, np.inf)
    counts = np.zeros((top + 1, len(widths)), np.int64)
    best[0] = 0
    for n in range(1, top + 1):
        for i, w in enumerate(widths):
            cost = w + TASK_OVERHEAD_ROWS + best[max(n - w, 0)]
            if cost < best[n]:
                best[n] = cost
                counts[n] = counts[max(n - w, 0)]
                counts[n, i] += 1
    return counts


def _tasks(
    counts: np.ndarray,
    num_children: np.ndarray,
    inner_count: np.ndarray,
    classes: tuple[tuple[int, int], ...],
    serial: bool,
) -> dict[str, np.ndarray]:
    """Levels cut into tasks. `row` counts from the first inner row; `start` and `edge` within the kind."""
    levels, num_kinds = counts[1:].shape
    group_size = counts[1:].ravel()  # (level, kind): the order of the rows
    group_row = np.cumsum(group_size) - group_size
    by_kind = np.cumsum(counts[1:], 0) - counts[1:]
    group_start = by_kind.ravel()
    kind = np.tile(np.arange(num_kinds), levels)
    kind_first = np.cumsum(inner_count) - inner_count
    edges_before = np.zeros(len(num_children) + 1, np.int64)
    np.cumsum(num_children, out=edges_before[1:])
    if all(edges >= w * num_children.max(initial=1) for w, edges in classes):
        widths = (1,) if serial else tuple(w for w, _ in classes)
        n = np.array(widths)
        pieces = _decomposition(widths)[group_size % n[0]]
        pieces[:, 0] += group_size // n[0]
        cls = np.repeat(np.tile(np.arange(len(n)), len(group_size)), pieces.ravel())
        per_group = pieces.sum(1)
        group = np.repeat(np.arange(len(group_size)), per_group)
        before = np.cumsum(n[cls]) - n[cls]
        first = np.cumsum(per_group) - per_group
        offset = before - before[np.repeat(first, per_group)] if len(cls) else before
        size = np.minimum(n[cls], group_size[group] - offset)
    else:
        group, cls, offset, size = _tasks_by_edges(group_size, group_start + kind_first[kind], num_children, classes)
    start = group_start[group] + offset
    at = kind_first[kind[group]] + start
    base = edges_before[kind_first]
    edge = edges_before[at]
    return {
        "class": kind[group] * len(classes) + cls,
        "row": group_row[group] + offset,
        "start": start,
        "size": size,
        "edge": edge - base[kind[group]],
        "edges": edges_before[at + size] - edge,
        "level": group // num_kinds + 1,
    }


def _tasks_by_edges(
    group_size: np.ndarray, group_at: np.ndarray, num_children: np.ndarray, classes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tasks that fit both a class's vertices and its edges, for wide and mixed fan-in. Python runs once per task."""
    edges_end = np.cumsum(num_children)
    ladder = [(i, w, e) for i, (w, e) in enumerate(classes) if w > SMALLEST_TASK or e <= LARGE_FAN_IN]
    special = len(classes) - 1  # the class of one vertex with very many children, where there is one
    groups, cls, offsets, sizes = [], [], [], []
    for g in np.flatnonzero(group_size):
        offset, total, at = 0, int(group_size[g]), int(group_at[g])
        while offset < total:
            here = at + offset
            if num_children[here] > LARGE_FAN_IN:
                i, take = special, 1
            else:
                done = int(edges_end[here - 1]) if here else 0
                best: tuple[float, int, int] | None = None
                for i, w, e in ladder:
                    take = int(np.searchsorted(edges_end[here : at + min(offset + w, total)], done + e, side="right"))
                    score = (w + e / SMALL_FAN_IN + TASK_OVERHEAD_ROWS) / max(take, 1e-9)  # cost of a vertex
                    if take and (best is None or score < best[0]):
                        best = (score, i, take)
                assert best is not None, "a vertex that fits no class"
                _, i, take = best
            groups.append(g)
            cls.append(i)
            offsets.append(offset)
            sizes.append(take)
            offset += take
    return np.array(groups, np.int64), np.array(cls, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64)


def _windows(
    tasks: dict[str, np.ndarray],
    inner: tuple[int, ...],
    edges: tuple[int, ...],
    classes: tuple[tuple[int, int], ...],
    window: int,
) -> tuple[tuple[int, int, int], np.ndarray]:
    """(windows, rows, edges) of the backward's lazy batching, and the window of each task."""
    if sum(inner) <= window:
        return (1, max(inner), max(edges)), np.zeros(len(tasks["class"]), np.int64)
    rows = window
    width, wide = max(w for w, _ in classes), max(e for _, e in classes)
    room = max(rows * max(-(-e // max(n, 1)) for e, n in zip(edges, inner, strict=True)), 2 * wide)
    change = np.zeros(len(tasks["class"]), bool)
    for sizes, limit in ((tasks["size"], rows - width), (tasks["edges"], room - wide)):
        before = np.cumsum(sizes) - sizes
        change[1:] |= np.diff(before // limit) > 0
    of = np.cumsum(change)
    return (_power_of_two(int(of[-1]) + 1), rows, room), of


def _rounds(cls: np.ndarray, window_of: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Tasks in order, as rounds of loops over ascending classes, each within one window.

    Returns the last task + 1 of each loop, and the first round of each window.
    """
    if not len(cls):
        return np.zeros((0, num_classes), np.int64), np.zeros(1, np.int64)
    number = np.cumsum((np.diff(cls, prepend=cls[0]) < 0) | (np.diff(window_of, prepend=0) > 0))
    per_loop = np.bincount(number * num_classes + cls, minlength=(number[-1] + 1) * num_classes)
    first_task = np.searchsorted(window_of, np.arange(window_of[-1] + 1))
    return np.cumsum(per_loop).reshape(-1, num_classes), number[first_task]
