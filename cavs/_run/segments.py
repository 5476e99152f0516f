"""`run` in segments of levels: the forward keeps the frontiers between them, and the backward runs each segment again.

A segment is a batch like any other (`_schedule.level_segments`), in which the frontier below is leaves of a kind of its own:
they pull their states, which the segments before computed. So the loop over segments runs the same stages and engines as a
whole batch does, and every segment has one shape: the loop's bodies are compiled once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.choose import ENGINES, EngineError
from cavs._function.evaluate import column
from cavs._function.keep_options import MemoryOptions
from cavs._function.plan import FunctionPlan
from cavs._function.raw_keys import from_stored, to_stored
from cavs._function.vertex import Vertex, VertexFunction
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Arrays
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.settings import always_compiled
from cavs._jaxpr.tunable import tunable
from cavs._run.compiled import Call
from cavs._run.forward import Arguments
from cavs._run.manual_axes import across_axes
from cavs._schedule.level_segments import GIVEN, SegmentArrays, SegmentedSchedule, SegmentShape
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import Cotangent, differentiated, mask_rows, with_differentiated

Run: TypeAlias = Callable[..., PyTree]  # `_run.run.run_with_options`


class _Loop(NamedTuple):
    """What does not change from segment to segment."""

    function: VertexFunction  # F, which also pushes its state, and in which the kind `GIVEN` scatters what it pulls
    run: Run  # evaluates it at the vertices of one segment
    trees: tuple[Any, Any, Any]  # the pytrees of params, inputs and edges
    shape: SegmentShape
    state_avals: list[jax.ShapeDtypeStruct]  # of the leaves of the state, as stored
    push_avals: list[jax.ShapeDtypeStruct]  # of the leaves of a push, as stored


class _Step(NamedTuple):
    """The integers of one segment: its number, and its part of `SegmentArrays`."""

    number: jax.Array
    data: jax.Array
    vertex: jax.Array
    edge: jax.Array
    frontier: jax.Array


def run_in_segments(call: Call, sched: SegmentedSchedule, run: Run) -> Arrays:
    """Evaluates F at every vertex of a batch, segment after segment.

    Returns the leaves of the pushes as stored, (Vp, ...), or (M, ...) with `select`. `run`: evaluates one segment. Raises
    `EngineError` if the engine that was asked for cannot run segments.
    """
    user_engine, plan, shape = call.user_engine, call.job.plan, sched.segment_shape
    if user_engine is not None and user_engine.one_launch:
        raise EngineError(
            f"run: engine: got {user_engine.name!r}, but a schedule in segments runs on engine 'scan', or 'native' on a CPU. "
            "Write engine='scan', or engine=None to choose."
        )
    engine = ENGINES["scan"] if user_engine is None and not call.job.target.is_cpu else user_engine
    (params, inputs, edges), trees = zip(*map(jax.tree.flatten, (call.params, call.inputs, call.edges)), strict=True)
    function = _with_given(plan, call.job.kinds, shape.shape.kinds, tuple(plan.function.state_avals(call.params, call.inputs)))
    loop_select = call.select if call.select is None or call.select.shape[0] < shape.shape.vertices else None

    def call_of(options: MemoryOptions) -> tuple[Callable[..., Arrays], str]:
        run_segment = functools.partial(run, engine=engine, options=options)
        loop = _Loop(function, run_segment, trees, shape, plan.state_avals, plan.push_avals)
        return _differentiable(loop, sched.shape.vertices), ""  # the calls inside name the engine

    whole = across_axes(tunable(call_of, call.job.options, plan.names))
    outs = whole(params, inputs, edges, jax.tree.map(jnp.asarray, sched.segments), loop_select)
    return outs if loop_select is call.select else [x.at[call.select].get(mode="clip") for x in outs]


@memoized
def _with_given(
    plan: FunctionPlan, kinds: tuple[str | None, ...], names: tuple[str, ...], avals: tuple[jax.ShapeDtypeStruct, ...]
) -> VertexFunction:
    """Returns F for vertices of a segment: it also pulls a stored state, and also pushes its own state."""
    F = plan.function

    def computed(fn: Callable[[Any, Vertex], None], params: PyTree, v: Vertex) -> None:
        inner = v._with_inputs(v.pull()[0])
        fn(params, inner)
        v.scattered = inner.scattered
        v.push((inner._value, list(map(to_stored, inner.scattered or []))))

    def given(params: PyTree, v: Vertex) -> None:
        stored = v.pull()[1]
        v.scatter(F.state_tree.unflatten(map(from_stored, stored, F.key_impls)))
        pushed = [from_stored(jnp.zeros(a.shape, a.dtype), i) for a, i in zip(plan.push_avals, plan.push_impls, strict=True)]
        if plan.push_states is not None:
            pushed = [from_stored(stored[i], impl) for i, impl in zip(plan.push_states, plan.push_impls, strict=True)]
        v.push((plan.push_tree.unflatten(pushed), stored))

    fns: dict[str, Callable[[Any, Vertex], None]] = {
        name: functools.partial(computed, F.fns[kind]) for name, kind in zip(names, kinds, strict=False)
    }
    state = F.state_tree.unflatten(avals)
    return VertexFunction(fns | {GIVEN: given}, state=state, arity=F.arity, optimizations=F.optimizations)


def _segment(loop: _Loop, step: _Step, index: jax.Array, frontier: Arrays, rows: Arguments) -> tuple[Arrays, Arrays]:
    """Evaluates one segment. Returns the frontier above it, and the pushes of its vertices `index`.

    Args:
        loop: see `_Loop`.
        step: the segment.
        index: vertex numbers within the segment.
        frontier: (num_frontier, ...) the leaves of the states below.
        rows: the parameters, and the rows of the segment's vertices, (Vs, ...), and of its edges, (Es, ...).
    """
    num_frontier, shape = loop.shape
    params, inputs, edges = (tree.unflatten(x) for tree, x in zip(loop.trees, rows[:3], strict=True))
    states = [jnp.pad(x, ((0, shape.vertices - num_frontier), *((0, 0),) * (x.ndim - 1))) for x in frontier]
    select = jnp.concatenate([step.frontier, index])
    pushed, above = loop.run(loop.function, params, Schedule(step.data, shape), (inputs, states), edges=edges, select=select)
    return [x[:num_frontier] for x in above], [to_stored(x)[num_frontier:] for x in jax.tree.leaves(pushed)]


def _steps(segments: SegmentArrays) -> _Step:
    """Returns the integers of all segments."""
    number = jnp.arange(segments.vertex.shape[0], dtype=jnp.int32)
    return _Step(number, segments.data, segments.vertex, segments.edge, segments.frontier)


def _rows(arrays: Arguments, step: _Step) -> Arguments:
    """Gathers the rows of a segment's vertices and edges; any row in padding."""
    inputs, edges = (
        [x.at[index].get(mode="clip") for x in xs] for xs, index in ((arrays.inputs, step.vertex), (arrays.edges, step.edge))
    )
    return Arguments(arrays.params, inputs, edges, None)


