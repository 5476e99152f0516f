"""`run`: evaluates F at every vertex of a batch, with its own VJP (`_run.forward`, `_run.adjoint`)."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from cavs._engines.choose import ENGINES, engine_of
from cavs._engines.engine import Engine, Job
from cavs._function.arrays import as_array, as_arrays, as_indices
from cavs._function.evaluate import pad_rows
from cavs._function.keep_options import NO_OPTIONS, MemoryOptions
from cavs._function.mixed import mixed
from cavs._function.plan import FunctionPlan
from cavs._function.raw_keys import from_stored
from cavs._function.vertex import Pushed, VertexFunction, check_function
from cavs._graphs.counted import counted
from cavs._graphs.graphs import SMALL_FAN_IN
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Arrays
from cavs._jaxpr.mesh_types import unsharded
from cavs._jaxpr.settings import always_compiled
from cavs._run.compiled import Call, compiled
from cavs._run.manual_axes import across_axes
from cavs._run.plans import plan_of
from cavs._run.segments import run_in_segments
from cavs._schedule.level_segments import SegmentedSchedule
from cavs._schedule.schedule import ExportedSchedule, Schedule, check_schedule
from cavs.kernels import Target, checked

MSG_PAD = "Under jax.jit, write sched.{}(rows) on the host before the call."
ROWS_OF = {  # what each has one row for, and what to write if their number is wrong
    "inputs": ("vertex", MSG_PAD.format("pad")),
    "edges": ("edge", f"The rows have the order of Graphs.children. {MSG_PAD.format('pad_edges')}"),
}


@always_compiled
def run(
    F: VertexFunction[Pushed],
    params: PyTree,
    sched: Schedule,
    inputs: PyTree = None,
    *,
    edges: PyTree = None,
    select: ArrayLike | Sequence[int] | None = None,
    engine: str | Engine | None = None,
) -> Pushed:
    """Evaluates F at every vertex of a scheduled batch, and returns what the vertices pushed.

    This is a pure function of `params`, `inputs` and `edges`. It composes with `jax.jit`, derivatives in reverse and forward
    mode, `jax.vmap` over these, `jax.checkpoint`, `jax.shard_map`, and loops of `jax.lax`, in any order. Second derivatives
    work in forward mode, such as `jax.jvp` of `jax.grad`; reverse over reverse raises a `TypeError`.

    V is the number of vertices and Vp = `sched.shape.vertices` the padded number.

    Source: Cavs, sections 3.3 to 3.5; VPPS, section III, for engine `persistent`.

    Args:
        F: the vertex function.
        params: a pytree of arrays, which F receives as its first argument.
        sched: the schedule of the batch, from [`cavs.schedule`][].
        inputs: a pytree of arrays with one row per vertex, which `v.pull()` reads, in the order of the graphs. Leaves are
            any[V, ...], or any[Vp, ...] as `sched.pad` returns, which is required if `sched` is traced. `None` if F pulls
            nothing.
        edges: a pytree of arrays with one row per edge, which `v.gather_all(fn, edges=True)` reads, in the order of
            `Graphs.children`. Leaves are any[E, ...], or any[Ep, ...] as `sched.pad_edges` returns, which is required if
            `sched` is traced. `None` if F reads no edges.
        select: int[M], the vertices whose pushes are returned, such as `sched.roots`. `None` selects all. Selecting few
            saves computation and memory traffic.
        engine: `"scan"` runs XLA loops on any device. `"persistent"` runs one kernel launch for all levels; it needs an NVIDIA
            Hopper GPU, JAX 0.11 or newer, and an F that fits. `"native"` runs all levels in one call of a library in C++, on a
            CPU; it needs an F in float32 that fits, and a C++ compiler when cavs was installed. `None` chooses the fastest one
            that fits; `cavs.explain(F)` tells which one and why. Under `jax.vmap` and for second derivatives, engine `"scan"`
            runs.

    Returns:
        The pytree that F pushes. Its leaves are (V, ...) for inputs of V rows and (Vp, ...) for padded inputs, with zeros in
        the padding; (M, ...) with `select`. Without inputs they have V rows if `sched` is concrete, else Vp.

    Raises:
        TypeError: `F` or `sched` has another type, or F is misused while it is traced.
        ValueError: the arguments do not fit each other, F is misused while it is traced, or the engine cannot run F.
    """
    return run_with_options(F, params, sched, inputs, edges=edges, select=select, engine=engine)


def run_with_options(
    F: VertexFunction,
    params: PyTree,
    sched: Schedule,
    inputs: PyTree = None,
    *,
    edges: PyTree = None,
    select: ArrayLike | Sequence[int] | None = None,
    engine: str | Engine | None = None,
    options: MemoryOptions = NO_OPTIONS,
) -> PyTree:
    """Returns `run(...)`, whose backward pass saves what `options` say."""
    check_function("run", F)
    check_schedule("run", sched)
    user_engine, target = engine_of(engine), Target.here()
    params, inputs, edges = (
        jax.tree.map(unsharded, as_arrays(x, f"run: {name}"))
        for x, name in ((params, "params"), (inputs, "inputs"), (edges, "edges"))
    )
    exact = int(sched.host().num_vertices) if sched.is_concrete else None
    inputs, length = _padded("inputs", inputs, sched.shape.vertices, exact)
    kinds = kind_names(F, sched)
    num_edges = sched.num_edges if edges is not None and sched.is_concrete else None
    edges, _ = _padded("edges", edges, sched.shape.all_edges, num_edges)
    F, inputs = for_schedule(F, sched, inputs)
    plan = plan_for(F, params, sched, inputs, edges)
    if edges is not None and not plan.reads_edges:
        raise ValueError(
            "run: edges: got edges, which F does not read; expected None. Write v.gather_all(lambda state, edge: ..., "
            "edges=True) in F, or omit edges."
        )
    too_many = _check_arity(F, plan, sched, kinds)
    select = None if select is None else _checked_rows(select, exact)
    if user_engine is None and any(type(x).__name__ == "BatchTracer" for x in jax.tree.leaves((params, inputs, edges))):
        user_engine = ENGINES["scan"]  # under jax.vmap: JAX exports no public type of its tracers
    job = Job(plan, sched.shape, kinds, target, options, isinstance(sched, ExportedSchedule))
    call = Call(job, sched, user_engine, params, inputs, edges, select)
    outs = run_in_segments(call, sched, run_with_options) if isinstance(sched, SegmentedSchedule) else _whole(call)
    if too_many is not None:
        outs = [checked(x, too_many) for x in outs]
    if select is None and length != sched.shape.vertices:
        outs = [x[:length] for x in outs]
    return plan.push_tree.unflatten(map(from_stored, outs, plan.push_impls))


def _whole(call: Call) -> Arrays:
    """Returns the leaves of the pushes of all levels, as stored."""
    jitted = compiled(call.job, call.user_engine)
    # A traced schedule is inside a `jax.jit` already. JAX would trace another one without its derivative first, for nothing.
    function = across_axes(jitted if call.sched.is_concrete else jitted.__wrapped__)
    return function(jax.tree.leaves(call.params), call.sched.data, jax.tree.leaves((call.inputs, call.edges)), call.select)


def _padded(name: str, rows: PyTree, padded: int, exact: int | None) -> tuple[PyTree, int]:
    """Returns the argument `name` padded to `padded` rows, and the number of rows it had: `padded`, or `exact` if known."""
    shapes = [x.shape for x in jax.tree.leaves(rows)]
    lengths = {shape[0] if shape else None for shape in shapes}
    if not lengths <= {padded, exact} or len(lengths) > 1 or None in lengths:
        unit, cure = ROWS_OF[name]
        if None in lengths and name == "inputs":
            cure = "Write np.asarray(rows) for nested lists."
        expected = f"{padded} (padded)" if exact is None else f"{exact} (one row per {unit}) or {padded} (padded)"
        raise ValueError(f"run: {name}: got leaves of shapes {shapes[:8]}; expected a first axis of {expected}. {cure}")
    length = shapes[0][0] if shapes else padded if exact is None else exact
    return jax.tree.map(lambda x: pad_rows(x, padded), rows) if length != padded else rows, length


def _checked_rows(select: ArrayLike | Sequence[int], exact: int | None) -> jax.Array:
    """Returns `select` as an array. Its values are checked if they and the number of vertices are concrete."""
    select = as_indices(as_array(select, "run: select"))
    if select.ndim != 1 or not jnp.issubdtype(select.dtype, jnp.integer):
        raise ValueError(
            f"run: select: got shape {select.shape} and dtype {select.dtype}; expected a 1-d array of ints. Write "
            "select=sched.roots, for instance, or select=np.flatnonzero(mask)."
        )
    if exact is not None and not isinstance(select, Tracer) and select.size:
        low, high = int(np.asarray(select).min()), int(np.asarray(select).max())
        if low < 0 or high >= exact:
            raise ValueError(f"run: select: got vertices {low} to {high}; expected 0 to {exact - 1}, as in sched.roots.")
    return select


def plan_for(F: VertexFunction, params: PyTree, sched: Schedule, inputs: PyTree, edges: PyTree) -> FunctionPlan:
    """Returns the plan of F for the arguments of a call of `run`."""

    def struct(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:  # keys of jax.random have no weak type
        return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))

    param_shapes = jax.tree.map(lambda x: struct(x, x.shape), params)
    rows = jax.tree.map(lambda x: struct(x, x.shape[1:]), {"inputs": inputs, "edges": edges})
    return plan_of(F, param_shapes, most=sched.shape.most_children, **rows)


def kind_names(F: VertexFunction, sched: Schedule) -> tuple[str | None, ...]:
    """Returns for each kind of the schedule the name of the function that evaluates it."""
    if None in F.fns:
        return (None,) * len(sched.shape.kinds)
    missing = [k for k in sched.shape.kinds if k not in F.fns]
    if missing == [""]:
        raise ValueError(
            f"run: sched: got graphs without kinds; expected the kinds of F, {sorted(F.fns)}. Write, for instance, "
            f"cavs.from_parents(parents, kind=[0, 1, ...], kind_names={sorted(F.fns)}); and cavs.schedule without kinds=False."
        )
    if missing:
        raise ValueError(
            f"run: sched: got vertices of kind {missing[0]!r} (kinds {list(sched.shape.kinds)}); expected the kinds of F, "
            f"{sorted(F.fns)}. Write VertexFunction({{{missing[0]!r}: fn, ...}}), or graphs with kinds of these names."
        )
    return sched.shape.kinds


def for_schedule(F: VertexFunction, sched: Schedule, inputs: PyTree) -> tuple[VertexFunction, PyTree]:
    """Returns F and its inputs for a schedule whose tasks may mix kinds; see `mixed`."""
    if not sched.shape.mixed or None in F.fns or F.mixes:
        return F, inputs
    return mixed(F, sched.shape.kinds, sched.shape.mixed), {"inputs": inputs, "kind": jnp.asarray(sched.kind)}


def _check_arity(F: VertexFunction, plan: FunctionPlan, sched: Schedule, kinds: tuple[str | None, ...]) -> jax.Array | None:
    """Raises `ValueError` if a vertex has more children than the function of its kind reads.

    The shape of a traced schedule only tells whether a vertex of any kind has more than one to four children. If that does not
    answer the question, compiled code checks the numbers: a host callback raises the error. In this case int32[1] is returned,
    nonzero if a vertex has too many children, which turns the pushes into NaN. Otherwise `None` is returned.
    """
    inner_kinds = sched.shape.mixed or [k for k, size in enumerate(sched.shape.inner) if size]
    counted_kinds = {k: kinds[k] for k in inner_kinds if kinds[k] not in plan.inner[kinds[k]].role.gathering}
    if not F.arity or not counted_kinds:
        return None
    refuse = functools.partial(_refuse, F.arity, tuple(counted_kinds.values()))
    if sched.is_concrete:
        refuse(_most_children(sched.host(), counted_kinds))
    elif sched.shape.fan_in > min(F.arity, SMALL_FAN_IN):
        if F.arity <= SMALL_FAN_IN and len(counted_kinds) == len(kinds):
            raise ValueError(_too_many(F.arity, None, kinds[0] if len({*kinds}) == 1 else None))
        most = _most_children(sched, counted_kinds)
        bad = (most > F.arity).any()
        if not isinstance(sched, ExportedSchedule):
            jax.lax.cond(bad, lambda: jax.debug.callback(refuse, most), lambda: None)
        return bad.astype(jnp.int32).reshape(1)
    return None


def _most_children(sched: Schedule, kinds: Iterable[int]) -> Any:
    """Returns the largest number of children of a vertex of each of `kinds`: an array of NumPy or JAX, like the schedule's."""
    xp = np if isinstance(sched.data, np.ndarray) else jnp
    begins = np.cumsum([0, *sched.shape.inner]).tolist()
    if sched.shape.mixed:
        size = sum(sched.shape.inner)
        real, kind = np.arange(size) < sched.inner_count[0], sched.kind[sched.inner_vertex[:size]]
        return xp.stack([xp.where(real & (kind == k), sched.num_children, 0).max(initial=0) for k in kinds])
    by_kind = [(sched.num_children[begins[k] : begins[k + 1]], sched.inner_count[k]) for k in kinds]
    return xp.stack([xp.where(np.arange(len(n)) < count, n, 0).max(initial=0) for n, count in by_kind])


def _refuse(arity: int, kinds: Sequence[str | None], most: np.ndarray) -> None:
    for kind, number in zip(kinds, np.asarray(most).tolist(), strict=True):
        if number > arity:
            raise ValueError(_too_many(arity, number, kind))


def _too_many(arity: int, most: int | None, kind: str | None) -> str:
    has = counted(most, "child") if most else f"more than {counted(arity, 'child')}"
    of, at = ("", "") if kind is None else (f" of kind {kind!r}", " there")
    return (
        f"run: sched: got a vertex{of} with {has}; expected at most {arity}, as arity is {arity} and F does not call "
        f"gather_all{at}. Write VertexFunction(..., arity={most or '...'}), or v.gather_all(fn), or take a ready program for "
        "any number of children, such as ChildSumTreeLSTM."
    )
