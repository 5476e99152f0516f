"""Engine `native`: a library in C++ runs all levels of a direction in one call, on the cores of a CPU.

XLA on a CPU runs a task as some dozen kernels, each with a pass over its operands and a microsecond of overhead. The library
runs F's equations for a few rows at a time, which stay in the L1 cache, and its products read gathered rows where they are,
from weights that are packed once a call. Leaves are one more level, before all others, and the eager part is a level in a
call of its own. The lazy part is that of engine `scan`.

The library has no rules for `jax.vmap` and `jax.jvp`: the same levels then run on engine `scan`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cavs._engines.engine import BackwardLevels, Batch, Cotangents, ForwardLevels, batch_of
from cavs._engines.native.call import NativeCall
from cavs._engines.native.eager import eager_part, in_library
from cavs._engines.native.gradients import gradients
from cavs._engines.native.kinds import NO_KIND, Name, lowered
from cavs._engines.scan import engine as scan, reverse as scan_reverse, rounds as scan_rounds
from cavs._engines.scan.task import (
    Kind,
    StateCotangents,
    Totals,
    all_rows_back,
    empty_cuts,
    is_leaf,
    kind_of,
    with_reuse,
)
from cavs._function.domains import EDGE
from cavs._function.plan import FunctionPlan
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Var, is_var
from cavs._jaxpr.ruled import replaceable
from cavs._schedule.schedule import Schedule, Shape
from cavs._schedule.tasks import SMALLEST_TASK
from cavs._stages.entrance import memory_of
from cavs._stages.saved import Saved, Transpose
from cavs._stages.segment import after
from cavs._stages.tensors import Rows
from cavs.kernels import Unfit, native_unavailable

Arrays = list[jax.Array]
# From this mean width of tasks on, the levels run what is eager: products are fast there, and results stay in the cache.
WIDE_TASKS = 3


@dataclasses.dataclass(frozen=True)
class Native:
    """Engine `native`: C++ runs the levels on a CPU. See [`Engine`][cavs._engines.engine.Engine]."""

    launches = False
    pulls_in_levels = False

    def runs_leaves(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> bool:
        """Whether the library can compute F at the leaves."""
        return not leaves_unfit(plan, {name: k for k, name in enumerate(kinds) if shape.leaves[k]}, len(kinds))

    def prefers(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> FunctionPlan:
        """The plan without an eager part if tasks are wide, and if the library has all that the levels then need."""
        if sum(shape.inner) < WIDE_TASKS * shape.tasks or any(part.eager.reads_edges for part in plan.inner.values()):
            return plan
        other = plan.without_eager_part()
        return plan if unfit(other, shape, kinds) else other

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, save: bool
    ) -> tuple[Arrays, list[Transpose]] | None:
        """Computes it in the library, if this has all that the eager part needs."""
        return eager_part(batch, k, statics, inputs, save)

    def forward_levels(
        self, batch: Batch, states: Arrays, statics: list[Arrays], eager: list[Arrays], save: bool
    ) -> ForwardLevels:
        """Runs the forward's levels, and the leaves, in one call."""
        here_of, inner = _batches(batch), len(batch.kinds)

        def on_scan(data: jax.Array, states: Arrays, statics: list[Arrays], eager: list[Arrays]) -> PyTree:
            here = here_of(data)
            kept, extras = [], []
            if here.has_leaves:
                states, kept, extras = scan.forward_leaves(here, statics[inner:], eager[inner:], save)
            found = scan.forward_levels(here.without_leaves, states, statics[:inner], eager[:inner], save)
            return found.states, [*found.kept, *kept], [*found.extras, *extras]

        def on_library(data: jax.Array, states: Arrays, statics: list[Arrays], eager: list[Arrays]) -> PyTree:
            return _forward_call(here_of(data), states, statics, eager, save)

        both = replaceable(on_library, on_scan)
        states, kept, extras = both(jnp.asarray(batch.sched.data), states, statics, eager)
        return ForwardLevels(states, kept, extras, None)

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels, and that of the leaves, in one call."""
        rounds = functools.partial(_rounds_back, batch, saved)
        alone = batch.plan.push_states is not None  # the eager part gets no other cotangents than those of the levels
        return scan_reverse.backward_levels(batch, saved, cotangents, rounds, gradients, in_library(batch) if alone else [])


def unfit(plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """Returns why engine `native` cannot run a plan on schedules of a shape, or `None` if it can."""
    if len(shape.classes) == 1 and shape.classes[0][0] == SMALLEST_TASK:
        return "the schedule runs vertex by vertex (policy='serial'), and it runs levels"
    return unfit_function(plan, {name: k for k, name in enumerate(kinds) if shape.inner[k]})


def unfit_function(plan: FunctionPlan, kinds: dict[str | None, int] | None = None) -> str | None:
    """Returns why engine `native` cannot run F at vertices of some kinds, or `None` if it can.

    Args:
        plan: F.
        kinds: The kinds of vertices with children, and their numbers; `None` for all.
    """
    if reason := native_unavailable():
        return reason
    off = [name for name in ("lazy", "fusion") if not getattr(plan.function.optimizations, name)]
    if off:
        return f"F was created with Optimizations({off[0]}=False)"
    try:
        for name, k in (dict.fromkeys(plan.inner, 0) if kinds is None else kinds).items():
            part = plan.inner[name]
            for forward in (True, False) if part.joint.differentiable else (True,):
                lowered(part, k, forward, save=True)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def leaves_unfit(plan: FunctionPlan, kinds: dict[str | None, int], count: int) -> str | None:
    """Returns why XLA runs the leaves of some kinds, or `None` if the library does.

    Args:
        plan: F.
        kinds: The kinds that have leaves, and their numbers.
        count: How many kinds there are in all.
    """
    try:
        for name, k in kinds.items():
            part = plan.leaf_part(name)
            if part.gathers_all:
                raise Unfit("it calls gather_all")
            if any(is_var(x) and x in part.recurrent.statics for x in part.role.states):
                raise Unfit("it scatters what follows from parameters alone")
            for forward in (True, False) if part.joint.differentiable else (True,):
                lowered(part, count + k, forward, save=True)
    except Unfit as e:
        return str(e)
    return None


def _batches(batch: Batch) -> Callable[[jax.Array], Batch]:
    """Returns the batch as a function of its schedule's integers, which does not keep those of `batch`, tracers, alive."""
    plan, shape, kinds, leaves = batch.plan, batch.sched.shape, batch.kinds, batch.has_leaves
    return lambda data: batch_of(plan, Schedule(data, shape), kinds, leaves)


