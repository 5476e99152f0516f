"""The forward pass of `run` (Cavs Algorithm 1): leaves, static and eager parts, the levels on an engine, the lazy part."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cavs._engines.engine import Batch, Engine, ForwardLevels, Job
from cavs._jaxpr.jaxprs import Arrays
from cavs._schedule.schedule import Schedule
from cavs._stages.batched import lazy_arguments, lazy_function, leaf_block, leaf_function, static_values, without_cotangents
from cavs._stages.saved import Saved, Transpose
from cavs._stages.segment import with_vjp, with_vjp_in_blocks
from cavs._stages.tensors import Values, get_rows, leaf_vertices, write
from cavs.kernels import checked


class Arguments(NamedTuple):
    """The arrays that `run` is given, flat."""

    params: Arrays  # the leaves of the parameters
    inputs: Arrays  # the leaves of the inputs, (Vp, ...)
    edges: Arrays  # the leaves of the edges, (Ep, ...)
    select: jax.Array | None  # (M,) ints, the vertices whose pushes are returned; `None` for all


class _Leaves(NamedTuple):
    """F at the leaves; empty if the engine runs them."""

    vertices: Arrays  # for each kind, the rows of its leaves in the inputs, padded
    states: Arrays  # as `Engine.forward_levels` takes them
    pushes: list[Arrays]  # for each kind, the pushes of its leaves
    transposes: list[Transpose]  # for each kind, the transpose of F


def forward(job: Job, sched: Schedule, engine: Engine, arrays: Arguments, save: bool) -> tuple[Arrays, Saved | None]:
    """Evaluates F at every vertex of a batch.

    `save`: whether to save what `_run.adjoint.backward` reads. Returns the leaves of the pushes, (Vp, ...), or (M, ...) with
    `select`; and with `save` the residuals, else `None`.
    """
    plan, select = job.plan, arrays.select
    batch = engine.batch(job, sched)
    with jax.named_scope("leaves"):  # profiles and memory plans show these names
        leaves = _Leaves([], [], [], []) if batch.has_leaves else _leaves(batch, engine, arrays, save)
    with jax.named_scope("eager"):
        statics, static, eager_rows, eager = _static_and_eager(batch, engine, arrays, save)
    with jax.named_scope("levels"):
        levels = engine.forward_levels(batch, leaves.states, statics, eager_rows, save)
    lazy: list[Transpose] = []
    if plan.push_states is not None:
        index = sched.row if select is None else jnp.asarray(sched.row).at[select].get(mode="clip")
        outs = [get_rows(levels.states[i], index) for i in plan.push_states]
    else:
        with jax.named_scope("lazy"):
            outs, lazy = _pushes(batch, leaves, statics, eager_rows, levels, save)
        if select is not None:
            outs = [o.at[select].get(mode="clip") for o in outs]
    if levels.gave_up is not None:
        outs = [checked(x, levels.gave_up) for x in outs]
    if not save:
        return outs, None
    return outs, Saved(
        eager=eager,
        eager_rows=eager_rows,
        edges=arrays.edges,
        extras=levels.extras,
        inputs=arrays.inputs,
        kept=levels.kept,
        lazy=lazy,
        leaf=leaves.transposes,
        states=levels.states,
        static=static,
        statics=statics,
    )


def _leaves(batch: Batch, engine: Engine, arrays: Arguments, save: bool) -> _Leaves:
    """Evaluates F at the leaves: they gather nothing, so all leaves of a kind are one batch."""
    plan, sched, kinds, shape = batch.plan, batch.sched, batch.kinds, batch.sched.shape
    whole = engine.one_launch and len(kinds) == 1  # the dynamic tensors are the leaves' states, padded
    states = [] if whole else [batch.zeros((shape.rows, *a.shape), a.dtype) for a in plan.state_avals]
    vertices = leaf_vertices(sched)

    def pulled(vertex: jax.Array) -> tuple[Arrays]:
        return ([get_rows(x, vertex) for x in arrays.inputs],)

    pushes: list[Arrays] = []
    transposes: list[Transpose] = []
    for k, (name, size, vertex) in enumerate(zip(kinds, shape.leaves, vertices, strict=True)):
        role = plan.leaf[name]
        block = leaf_block(role, size)
        fn = leaf_function(role, block or size, sched.leaf_count[k], stored=engine.one_launch)
        fixed = {i for i, v in enumerate(role.arguments) if v in role.fixed}
        if block:
            (s, y), vjp = with_vjp_in_blocks(fn, save, (arrays.params,), pulled, vertex, block, fixed)
        else:
            (s, y), vjp = with_vjp(fn, save, (arrays.params,), functools.partial(pulled, vertex), fixed)
        transposes += vjp
        if whole:
            room = shape.pad, sum(shape.inner)  # a launch needs no slack after the rows
            states = [jnp.pad(x, (room, *((0, 0),) * (x.ndim - 1))) for x in s]
        else:
            states = [write(b, x, sched.leaf_row[k]) for b, x in zip(states, s, strict=True)]
        pushes.append(y)
    return _Leaves(vertices, states, pushes, transposes)


def _static_and_eager(
    batch: Batch, engine: Engine, arrays: Arguments, save: bool
) -> tuple[list[Arrays], list[Transpose], list[list[Values]], list[Transpose]]:
    """Returns for each kind the values of the static part and of the eager part, each followed by the transposes."""
    statics: list[Arrays] = []
    eager_rows: list[list[Values]] = []
    static: list[Transpose] = []
    eager: list[Transpose] = []
    for k, (part, of_part) in enumerate(zip(batch.parts, batch.rows, strict=True)):
        fixed = {i for i, v in enumerate(part.role.params) if v in part.role.fixed}
        values, vjp = with_vjp(functools.partial(static_values, part, of_part), save, (arrays.params,), fixed=fixed)
        statics.append(values)
        static += vjp
        rows, vjp = engine.eager_part(batch, k, values, arrays.inputs, arrays.edges, save)
        eager_rows.append(rows)
        eager += vjp
    return statics, static, eager_rows, eager


def _pushes(
    batch: Batch, leaves: _Leaves, statics: list[Arrays], eager: list[list[Values]], levels: ForwardLevels, save: bool
) -> tuple[Arrays, list[Transpose]]:
    """Evaluates the lazy part. Returns the pushes of all vertices, (Vp, ...), and for each kind the transpose."""
    plan, sched, vertices = batch.plan, batch.sched, batch.sched.shape.vertices
    transposes: list[Transpose] = []
    outs = [jnp.zeros((vertices, *a.shape), a.dtype) for a in plan.push_avals]
    for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
        if not batch.has_leaves:
            index = _out_of_bounds_from(leaves.vertices[k], sched.leaf_count[k], vertices)
            outs = [o.at[index].set(y, mode="drop") for o, y in zip(outs, leaves.pushes[k], strict=True)]
        read = functools.partial(lazy_arguments, part, rows, levels.states, eager[k], levels.extras[k])
        y, vjp = with_vjp(lazy_function(part, rows), save, (statics[k],), read, without_cotangents(part))
        transposes += vjp
        index = _out_of_bounds_from(rows.vertex, rows.count, vertices)
        outs = [o.at[index].set(x, mode="drop") for o, x in zip(outs, y, strict=True)]
    return outs, transposes


def _out_of_bounds_from(index: jax.Array, count: jax.Array, nowhere: int) -> jax.Array:
    """Returns `index` with `nowhere` from place `count` on: a row that is out of bounds, so that nothing is written there."""
    return jnp.where(jnp.arange(index.shape[0]) < count, index, nowhere)
