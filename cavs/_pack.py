"""Batches of graphs to packed integers: vertices sorted by height, levels cut into tasks, sizes padded.

One pass of NumPy over all vertices of K batches, whatever K is. Indices below run through all batches; what is written
counts within a batch.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from cavs import _scripts
from cavs._graphs import Graphs
from cavs._schedule import PARTS, Schedule, Shape, layout_of
from cavs._tasks import SMALL_FAN_IN, Tasks, cut_rounds, cut_tasks, cut_windows, power_of_two, task_classes

# Integers are scattered all at once, or copied run after run: what the first costs once, and for so many integers, runs cost.
SCATTER_RUNS, SCATTER_INTEGERS = 100, 100


class Options(NamedTuple):
    """The options of `cavs.schedule`."""

    policy: str
    kinds: bool
    exact: bool
    window: int
    shapes: list[Shape] | None
    scripts: bool = False  # those of the persistent engine come along


def pack(graphs: Graphs, batches: np.ndarray, options: Options) -> list[Schedule]:
    """The schedules of consecutive batches of `graphs`; `batches` (K,): how many graphs each has."""
    num_batches, num_vertices, num_graphs = len(batches), graphs.num_vertices, len(graphs)
    kind = graphs.kind if options.kinds else None
    names = _kind_names(graphs, kind) if kind is not None else ("",)
    num_kinds = len(names)
    graph_end = batches.cumsum()
    vertex_start = graphs.vertex_offsets[graph_end - batches]
    vertices = graphs.vertex_offsets[graph_end] - vertex_start

    # 1. Vertices by (batch, height, kind). 16-bit keys make numpy's stable sort a counting (radix) sort.
    levels = int(graphs.height.max(initial=0)) + 1
    num_keys = num_batches * levels * num_kinds
    key_type = np.uint16 if num_keys < 1 << 16 else np.int64
    key = graphs.height.astype(key_type)
    if num_batches > 1:
        key += np.arange(0, num_batches * levels, levels, dtype=key_type).repeat(vertices)
    if kind is not None:
        key = key * key_type(num_kinds) + kind.astype(key_type)
    order = np.argsort(key, kind="stable")
    position = np.empty(num_vertices, np.int64)
    position[order] = np.arange(num_vertices)
    counts = np.bincount(key, minlength=num_keys).reshape(num_batches, levels, num_kinds)
    leaf_count, inner_count = counts[:, 0], counts[:, 1:].sum(1)
    num_leaves, num_inner = leaf_count.sum(1), inner_count.sum(1)
    if num_batches == 1:
        leaf, inner = order[: num_leaves[0]], order[num_leaves[0] :]
    else:
        is_inner = np.repeat(np.tile([False, True], num_batches), np.stack([num_leaves, num_inner], 1).ravel())
        leaf, inner = order[~is_inner], order[is_inner]
    if kind is not None:
        inner_key = np.arange(0, num_batches * num_kinds, num_kinds).repeat(num_inner) + kind[inner]
        inner = inner[np.argsort(inner_key.astype(key_type), kind="stable")]

    # 2. Edges in the order of their owners.
    num_children = graphs.child_offsets[inner + 1] - (first_edge := graphs.child_offsets[inner])
    edges_before = np.zeros(len(inner) + 1, np.int64)
    np.cumsum(num_children, out=edges_before[1:])
    picked = np.arange(graphs.num_edges) + (first_edge - edges_before[:-1]).repeat(num_children)
    graph_edge = graphs.child_offsets[graphs.vertex_offsets]
    child = graphs.children + graphs.vertex_offsets[:-1].repeat(graph_edge[1:] - graph_edge[:-1])
    has_parent = np.zeros(num_vertices, bool)
    has_parent[child] = True
    root = np.flatnonzero(~has_parent)
    graph = np.arange(num_graphs).repeat(graphs.vertex_offsets[1:] - graphs.vertex_offsets[:-1])
    one_root = np.bincount(graph[root], minlength=num_graphs) == 1
    batch_of_graph = np.arange(num_batches).repeat(batches)
    rooted = np.bincount(batch_of_graph, one_root, minlength=num_batches) == batches

    # 3. Sizes and tasks. Inner vertices lie by (batch, kind).
    inner_start = inner_count.cumsum().reshape(inner_count.shape) - inner_count
    edge_start = edges_before[inner_start]
    num_edges = edges_before[inner_start + inner_count] - edge_start
    fan_in = np.zeros(num_batches, np.int64)
    if len(inner):
        some = num_inner > 0
        fan_in[some] = np.maximum.reduceat(num_children, (num_inner.cumsum() - num_inner)[some])
    padded_leaves, padded_inner = leaf_count, inner_count
    if not options.exact:
        padded_leaves, padded_inner = (
            np.where((n > 0) | (num_kinds == 1), _LADDER[np.searchsorted(_LADDER, n)], 0) for n in (leaf_count, inner_count)
        )
    edges_a_row = -(-num_edges // np.maximum(padded_inner, 1))
    padded_edges = padded_inner * (1 << np.searchsorted(_POWERS, edges_a_row))
    sum_inner, fan_ins = padded_inner.sum(1).tolist(), fan_in.tolist()
    rooms = (padded_edges // np.maximum(padded_inner, 1)).max(1, initial=0).tolist()
    classes = [task_classes(n, f, options.policy, r) for n, f, r in zip(sum_inner, fan_ins, rooms, strict=True)]
    tasks = cut_tasks(counts[:, 1:], inner_start, num_children, edges_before, classes, options.policy == "serial")
    extents = np.stack([padded_leaves, padded_inner, padded_edges], 1)
    shapes, which, window_of = _shapes(options, names, extents, batches.tolist(), rooted.tolist(), fan_ins, classes, tasks)

    scripts = None
    if options.scripts:
        roots = np.bincount(batch_of_graph[graph[root]], minlength=num_batches)
        scripts = _scripts.scripted(counts, inner_count, num_edges, vertices - roots)
        shapes, which = _scripts.with_levels(shapes, which, scripts)

    # 4. Pack.
    begin = np.array([_begins(shape) for shape in shapes])[which]
    end = begin[:, -1].cumsum()
    at = dict(zip(_FIELDS, (begin[:, :-1] + (end - begin[:, -1])[:, None]).T, strict=True))
    leaf_size, inner_size, edge_size = np.array([(s.leaves, s.inner, s.edges) for s in shapes])[which].swapaxes(0, 1)
    pad = np.array([c[0][0] for c in classes])
    row = position + (pad - vertex_start).repeat(vertices)
    num_loops = np.array([num_kinds * len(c) for c in classes])
    rounds = cut_rounds(tasks, window_of, num_loops)
    out = _Segments()
    header = np.stack([vertices, tasks.count, rounds.count, np.ones_like(vertices)], 1)
    leaf_row = pad[:, None] + leaf_count.cumsum(1) - leaf_count
    header = np.concatenate([header, leaf_count, inner_count, leaf_row], 1)
    out.add(at["num_vertices"], np.full(num_batches, header.shape[1]), header.ravel())
    out.add(_parts(at["leaf_vertex"], leaf_size), leaf_count, leaf - vertex_start.repeat(num_leaves), leaf_size)
    inner_starts, edge_starts = (np.repeat(x.ravel(), inner_count.ravel()) for x in (inner_start, edge_start))
    for name, values in (
        ("inner_vertex", inner - vertex_start.repeat(num_inner)),
        ("first_edge", edges_before[:-1] - edge_starts),
        ("num_children", num_children),
    ):
        out.add(_parts(at[name], inner_size), inner_count, values, inner_size)
    out.add(at["row"], vertices, row)
    of_batch = graph - (graph_end - batches).repeat(vertices)
    out.add(at["graph"], vertices, of_batch, at["first_edge"] - at["graph"], batches)
    edge_child = row[child[picked]]
    out.add(_parts(at["edge_child"], edge_size), num_edges, edge_child, edge_size)
    owner = (np.arange(len(inner)) - inner_starts).repeat(num_children)
    out.add(_parts(at["edge_owner"], edge_size), num_edges, owner, edge_size, inner_size)
    out.add(at["task_row"], tasks.count, tasks.row + (pad + num_leaves).repeat(tasks.count))
    for name in ("start", "size", "edge", "edges", "level"):
        out.add(at["task_" + name], tasks.count, getattr(tasks, name))
    out.add(at["round_end"], rounds.count * num_loops, rounds.ends)
    out.add(at["window_round"] + 1, np.ones_like(vertices), rounds.count)
    root_batch = batch_of_graph[graph[root]]
    out.add(at["roots"][rooted], batches[rooted], (root - vertex_start[root_batch])[rooted[root_batch]])
    if scripts is not None and scripts.batch.any():
        sizes = np.array([(s.levels, s.rows, sum(s.edges)) for s in shapes])[which]
        first = at["roots"] + batches
        _add_scripts(out, scripts, first, sizes, graphs, batches, edge_child, num_edges.sum(1))
    data = np.zeros(int(end[-1]), np.int32)
    out.write(data)
    bounds = zip((end - begin[:, -1]).tolist(), end.tolist(), which, strict=True)
    made = [Schedule(data[a:b], shapes[i]) for a, b, i in bounds]
    if any(shape.windows[0] > 1 for shape in shapes):
        for sched, first, count in zip(made, tasks.first, tasks.count, strict=True):
            mine = slice(first, first + count)
            _write_windows(sched, window_of[mine], rounds.number[mine], tasks.cls[mine], tasks.start[mine], tasks.edge[mine])
    return made


def _shapes(
    options: Options,
    names: tuple[str, ...],
    extents: np.ndarray,
    graphs: list[int],
    rooted: list[bool],
    fan_in: list[int],
    classes: list[tuple[tuple[int, int], ...]],
    tasks: Tasks,
) -> tuple[list[Shape], list[int], np.ndarray]:
    """Shapes, which of them each batch has, and the window of each task; `extents` (K, 3, kinds): leaves, inner, edges."""
    found: list[Shape] = []
    which: list[int] = []
    window_of = np.zeros(len(tasks.cls), np.int64)
    # Batches alike in all this have the same shape, until a new one joins `options.shapes`.
    before: dict[Any, tuple[int, int]] = {}
    known = 0 if options.shapes is None else len(options.shapes)
    padded_tasks = tasks.count
    if not options.exact:
        padded_tasks = np.maximum(128, _POWERS[::2][np.searchsorted(_POWERS[::2], tasks.count)])
    padded_tasks = padded_tasks.tolist()
    facts = zip(*extents.reshape(len(graphs), -1).T.tolist(), padded_tasks, graphs, rooted, fan_in, strict=True)
    for b, key in enumerate(facts):
        same = before.get(key)
        if same is not None and same[1] == known:
            which.append(same[0])
            continue
        leaves, inner, edges = (tuple(n) for n in extents[b].tolist())
        windows = (1, max(inner), max(edges))
        if sum(inner) > options.window:
            mine = slice(tasks.first[b], tasks.first[b] + tasks.count[b])
            args = tasks.size[mine], tasks.edges[mine], inner, edges, classes[b], options.window
            windows, window_of[mine] = cut_windows(*args)
        shape = Shape(
            vertices=sum(leaves) + sum(inner),
            leaves=leaves,
            inner=inner,
            edges=edges,
            tasks=padded_tasks[b],
            graphs=graphs[b],
            classes=classes[b],
            kinds=names,
            rooted=rooted[b],
            fan_in=min(power_of_two(fan_in[b]), 2 * SMALL_FAN_IN),
            windows=windows,
        )
        if options.shapes is not None:
            shape = _known(shape, options.shapes)
            known = len(options.shapes)
        if windows[0] == 1:  # else they depend on its tasks, too
            before[key] = len(found), known
        which.append(len(found))
        found.append(shape)
    return found, which, window_of


class _Segments:
    """Runs of integers to be written into one vector: starts and lengths, the values of all of them one after another.

    With a `size`, padding up to it repeats a run's first value (it computes what a real row computes), or `fill`.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]] = []

    def add(
        self,
        start: np.ndarray,
        length: np.ndarray,
        values: np.ndarray,
        size: np.ndarray | None = None,
        fill: np.ndarray | None = None,
    ) -> None:
        size, fill = (None if x is None else x.ravel() for x in (size, fill))
        self._runs.append((start.ravel(), length.ravel(), values, size, fill))

    def write(self, data: np.ndarray) -> None:
        runs, integers = sum(len(run[0]) for run in self._runs), sum(len(run[2]) for run in self._runs)
        (self._copy if runs < SCATTER_RUNS + integers / SCATTER_INTEGERS else self._scatter)(data)

    def _scatter(self, data: np.ndarray) -> None:
        starts, lengths, values = [], [], []
        for start, length, run, size, fill in self._runs:
            starts.append(start)
            lengths.append(length)
            values.append(run)
            if size is not None and (fill is not None or len(run)):
                if fill is None:
                    fill = np.where(length > 0, run[np.minimum(length.cumsum() - length, len(run) - 1)], 0)
                starts.append(start + length)
                lengths.append(rest := size - length)
                values.append(fill.repeat(rest))
        start, length = np.concatenate(starts), np.concatenate(lengths)
        end = length.cumsum()
        data[np.arange(end[-1]) + (start - end + length).repeat(length)] = np.concatenate(values)

    def _copy(self, data: np.ndarray) -> None:
        for start, length, run, size, fill in self._runs:
            at = 0
            sizes = length if size is None else size
            for i, (a, n, whole) in enumerate(zip(start.tolist(), length.tolist(), sizes.tolist(), strict=True)):
                data[a : a + n] = run[at : at + n]
                if n < whole and (n or fill is not None):
                    data[a + n : a + whole] = run[at] if fill is None else fill[i]
                at += n