def _forward_call(batch: Batch, states: Arrays, statics: list[Arrays], eager: list[Arrays], save: bool) -> PyTree:
    call = NativeCall(batch, backward=False)
    avals = batch.plan.state_avals
    for i, a in enumerate(avals):
        if batch.has_leaves:
            call.created("state", NO_KIND, i, jax.ShapeDtypeStruct((batch.sched.shape.rows, *a.shape), a.dtype))
        else:
            call.updated("state", i, states[i])
    for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
        own = lowered(part, k, True, save) if rows.size else None
        crossing = [x for v, x in zip(part.eager.outs, eager[k], strict=True) if v in part.recurrent.cross]
        call.kind(own, k, part, statics[k], crossing)
        for n, v in enumerate(part.forward.keep if save else ()):
            call.created("kept", k, n, _shape(rows, v.aval, part.joint.domain.get(v) == EDGE, slack=True))
        for n, (x, domain) in enumerate(zip(part.recurrent.extra, part.extra_domain, strict=True)):
            call.created("extra", k, n, _shape(rows, x.aval, domain == EDGE, slack=False))
    out = call.run()
    kept = [[out["kept", k, n] for n in range(len(p.forward.keep) if save else 0)] for k, p in enumerate(batch.parts)]
    extras = [[out["extra", k, n] for n in range(len(p.recurrent.extra))] for k, p in enumerate(batch.parts)]
    return [out["state", NO_KIND, i] for i in range(len(avals))], kept, extras


def _shape(rows: Rows, aval: Any, edge: bool, slack: bool) -> jax.ShapeDtypeStruct:
    n, pad = (rows.edges, rows.edge_pad) if edge else (rows.size, rows.pad)
    return jax.ShapeDtypeStruct((n + 2 * pad * slack, *aval.shape), aval.dtype)


