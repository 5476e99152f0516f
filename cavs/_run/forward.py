"""The forward of `run` (Cavs Algorithm 1): static part, leaves, eager part, the levels on an engine, lazy part."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from cavs._engines.engine import Batch, Engine
from cavs._function.plan import Plan
from cavs._schedule.schedule import Schedule
from cavs._stages.batched import eager_function, lazy_arguments, lazy_function, leaf_function, pull, static_values
from cavs._stages.tensors import Zeros, get_rows, leaf_vertices, rows_of_kinds, write
from cavs.kernels import checked


def forward(
    plan: Plan,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    engine: Engine,
    params: list[Any],
    inputs: list[Any],
    select: Any,
    save: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """The pushes, flat: (Vp, ...), or (M, ...) at `select`; and with `save` what the backward reads (`_run.adjoint`)."""
    shape = sched.shape
    all_rows = rows_of_kinds(sched, plan.function.arity)
    zeros = Zeros(sched)
    whole = engine.launches and len(kinds) == 1  # states are made of the leaves' in one piece
    states = [] if whole else [zeros((shape.rows, *a.shape), a.dtype) for a in plan.state_avals]
    saved: dict[str, Any] = {"inputs": inputs, "leaf": [], "static": [], "eager": [], "lazy": []}

    # Leaves: nothing is gathered, so every leaf of a kind is evaluated in one batch.
    leaf_pushes, leaves = [], leaf_vertices(sched)
    for k, (name, size) in enumerate(zip(kinds, shape.leaves, strict=True)):
        pulled = [get_rows(x, leaves[k]) for x in inputs]
        (s, y), vjp = _maybe_vjp(leaf_function(plan.leaf[name], size, stored=engine.launches), save, params, pulled)
        saved["leaf"].append(vjp)
        if whole:
            after = shape.rows - shape.pad - size
            states = [jnp.pad(x, ((shape.pad, after), *((0, 0),) * (x.ndim - 1))) for x in s]
        else:
            states = [write(b, x, sched.leaf_row[k]) for b, x in zip(states, s, strict=True)]
        leaf_pushes.append(y)

    # Inner vertices: static and eager parts.
    statics, eager_rows = [], []
    for rows, name in zip(all_rows, kinds, strict=True):
        part = plan.inner[name]
        values, vjp = _maybe_vjp(functools.partial(static_values, part), save, params)
        saved["static"].append(vjp)
        statics.append(values)
        fn = eager_function(part, rows.inner(rows.num_children))
        values, vjp = _maybe_vjp(fn, save, values, pull(part, inputs, rows.vertex))
        saved["eager"].append(vjp)
        eager_rows.append(values)

    # The levels.
    levels = engine.levels(Batch(plan, sched, kinds, all_rows, zeros), states, statics, eager_rows, save)
    states, kept, extras, gave_up = levels

    # Pushes.
    push_states = plan.push_states
    if push_states is not None:
        index = sched.row if select is None else jnp.asarray(sched.row).at[select].get(mode="clip")
        outs = [get_rows(states[i], index) for i in push_states]
    else:
        outs = [jnp.zeros((shape.vertices, *a.shape), a.dtype) for a in plan.push_avals]
        for k, (rows, name) in enumerate(zip(all_rows, kinds, strict=True)):
            index = _only(leaves[k], sched.leaf_count[k], shape.vertices)
            outs = [o.at[index].set(y, mode="drop") for o, y in zip(outs, leaf_pushes[k], strict=True)]
            part = plan.inner[name]
            args = lazy_arguments(part, rows, states, eager_rows[k], extras[k])
            y, vjp = _maybe_vjp(lazy_function(part, rows), save, statics[k], *args)
            saved["lazy"].append(vjp)
            index = _only(rows.vertex, rows.count, shape.vertices)
            outs = [o.at[index].set(x, mode="drop") for o, x in zip(outs, y, strict=True)]
        if select is not None:
            outs = [o.at[select].get(mode="clip") for o in outs]
    if gave_up is not None:
        outs = [checked(x, gave_up) for x in outs]
    if save:
        saved |= {"states": states, "kept": kept, "extras": extras, "statics": statics, "eager_rows": eager_rows}
    return outs, saved


def _maybe_vjp(fn: Any, save: bool, *args: Any) -> tuple[Any, Any]:
    return jax.vjp(fn, *args) if save else (fn(*args), None)


def _only(index: Any, count: Any, nowhere: int) -> Any:
    """`index` with its padding sent out of bounds."""
    return jnp.where(jnp.arange(index.shape[0]) < count, index, nowhere)
