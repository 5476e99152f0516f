"""Schedules of K batches at once: vertices sorted by height, levels cut into tasks, sizes padded.

One pass of NumPy calls processes all vertices of all batches. Indices run through all batches during the pass; the integers
that are written count within a batch.
"""

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule import group_rows
from cavs._schedule.buckets import Options as Options, groups_of, padded_sizes, shapes_of
from cavs._schedule.order import order_of, rows_of, take
from cavs._schedule.schedule import Schedule
from cavs._schedule.tasks import cut_rounds, cut_tasks
from cavs._schedule.write import write_schedules, write_windows


def schedule_batches(graphs: Graphs, batches: np.ndarray, options: Options, index: np.ndarray | None = None) -> list[Schedule]:
    """Schedules consecutive batches of `graphs[index]`, by default of all graphs. `batches` (K,): number of graphs of each."""
    if index is None:
        graphs, index = graphs._source()
    source = rows_of(graphs, index)
    kind = None if graphs.kind is None or not options.kinds else take(graphs.kind, source)
    names = ("",) if kind is None else graphs.kind_names or tuple(map(str, range(int(kind.max(initial=0)) + 1)))
    order = order_of(graphs, index, batches, kind, len(names), source)

    # Sizes and tasks.
    sizes = padded_sizes(order.leaf_count, order.inner_count, order.num_edges, options.exact)
    groups = groups_of(sizes, batches, order.rooted, order.fan_in, options.policy)
    tasks = cut_tasks(order, groups.classes, groups.class_of, groups.num_classes, options.policy == "serial")
    shapes, which, window_of = shapes_of(options, names, graphs._facts.arity, groups, tasks)
    num_loops = len(names) * groups.num_classes
    rounds = cut_rounds(tasks, window_of, num_loops)
    scripts = None
    if options.scripts:
        widths = graphs._widths if index is None else graphs._widths.of(index)
        with_parents = order.vertices - order.roots
        scripts = group_rows.scripted(order.counts, order.inner_count, order.num_edges, with_parents, widths)
        shapes, which = group_rows.with_levels(shapes, which, scripts)

    schedules = write_schedules(graphs, batches, order, tasks, rounds, num_loops, scripts, shapes, which)
    if any(shape.windows[0] > 1 for shape in shapes):
        for sched, first, count in zip(schedules, tasks.first, tasks.count, strict=True):
            mine = slice(first, first + count)
            write_windows(sched, window_of[mine], rounds.number[mine], tasks.cls[mine], tasks.start[mine], tasks.edge[mine])
    return schedules