class _Chosen(NamedTuple):
    """Which pushes of a segment are wanted: all, or the pushes of the vertices `select` that are in it."""

    index: jax.Array  # vertex numbers within the segment
    in_segment: jax.Array | None  # (M,) bool: which of `select` are in the segment
    vertex: jax.Array  # for all: their rows in the pushes; beyond the last one in padding

    def put(self, outs: Arrays, pushed: Arrays) -> Arrays:
        """Writes the pushes of the segment into the pushes of all segments."""
        if self.in_segment is None:
            return [o.at[self.vertex].set(x, mode="drop") for o, x in zip(outs, pushed, strict=True)]
        return [jnp.where(column(self.in_segment, x), x, o) for o, x in zip(outs, pushed, strict=True)]

    def cotangents(self, cts: Arrays) -> Arrays:
        """Returns the cotangents of the segment's pushes: the transpose of `put`."""
        if self.in_segment is None:
            return [ct.at[self.vertex].get(mode="fill", fill_value=0) for ct in cts]
        return [mask_rows(ct, self.in_segment) for ct in cts]


def _chosen(loop: _Loop, step: _Step, segments: SegmentArrays, select: jax.Array | None) -> _Chosen:
    num_frontier, shape = loop.shape
    if select is None:
        return _Chosen(jnp.arange(num_frontier, shape.vertices, dtype=jnp.int32), None, step.vertex[num_frontier:])
    in_segment = segments.segment.at[select].get(mode="clip") == step.number
    return _Chosen(jnp.where(in_segment, segments.place.at[select].get(mode="clip"), 0), in_segment, step.vertex)