def _add_scripts(
    out: _Segments,
    found: _scripts.Scripted,
    at: np.ndarray,
    sizes: np.ndarray,
    graphs: Graphs,
    batches: np.ndarray,
    child: np.ndarray,
    num_edges: np.ndarray,
) -> None:
    """Scripts of a pass; `at` (K,) where those of a batch begin, `sizes` (K, 3) of its shape: levels, rows, edges; `child`
    (E,) rows; `batches`, `num_edges` (K,)."""
    padded, rows, edges = sizes.T
    some = found.batch
    out.add(at[some], np.ones(int(some.sum()), np.int64), found.levels[some])
    starts = _scripts.part_starts(found, padded, graphs.height, graphs.vertex_offsets, batches)
    out.add(at[some] + 1, padded[some] * PARTS + 1, starts)
    at = at + padded * PARTS + 2
    forests, dags = some & found.forest, some & ~found.forest
    if forests.any():
        mine = child if forests.all() else child[forests.repeat(num_edges)]
        out.add(at[forests], rows[forests], _scripts.parents_of_forests(rows[forests], num_edges[forests], mine))
    if dags.any():
        mine = child if dags.all() else child[dags.repeat(num_edges)]
        edge, first, count = _scripts.parents_of_dags(rows[dags], num_edges[dags], mine)
        out.add(at[dags], num_edges[dags], edge)
        at = at + edges
        out.add(at[dags], rows[dags], first)
        out.add((at + rows)[dags], rows[dags], count)