def _rounds_back(
    batch: Batch, saved: Saved, loop: scan_rounds.Loop, tasks: jax.Array, g: StateCotangents, totals: Totals
) -> tuple[jax.Array, StateCotangents, list[dict[Any, jax.Array]], Totals]:
    """As `scan_rounds.rounds_back`, with the leaves that are kinds."""
    levels = saved.states, saved.statics, saved.eager_rows, saved.kept, saved.extras
    numbers, cts = [kind.number for kind in loop.kinds], [kind.extra_cts for kind in loop.kinds]
    reuse = [(bool(kind.reused or kind.own), bool(kind.own)) for kind in loop.kinds]
    here_of, inner_kinds = _batches(batch), len(batch.kinds)
    fixed = loop.options, scan_rounds.rounds_back, loop.products, loop.eager  # no tracers

    def loop_of(data: jax.Array, levels: PyTree, cts: PyTree) -> scan_rounds.Loop:
        here = here_of(data)
        own = Saved(eager=[], edges=[], inputs=[], lazy=[], leaf=[], static=[], **dict(zip(_LEVELS, levels, strict=True)))
        kinds = []
        for k, own_cts, reuses in zip(numbers, cts, reuse, strict=True):
            part, rows = here.parts[k], here.rows[k]
            kind = kind_of(k, part, rows, [], memory_of(part, rows, own, k), True)
            kinds.append((with_reuse(kind, reuses[1]) if reuses[0] else kind)._replace(extra_cts=own_cts))
        return scan_rounds.Loop(here.sched, here.zeros, kinds, scan_rounds.begins_of(here.sched), *fixed)

    def on_scan(data: jax.Array, levels: PyTree, cts: PyTree, g: StateCotangents, tasks: jax.Array) -> PyTree:
        here = loop_of(data, levels, cts)
        inner = here._replace(kinds=[kind for kind in here.kinds if not is_leaf(kind, here.sched)])
        _, g, cuts, _ = scan_rounds.rounds_back(inner, tasks, g, [{} for _ in inner.kinds])
        found = [[own[v] for v in kind.stored] for kind, own in zip(inner.kinds, cuts, strict=True)]
        for kind in here.kinds[len(inner.kinds) :]:
            found.append(all_rows_back(kind, here.sched.leaf_row[kind.number - inner_kinds], g, here.options.fusion))
        return g, found

    def on_library(data: jax.Array, levels: PyTree, cts: PyTree, g: StateCotangents, _: jax.Array) -> PyTree:
        return _backward_call(here_of(data), loop_of(data, levels, cts), levels, g)

    g, cuts = replaceable(on_library, on_scan)(jnp.asarray(batch.sched.data), levels, cts, g, tasks)
    left = jnp.zeros((), jnp.int32)
    left = after([x for own in cuts for x in own], [left[None]])[0][0]  # not known before the levels have run
    return left, g, [dict(zip(kind.stored, own, strict=True)) for kind, own in zip(loop.kinds, cuts, strict=True)], totals


_LEVELS = ("states", "statics", "eager_rows", "kept", "extras")


def _backward_call(batch: Batch, loop: scan_rounds.Loop, levels: tuple[PyTree, ...], g: StateCotangents) -> PyTree:
    states, statics, eager, kept, extras = levels
    call = NativeCall(batch, backward=True)
    for i, x in enumerate(states):
        call.given[("state", NO_KIND, i)] = x
    for i, x in g.items():
        call.updated("cotangent", i, x)
    for kind in loop.kinds:
        k, part, rows = kind.number, kind.part, kind.rows
        crossing = [x for v, x in zip(part.eager.outs, eager[k], strict=True) if v in part.recurrent.cross]
        program = lowered(part, k, False, True, kind.reused, kind.own) if rows.size else None
        call.kind(program, k, part, statics[k], crossing)
        call.given |= {("kept", k, n): x for n, x in enumerate(kept[k])}
        call.given |= {("extra", k, n): x for n, x in enumerate(extras[k])}
        for i in part.reverse.extra_cts:
            domain = part.extra_domain[i]
            v = part.recurrent.extra[i]
            zero = functools.partial(_zeros, _shape(rows, v.aval, domain == EDGE, slack=True))
            call.given[("extra_cotangent", k, i)] = kind.extra_cts[i] if i in kind.extra_cts else zero
        shapes = jax.eval_shape(lambda kind=kind: empty_cuts(kind, batch.zeros))
        for v, x in zip(kind.stored, shapes, strict=True):
            if v in kind.reused:
                call.overwritten(("kept", k, kind.reused[v]))
            else:
                call.created("cut", k, kind.cuts.values.index(v), x)
    out = call.run()

    def name(kind: Kind, v: Var) -> Name:
        reused = v in kind.reused
        return ("kept", kind.number, kind.reused[v]) if reused else ("cut", kind.number, kind.cuts.values.index(v))

    cuts = [[out[name(kind, v)] for v in kind.stored] for kind in loop.kinds]
    return {i: out["cotangent", NO_KIND, i] for i in g}, cuts


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)
