"""The BFS scheduler: Cavs' Algorithm 1 as one counting sort by height."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs, check_graphs
from cavs._schedule.batches import schedule_batch
from cavs._schedule.level_segments import in_segments
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import FIELDS, Shape
from cavs._schedule.shape_choice import Options
from cavs.kernels import Target

# Each vertex computes the functions of all kinds that are mixed. Three were measured, on an H100; with many kinds, tasks of one
# kind each must become faster at some point.
MOST_MIXED = 8

_VALUES: dict[str, tuple[Any, ...]] = {
    "policy": ("batching", "serial"),
    "kinds": (None, True, False, "mixed"),
    "exact": (True, False),
    "scripts": (None, True, False),
}


def schedule(
    graphs: Graphs,
    *,
    policy: str = "batching",
    kinds: bool | str | None = None,
    exact: bool = False,
    shapes: list[Shape] | tuple[Shape, ...] | None = None,
    fields: Sequence[str] = (),
    scripts: bool | None = None,
    segments: int = 1,
) -> Schedule:
    """Schedules a batch of graphs: algorithm 1 of Cavs, section 3.2, in which task t is the set of all activated vertices.

    A vertex is activated when its children are evaluated, so its level is its height, which is known since the graphs were
    built. The breadth-first search of a batch is therefore a counting sort. The backward pass runs the tasks in reverse.

    Args:
        graphs: the batch.
        policy: `"batching"` evaluates whole levels, cut into tasks of a few fixed widths; `"serial"` evaluates one vertex at
            a time, the baseline of Cavs.
        kinds: `True`: each task has vertices of one kind. `"mixed"`: tasks mix the kinds of vertices with children. Each such
            vertex computes the functions of all these kinds and takes the results of its own, so that engine `persistent`
            needs one launch. `None`: `"mixed"` if the schedule is for a GPU and vertices of 2 to 8 kinds have children, else
            `True`. `False`: all vertices are scheduled as one kind, for a vertex function that does not distinguish kinds.
        exact: if `False`, sizes are rounded up to shape buckets, by at most 19 % and 32, so that batches share compiled code.
            If `True`, there is no padding, and every new size compiles.
        shapes: a list of the shapes used so far, which you create empty. A batch that fits into one of them, with at most a
            third more rows than it needs, takes that shape; otherwise its shape is added. This avoids compilation for rare
            combinations of sizes. The result depends on the batches before. A tuple is used in the same way, but not changed.
        fields: the fields of the graphs to include, of `"input_id"`, `"label"` and `"kind"`. `sched.input_id` is then
            `sched.pad(graphs.input_id, -1)`. A step that needs no other inputs has the schedule as its only argument:
            `step(params, cavs.schedule(batch, fields=("input_id", "label")))`, with `sched.label[sched.roots]` inside.
        scripts: whether the schedule is for a GPU: it includes the scripts that engine `persistent` needs, and its tasks have
            widths that suit a GPU. `None` means whether JAX runs on a GPU here. Set it if schedules are created in a process
            that does not see the GPU.
        segments: the number of segments into which the levels are cut, with about equal numbers of vertices. The forward pass
            then keeps only what later segments read of earlier ones, and the backward pass runs each segment again: one deep
            graph needs the memory of a segment, and about twice the time. `run` then uses engine `scan`, or `native` on a CPU.

    Returns:
        The schedule, with its integers in host memory.

    Raises:
        TypeError: `graphs` is not [`cavs.Graphs`][], `fields` is a str, or `shapes` is no list of shapes.
        ValueError: `policy`, `kinds`, `exact` or `scripts` is another value, `segments` is not an int >= 1 or used together
            with `shapes`, or the graphs do not have one of the `fields`.
    """
    if shapes is not None and not (isinstance(shapes, list | tuple) and all(isinstance(shape, Shape) for shape in shapes)):
        raise TypeError(
            f"schedule: shapes: got {shapes!r}; expected a list of shapes. Write shapes = [] once, then shapes=shapes."
        )
    options = options_of("schedule", graphs, Options(policy, kinds, exact, shapes, fields, scripts))
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1 or (segments > 1 and shapes is not None):
        expected = "1 together with shapes=" if shapes is not None else "an int >= 1, the number of segments of levels"
        raise ValueError(f"schedule: segments: got {segments!r}; expected {expected}. Write segments=16.")
    sched = schedule_batch(graphs, options)
    return sched if segments == 1 else in_segments([(graphs, sched)], options, segments)[0]


def options_of(function: str, graphs: Graphs, options: Options) -> Options:
    """Validates the options of a schedule, for error messages of `function`, and fills in the default of this device."""
    check_graphs(graphs, f"{function}(graphs, ...)")
    for name, allowed in _VALUES.items():
        if not isinstance(got := getattr(options, name), Hashable) or got not in allowed:  # arrays are not hashable
            *others, last = map(repr, allowed)
            raise ValueError(f"{function}: {name}: got {got!r}; expected {', '.join(others)} or {last}.")
    if isinstance(options.fields, str) or not np.iterable(options.fields):
        got = repr(options.fields)
        write = f"({got},)" if isinstance(options.fields, str) else "()"
        raise TypeError(f"{function}: fields: got {got}; expected a sequence of names. Write fields={write}.")
    scripts = Target.here().is_gpu if options.scripts is None else options.scripts
    if options.kinds is None:
        options = options._replace(kinds="mixed" if scripts and 1 < len(graphs._inner_kinds) <= MOST_MIXED else True)
    fields = [*options.fields]
    if options.kinds == "mixed" and graphs.kind is not None:
        fields.append("kind")
    has = [name for name in FIELDS if getattr(graphs, name) is not None]
    for field in fields:
        if not isinstance(field, str) or field not in has:
            expected = f"fields that these graphs have: {', '.join(has)}" if has else f"(), as the graphs have none of {FIELDS}"
            raise ValueError(f"{function}: fields: got {field!r}; expected {expected}.")
        if field == "label" and graphs.label is not None and (graphs.label.dtype != np.int32 or graphs.label.ndim > 1):
            raise ValueError(
                f"{function}: fields: got 'label', but the labels are {graphs.label.dtype}{list(graphs.label.shape[1:])}; "
                "expected one int32 per vertex. Pass others to the step as an argument: sched.pad(batch.label)."
            )
    return options._replace(fields=tuple(dict.fromkeys(fields)), scripts=scripts)
