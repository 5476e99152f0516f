"""The BFS scheduler: Cavs Algorithm 1 as one counting sort by height."""

from types import SimpleNamespace

import numpy as np

from cavs._graphs import Graphs
from cavs._schedule import Schedule, Shape, layout_of
from cavs._tasks import LAZY_WINDOW, SMALL_FAN_IN, cut_rounds, cut_tasks, cut_windows, power_of_two, task_classes


def schedule(
    graphs: Graphs,
    *,
    policy: str = "batching",
    kinds: bool = True,
    exact: bool = False,
    window: int = LAZY_WINDOW,
    shapes: list[Shape] | None = None,
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

    - `shapes`: a list of your own, empty at first, of the shapes that were used: a batch that fits into one of them (with
      at most a third more rows than it needs) takes it, else its shape is added. Keeps rare combinations of sizes from
      compiling; the result depends on the batches before.

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
    classes = task_classes(sum(padded_inner), int(num_children.max(initial=1)), policy)
    tasks = cut_tasks(counts, num_children, inner_count, classes, serial=policy == "serial")
    num_tasks = len(tasks["class"])
    padded_edges = tuple(n * power_of_two(-(-e // max(n, 1))) for n, e in zip(padded_inner, kind_edges.tolist(), strict=True))
    windows, window_of = cut_windows(tasks, padded_inner, padded_edges, classes, window)
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
        fan_in=min(power_of_two(int(num_children.max(initial=0))), 2 * SMALL_FAN_IN),
        windows=windows,
    )
    if shapes is not None:
        shape = _known(shape, shapes)

    # 4. Pack. Padding of per-vertex arrays repeats the first real entry: it computes what a real row computes.
    layout = layout_of(shape)
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
    ends, first_rounds = cut_rounds(tasks["class"], window_of, num_kinds * len(classes))
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


def _known(shape: Shape, shapes: list[Shape]) -> Shape:
    """The smallest of `shapes` that `shape` fits into without much waste; itself, then added to them, where there is none."""

    def fixed(s: Shape) -> tuple[object, ...]:
        return s.graphs, s.classes, s.kinds, s.rooted, s.fan_in, s.windows[0] == 1 or s.windows[1:]

    def sizes(s: Shape) -> tuple[int, ...]:
        return *s.leaves, *s.inner, *s.edges, s.tasks, s.windows[0]

    fits = [
        s
        for s in shapes
        if fixed(s) == fixed(shape)
        and all(a >= b for a, b in zip(sizes(s), sizes(shape), strict=True))
        and 3 * s.vertices <= 4 * shape.vertices
    ]
    if fits:
        return min(fits, key=lambda s: s.vertices)
    shapes.append(shape)
    return shape


def bucket(n: int) -> int:
    """`n` rounded up to a geometric ladder of ratio 2^(1/4), in multiples of 8: at most 19 % and 8 more."""
    if n <= 8:
        return 8
    octave = 1 << ((n - 1).bit_length() - 1)
    return next(step for x in (1.19, 1.415, 1.682, 2.0) if (step := -(-int(octave * x) // 8) * 8) >= n)


def _fill(out: np.ndarray, at: int, size: int, values: np.ndarray) -> None:
    out[at : at + len(values)] = values
    out[at + len(values) : at + size] = values[0] if len(values) else 0


def _kind_names(graphs: Graphs, kind: np.ndarray) -> tuple[str, ...]:
    return graphs.kind_names or tuple(str(k) for k in range(int(kind.max(initial=0)) + 1))
