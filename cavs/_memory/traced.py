"""The memory of a function, predicted from its trace."""

from collections.abc import Callable
from typing import Any

import jax

from cavs._memory.buffers import Peak, peak_of
from cavs._memory.no_collections import no_collections
from cavs._schedule.level_segments import SegmentedSchedule
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import length_of


def traced_peak(fn: Callable[..., Any], *args: Any) -> Peak:
    """Returns the predicted peak of temporary memory of `fn(*args)`.

    A schedule has a loop for each width of tasks, and they run one after the other. The loop of the widest tasks needs the most
    memory, so only that one is traced: tracing takes most of the time.
    """
    args = jax.tree.map(_with_widest_tasks, args, is_leaf=lambda x: isinstance(x, Schedule))
    with no_collections():
        return peak_of(jax.make_jaxpr(fn)(*args))


def _with_widest_tasks(x: Any) -> Any:
    if not isinstance(x, Schedule):
        return x
    first, last = x.shape.classes[0], x.shape.classes[-1]
    same = first[0] * last[1] == last[0] * first[1]  # if not, the narrowest says how many children a vertex may have
    shape = x.shape._replace(classes=(first,) if same else (first, last))
    data = jax.ShapeDtypeStruct((*x.data.shape[:-1], length_of(shape)), x.data.dtype)
    if not isinstance(x, SegmentedSchedule):
        return Schedule(data, shape)
    of_segment = _with_widest_tasks(Schedule(x.segments.data, x.segment_shape.shape))
    segments = x.segments._replace(data=of_segment.data)
    return SegmentedSchedule(data, shape, segments, x.segment_shape._replace(shape=of_segment.shape))