def _parts(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(K, kinds) where each kind's part of a field begins: `start` (K,) of the field, `size` (K, kinds) of the parts."""
    return start[:, None] + size.cumsum(1) - size


@functools.lru_cache(maxsize=1024)
def _begins(shape: Shape) -> tuple[int, ...]:
    """Where each of `_FIELDS` begins, and the length of the whole."""
    layout = layout_of(shape)
    return *(layout[name][0] for name in _FIELDS), max(end for _, end, _ in layout.values())


def _write_windows(
    sched: Schedule, window_of: np.ndarray, number: np.ndarray, cls: np.ndarray, start: np.ndarray, edge: np.ndarray
) -> None:
    """The windows of lazy batching of a schedule that has several; the arrays are those of its tasks."""
    if sched.shape.windows[0] == 1:
        return
    windows = np.arange(window_of[-1] + 1)
    sched.num_windows[...] = len(windows)
    sched.window_round[: len(windows)] = number[np.searchsorted(window_of, windows)] - number[0]
    sched.window_round[len(windows) :] = sched.num_rounds
    kind = cls // len(sched.shape.classes)
    for k in range(len(sched.shape.kinds)):
        mine = np.flatnonzero(kind == k)
        if len(mine):
            first = mine[np.searchsorted(window_of[mine], windows).clip(max=len(mine) - 1)]
            sched.window_start[: len(first), k] = start[first]
            sched.window_edge[: len(first), k] = edge[first]


def _known(shape: Shape, shapes: list[Shape]) -> Shape:
    """The smallest of `shapes` that `shape` fits into without much waste; itself, then added to them, where there is none."""

    def fixed(s: Shape) -> tuple[object, ...]:
        return s.graphs, s.classes, s.kinds, s.rooted, s.fan_in, s.windows[0] == 1 or s.windows[1:]

    def sizes(s: Shape) -> tuple[int, ...]:
        return *s.leaves, *s.inner, *s.edges, s.tasks, s.windows[0]

    same, needed, most = fixed(shape), sizes(shape), 4 * shape.vertices
    fits = [
        s
        for s in shapes
        if 3 * s.vertices <= most and fixed(s) == same and all(a >= b for a, b in zip(sizes(s), needed, strict=True))
    ]
    if fits:
        return min(fits, key=lambda s: s.vertices)
    shapes.append(shape)
    return shape


def bucket(n: int) -> int:
    """`n` rounded up to a geometric ladder of ratio 2^(1/4), in multiples of 8: at most 19 % and 8 more."""
    return int(_LADDER[np.searchsorted(_LADDER, n)])


_LADDER = np.unique([8, *(-(-int(x * 2**k) // 8) * 8 for k in range(3, 40) for x in (1.19, 1.415, 1.682, 2.0))])
_POWERS = 1 << np.arange(62)
_FIELDS = tuple(layout_of(Shape(1, (1,), (1,), (1,), 1, 1, ((1, 1),), ("",), True, 1, (1, 1, 1))))  # without scripts


def _kind_names(graphs: Graphs, kind: np.ndarray) -> tuple[str, ...]:
    return graphs.kind_names or tuple(str(k) for k in range(int(kind.max(initial=0)) + 1))