def _forward(loop: _Loop, vertices: int, arrays: Arguments, segments: SegmentArrays) -> tuple[Arrays, Arrays]:
    """Returns the pushes, and the frontier below each segment."""
    rows = vertices if arrays.select is None else arrays.select.shape[0]

    def step(carry: tuple[Arrays, Arrays], segment: _Step) -> tuple[tuple[Arrays, Arrays], Arrays]:
        frontier, outs = carry
        chosen = _chosen(loop, segment, segments, arrays.select)
        above, pushed = _segment(loop, segment, chosen.index, frontier, _rows(arrays, segment))
        return (above, chosen.put(outs, pushed)), frontier

    first = [jnp.zeros((loop.shape.num_frontier, *a.shape), a.dtype) for a in loop.state_avals]
    outs = [jnp.zeros((rows, *a.shape), a.dtype) for a in loop.push_avals]
    (_, outs), frontiers = lax.scan(step, (first, outs), _steps(segments))
    return outs, frontiers


@always_compiled
def _backward(
    loop: _Loop, varied: Sequence[PyTree], arrays: Arguments, segments: SegmentArrays, frontiers: Arrays, cts: list[Cotangent]
) -> tuple[PyTree, ...]:
    """Returns the cotangents of the params, inputs and edges in `varied`. Each segment runs again, the last one first.

    After them is `None` for the segments, and for `select`.
    """
    float_pushes = [i for i, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0]
    first = [x[0] for x in frontiers]
    float_states = [is_float(x) for x in first]

    def step(carry: tuple[PyTree, ...], xs: tuple[_Step, Arrays]) -> tuple[tuple[PyTree, ...], None]:
        (segment, frontier), (above, by_params, by_inputs, by_edges) = xs, carry
        chosen = _chosen(loop, segment, segments, arrays.select)
        args = frontier, *_rows(arrays, segment)[:3]

        def floats(leaves: tuple[PyTree, ...]) -> tuple[PyTree, Arrays]:
            below, params, inputs, edges = with_differentiated(args, leaves)
            frontier_above, outs = _segment(loop, segment, chosen.index, below, Arguments(params, inputs, edges, None))
            return differentiated(frontier_above, float_states), [outs[i] for i in float_pushes]

        _, pull = jax.vjp(floats, differentiated(args, (float_states, *varied)))
        ((below, ct_params, ct_rows, ct_edges),) = pull((above, chosen.cotangents([jnp.asarray(cts[i]) for i in float_pushes])))
        by_params = jax.tree.map(jnp.add, by_params, ct_params)
        # Every vertex and every edge belongs to one segment.
        by_inputs = jax.tree.map(lambda x, ct: x.at[segment.vertex].set(ct, mode="drop"), by_inputs, ct_rows)
        by_edges = jax.tree.map(lambda x, ct: x.at[segment.edge].set(ct, mode="drop"), by_edges, ct_edges)
        return (below, by_params, by_inputs, by_edges), None

    zeros = jax.tree.map(jnp.zeros_like, differentiated((first, *arrays[:3]), (float_states, *varied)))
    (_, *gradients), _ = lax.scan(step, zeros, (_steps(segments), frontiers), reverse=True)
    return *gradients, None, None


def _differentiable(loop: _Loop, vertices: int) -> Callable[..., Arrays]:
    """Returns the pushes as a function of flat params, inputs, edges, segments and `select`, with its derivative."""

    def whole(params: Arrays, inputs: Arrays, edges: Arrays, segments: SegmentArrays, select: jax.Array | None) -> Arrays:
        return _forward(loop, vertices, Arguments(params, inputs, edges, select), segments)[0]

    def forward(varied: Any, *values: Any) -> tuple[Arrays, Callable[..., Any]]:
        params, inputs, edges, segments, select = values
        arrays = Arguments(params, inputs, edges, select)
        outs, frontiers = _forward(loop, vertices, arrays, segments)
        return outs, jax.tree_util.Partial(functools.partial(_backward, loop, varied[:3]), arrays, segments, frontiers)

    return reverse_differentiable(whole, forward, "run", once=True)
