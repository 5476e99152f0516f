"""Schedules of K batches at once: vertices sorted by height, levels cut into tasks, sizes padded.

One pass of NumPy calls processes all vertices of all batches. Indices run through all batches during the pass; the integers
that are written count within a batch.
"""

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule import group_rows
from cavs._schedule.buckets import Options as Options, fixed_windows, groups_of, padded_sizes, shapes_of
from cavs._schedule.order import Order, order_of, rows_of, take
from cavs._schedule.rounds import cut_rounds
from cavs._schedule.schedule import Schedule, Shape
from cavs._schedule.tasks import cut_tasks
from cavs._schedule.write import write_schedules, write_windows


def schedule_batches(
    graphs: Graphs,
    batches: np.ndarray,
    options: Options,
    index: np.ndarray | None = None,
    numbers: np.ndarray | None = None,
) -> list[Schedule]:
    """Schedules consecutive batches of `graphs[index]`, by default of all graphs.

    Args:
        graphs: the graphs.
        batches: (K,) number of graphs of each batch.
        options: the options.
        index: the graphs of all batches, one batch after another.
        numbers: (K,) the shape of each batch, an index into `options.fixed`, if there are such shapes.
    """
    if index is None:
        graphs, index = graphs._source()
    source = rows_of(graphs, index)
    kind = None if graphs.kind is None or not options.kinds else take(graphs.kind, source)
    names = ("",) if kind is None else graphs.kind_names or tuple(map(str, range(int(kind.max(initial=0)) + 1)))
    if numbers is not None:
        names = options.fixed[0].kinds
    order = order_of(graphs, index, batches, kind, len(names), source)

    # Sizes and tasks.
    serial = options.policy == "serial"
    if numbers is None:
        forest, sizes = order.forest, padded_sizes(order.leaf_count, order.inner_count, order.num_edges, options.exact)
        groups = groups_of(sizes, batches, order.rooted, forest, order.fan_in, options)
        num_classes = groups.num_classes
        tasks = cut_tasks(order, groups.classes, groups.class_of, num_classes, serial)
        shapes, which, window_of = shapes_of(options, names, graphs._facts.arity, groups, tasks)
    else:
        forest = fixed_forest(options.fixed, numbers, order)
        classes = list(dict.fromkeys(shape.classes for shape in options.fixed))
        class_of = np.array([classes.index(shape.classes) for shape in options.fixed])[numbers]
        num_classes = np.array([len(some) for some in classes])[class_of]
        tasks = cut_tasks(order, classes, class_of, num_classes, serial)
        shapes, which, window_of = list(options.fixed), numbers.tolist(), fixed_windows(options, numbers, tasks)
    num_loops = len(names) * num_classes
    rounds = cut_rounds(tasks, window_of, num_loops)
    scripts = None
    if options.scripts:
        widths = graphs._widths if index is None else graphs._widths.of(index)
        scripts = group_rows.scripted(order.counts, order.inner_count, forest, widths)
        if numbers is None:
            shapes, which = group_rows.with_levels(shapes, which, scripts)
        else:  # a batch without inner vertices has scripts of no levels
            scripts = scripts._replace(batch=np.array([shapes[i].levels > 0 for i in which]))

    schedules = write_schedules(graphs, batches, order, tasks, rounds, num_loops, scripts, shapes, which)
    if any(shape.windows[0] > 1 for shape in shapes):
        for sched, first, count in zip(schedules, tasks.first, tasks.count, strict=True):
            mine = slice(first, first + count)
            write_windows(sched, window_of[mine], rounds.number[mine], tasks.cls[mine])
    return schedules


def fixed_forest(shapes: tuple[Shape, ...], numbers: np.ndarray, order: Order) -> np.ndarray:
    """(K,) whether no vertex may have two parents in the shapes of K batches, which are `shapes[numbers]`.

    Raises:
        ValueError: a batch does not fit its shape.
    """
    sizes = np.array([[s.leaves, s.inner, s.edges] for s in shapes])[numbers]
    rooted, forest = (np.array([getattr(s, name) for s in shapes])[numbers] for name in ("rooted", "forest"))
    found = np.stack([order.leaf_count, order.inner_count, order.num_edges], 1)
    bad = (found > sizes).any((1, 2)) | (rooted & ~order.rooted) | (forest & ~order.forest)
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(f"a batch has sizes {found[b].tolist()}; its shape is {shapes[numbers[b]]}.")
    return forest
