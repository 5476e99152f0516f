"""`run`: evaluates F at every vertex of a batch (Cavs Algorithm 1, forward), with a VJP of our own (`_adjoint`).

Engine `scan`: levels by loops over tasks on any device; dynamic tensors updated in place. Engine `persistent`: see there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from cavs._adjoint import backward
from cavs._engines import ENGINES, INTERPRET, choose_engine
from cavs._parts import eager_function, lazy_arguments, lazy_function, leaf_function, pull, static_values
from cavs._persistent import checked, levels as persistent_levels
from cavs._rows import EDGE, ROW, STATIC, evaluate, is_var, needed, pad_rows, take, turned_weights
from cavs._schedule import Schedule
from cavs._tensors import Rows, Zeros, get_rows, recurrent_inputs, rows_of_kinds, window, write
from cavs._trace import Plan
from cavs._vertex import VertexFunction, as_arrays


def run(
    F: VertexFunction,
    params: Any,
    sched: Schedule,
    inputs: Any = None,
    *,
    at: Any = None,
    engine: str | None = None,
) -> Any:
    """Evaluates F at every vertex of a scheduled batch; returns what the vertices pushed.

    A pure function of `params` and `inputs`: composes with `jax.jit`, `jax.grad`, `jax.vmap` over params,
    `jax.checkpoint`. Forward-mode derivatives of the gradient work (Hessian-vector products by `jax.jvp` of `jax.grad`);
    `jax.jvp` of `run` itself and reverse over reverse are refused by JAX.

    **Arguments:**

    - `F`: the vertex function.
    - `params`: any pytree of arrays.
    - `sched`: from `cavs.schedule`.
    - `inputs`: pytree of arrays with one row per vertex, in the graphs' own order, which `v.pull()` reads; `None` where F
      pulls nothing. (V, ...), or, as under `jax.jit`, padded to (Vp, ...), Vp = `sched.shape.vertices`, by `sched.pad`.
    - `at`: (M,) vertices whose pushes are wanted, such as `sched.roots`; `None`: all. Less is computed and moved.
    - `engine`: `"scan"`, XLA loops on any device; `"persistent"`, one kernel launch for all levels (NVIDIA Hopper, JAX
      0.11 or newer, and an F that fits; else it says why not); `None` chooses, and `F.explain()` says which and why. The
      persistent engine goes neither through `jax.vmap` nor through a second derivative: there write `"scan"`.

    **Returns:** the pushed pytree with leaves (V, ...) for inputs of V rows, (Vp, ...) for padded ones; (M, ...) with
    `at`. Padding rows are zeros. Without inputs: V rows where the schedule is concrete, else Vp.

    **Raises:** `TypeError`, `ValueError` for arguments that do not fit each other, and for misuse inside F (when traced).
    """
    if not isinstance(F, VertexFunction):
        raise TypeError(
            f"run: F is a {type(F).__name__}, wanted a cavs.VertexFunction. Write cavs.VertexFunction(fn, state=...), or "
            "program.vertex_function() for a ready vertex program."
        )
    if not isinstance(sched, Schedule):
        raise TypeError(f"run: sched is a {type(sched).__name__}, wanted a cavs.Schedule. Write cavs.schedule(graphs).")
    if engine not in (None, *ENGINES, INTERPRET):
        raise ValueError(f"run: engine is {engine!r}, wanted None or one of {', '.join(map(repr, ENGINES))}.")
    params, inputs = as_arrays(params, "run: params"), as_arrays(inputs, "run: inputs")
    exact = int(sched.host().num_vertices) if sched.is_concrete else None
    padded = sched.shape.vertices
    lengths = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(inputs)}
    if not lengths <= {padded, exact} or len(lengths) > 1 or None in lengths:
        shapes = [x.shape for x in jax.tree.leaves(inputs)]
        wanted = f"{padded} (padded)" if exact is None else f"{exact} (one row per vertex) or {padded} (padded)"
        raise ValueError(
            f"run: inputs has leaves of shapes {shapes}; wanted a first axis of {wanted}. Under jax.jit write sched.pad(rows) "
            "on the host before the call."
        )
    length: int = lengths.pop() if lengths else (padded if exact is None else exact)  # type: ignore[assignment]
    if length != padded:
        inputs = jax.tree.map(lambda x: pad_rows(x, padded), inputs)
    kinds = kind_names(F, sched)
    plan = F.plan(jax.tree.map(_aval, params), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs))
    _check_arity(F, plan, sched)
    if at is not None:
        at = jnp.asarray(at)
        if at.ndim != 1 or not jnp.issubdtype(at.dtype, jnp.integer):
            raise ValueError(f"run: at has shape {at.shape} and dtype {at.dtype}, wanted a 1-d array of vertex rows.")
        if exact is not None and not isinstance(at, Tracer) and at.size:
            low, high = int(np.asarray(at).min()), int(np.asarray(at).max())
            if low < 0 or high >= exact:
                raise ValueError(f"run: at has rows {low} to {high}, wanted 0 to {exact - 1}, as in sched.roots.")
    if engine is None and any(type(x).__name__ == "BatchTracer" for x in jax.tree.leaves((params, inputs))):
        engine = "scan"  # under jax.vmap, whose tracers JAX shows by name alone
    engine = choose_engine(engine, plan, sched.shape, kinds)
    outs = _compiled(plan, sched.shape, kinds, engine)(jax.tree.leaves(params), sched.data, jax.tree.leaves(inputs), at)
    if at is None and length != padded:
        outs = [x[:length] for x in outs]
    return plan.push_tree.unflatten(outs)


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def kind_names(F: VertexFunction, sched: Schedule) -> tuple[str | None, ...]:
    """For each kind of the schedule, the name of the function that runs it."""
    if None in F.fns:
        return (None,) * len(sched.shape.kinds)
    missing = [k for k in sched.shape.kinds if k not in F.fns]
    if missing:
        raise ValueError(
            f"run: the graphs have vertices of kind {missing[0]!r} (kinds {list(sched.shape.kinds)}), but F has functions for "
            f"{sorted(F.fns)}. Write VertexFunction({{{missing[0]!r}: fn, ...}}), or graphs with kinds of these names."
        )
    return sched.shape.kinds


def _check_arity(F: VertexFunction, plan: Plan, sched: Schedule) -> None:
    """Refuses graphs of which F would not see some children. Under jit what is known is the power of two above their number."""
    if not F.arity or any(part.child for part in plan.inner.values()):
        return
    most = int(sched.host().num_children.max(initial=0)) if sched.is_concrete else None
    if sched.shape.fan_in > 1 << (F.arity - 1).bit_length() or (most is not None and most > F.arity):
        has = f"{most} children" if most else f"more than {F.arity} children"
        raise ValueError(
            f"run: a vertex has {has}, but F only sees {F.arity}: arity is {F.arity} and it does not call gather_all. "
            f"Write VertexFunction(..., arity={most or '...'}), or v.gather_all(fn)."
        )


def _compiled(plan: Plan, shape: Any, kinds: tuple[str | None, ...], engine: str) -> Any:
    """The jitted differentiable sweep of one plan over schedules of one shape; cached on the plan."""
    key = (shape, kinds, engine, getattr(jax.config, "jax_default_matmul_precision"))  # noqa: B009
    if key not in plan.sweeps:

        @jax.custom_vjp
        def sweep(params: list[Any], data: Any, inputs: list[Any], at: Any) -> list[Any]:
            return forward(plan, Schedule(data, shape), kinds, engine, params, inputs, at, save=False)[0]

        def fwd(params: list[Any], data: Any, inputs: list[Any], at: Any) -> Any:
            outs, saved = forward(plan, Schedule(data, shape), kinds, engine, params, inputs, at, save=True)
            return outs, (saved, data, at)

        def bwd(residuals: Any, cts: list[Any]) -> Any:
            saved, data, at = residuals
            ct_params, ct_inputs = backward(plan, Schedule(data, shape), kinds, engine, saved, at, cts)
            return ct_params, None, ct_inputs, None

        sweep.defvjp(fwd, bwd)
        plan.sweeps[key] = jax.jit(sweep)
    return plan.sweeps[key]


def forward(
    plan: Plan,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    engine: str,
    params: list[Any],
    inputs: list[Any],
    at: Any,
    save: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """All four parts in order: static, eager (leaves whole), the levels, lazy. With `save`, also what `backward` needs."""
    shape = sched.shape
    all_rows = rows_of_kinds(sched, plan.function.arity)
    zeros = Zeros(sched)
    whole = engine != "scan" and len(kinds) == 1  # states are made of the leaves' in one piece
    states = [] if whole else [zeros((shape.rows, *a.shape), a.dtype) for a in plan.state_avals]
    saved: dict[str, Any] = {"inputs": inputs if save else None, "leaf": [], "static": [], "eager": []}

    # Leaves: nothing is gathered, so every leaf of a kind is evaluated in one batch.
    leaf_pushes, at_leaf = [], 0
    for k, name in enumerate(kinds):
        size = shape.leaves[k]
        pulled = [get_rows(x, sched.leaf_vertex[at_leaf : at_leaf + size]) for x in inputs]
        at_leaf += size
        fn = leaf_function(plan.leaf[name], size)
        (s, y), vjp = _maybe_vjp(fn, save, params, pulled)
        saved["leaf"].append(vjp)
        if whole:
            after = shape.rows - shape.pad - size
            states = [jnp.pad(x, ((shape.pad, after), *((0, 0),) * (x.ndim - 1))) for x in s]
        else:
            states = [write(b, x, sched.leaf_row[k]) for b, x in zip(states, s, strict=True)]
        leaf_pushes.append(y)

    # Inner vertices: static and eager parts.
    env_static, eager_rows = [], []
    for rows, name in zip(all_rows, kinds, strict=True):
        part = plan.inner[name]
        statics, vjp = _maybe_vjp(lambda p, part=part: static_values(part, p), save, params)
        saved["static"].append(vjp)
        env_static.append(statics)

        values, vjp = _maybe_vjp(
            eager_function(part, rows.inner(rows.num_children)), save, statics, pull(part, inputs, rows.vertex)
        )
        saved["eager"].append(vjp)
        eager_rows.append(values)

    # The levels.
    levels = _levels if engine == "scan" else functools.partial(persistent_levels, interpret=engine == INTERPRET)
    states, kept, extras, gave_up = levels(plan, sched, kinds, all_rows, zeros, states, env_static, eager_rows, save)

    # Pushes.
    push_states = plan.push_states
    if push_states is not None:
        index = sched.row if at is None else jnp.asarray(sched.row).at[at].get(mode="clip")
        outs = [get_rows(states[i], index) for i in push_states]
        saved["lazy"] = [None] * len(kinds)
    else:
        outs = [jnp.zeros((shape.vertices, *a.shape), a.dtype) for a in plan.push_avals]
        saved["lazy"], at_leaf = [], 0
        for k, (rows, name) in enumerate(zip(all_rows, kinds, strict=True)):
            index = _only(sched.leaf_vertex[at_leaf : at_leaf + shape.leaves[k]], sched.leaf_count[k], shape.vertices)
            at_leaf += shape.leaves[k]
            outs = [o.at[index].set(y, mode="drop") for o, y in zip(outs, leaf_pushes[k], strict=True)]
            part = plan.inner[name]
            args = lazy_arguments(part, rows, states, eager_rows[k], extras[k])
            y, vjp = _maybe_vjp(lazy_function(part, rows), save, env_static[k], *args)
            saved["lazy"].append(vjp)
            index = _only(rows.vertex, rows.count, shape.vertices)
            outs = [o.at[index].set(x, mode="drop") for o, x in zip(outs, y, strict=True)]
        if at is not None:
            outs = [o.at[at].get(mode="clip") for o in outs]
    if gave_up is not None:
        outs = [checked(x, gave_up) for x in outs]
    if save:
        saved |= {"states": states, "kept": kept, "extras": extras, "statics": env_static, "eager_rows": eager_rows}
    return outs, saved


def _maybe_vjp(fn: Any, save: bool, *args: Any) -> tuple[Any, Any]:
    return jax.vjp(fn, *args) if save else (fn(*args), None)


def _only(index: Any, count: Any, nowhere: int) -> Any:
    """`index` with its padding sent out of bounds."""
    return jnp.where(jnp.arange(index.shape[0]) < count, index, nowhere)


def _levels(
    plan: Plan,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    all_rows: list[Rows],
    zeros: Zeros,
    states: list[Any],
    statics: list[list[Any]],
    eager: list[list[Any]],
    save: bool,
) -> tuple[list[Any], list[list[Any]], list[list[Any]], None]:
    """The forward's loop over tasks; returns states, what the backward keeps, and what the lazy part reads (per kind)."""
    parts = [plan.inner[name] for name in kinds]
    keeps = [
        [r.tensor(zeros, v.aval, p.joint_level.get(v) == EDGE) for v in (p.keep if save else ())]
        for p, r in zip(parts, all_rows, strict=True)
    ]
    extras = [
        [r.tensor(zeros, v.aval, p.role.level.get(v) == EDGE) for v in p.extra] for p, r in zip(parts, all_rows, strict=True)
    ]
    crossing = [
        [r.padded(x) for v, x in zip(p.eager_outs, e, strict=True) if v in p.cross]
        for p, r, e in zip(parts, all_rows, eager, strict=True)
    ]

    turned = [
        turned_weights(p.joint.eqns, p.joint_level, dict(zip(p.j_statics, s, strict=False)))
        for p, s in zip(parts, statics, strict=True)
    ]

    def task(k: int, width: int, edges: int, t: Any, carry: Any) -> Any:
        states, keeps, extras = carry
        part, rows = parts[k], all_rows[k]
        start = rows.pad + sched.task_start[t]
        edge_start = rows.edge_pad + sched.task_edge[t]
        targets = [*part.j_states, *part.j_extra, *(part.keep if save else ())]
        eqns, _ = needed(part.joint.eqns, targets, set())
        wanted = {x for e in eqns for x in e.invars if is_var(x)} | {x for x in targets if is_var(x)}
        env = recurrent_inputs(part, rows, states, statics[k], crossing[k], start, edge_start, width, edges, wanted)
        segments = window(rows.edge_owner, edge_start, edges) - sched.task_start[t] if part.child else None
        evaluate(eqns, env, part.joint_level, segments, width, turned[k], fusion=plan.function.optimizations.fusion)

        def read(x: Any, n: int, level: int) -> Any:
            have = part.joint_level.get(x, STATIC) if is_var(x) else STATIC
            return take(env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype), level, have, n)

        states = [write(b, read(x, width, ROW), sched.task_row[t]) for b, x in zip(states, part.j_states, strict=True)]
        keeps, extras = list(keeps), list(extras)
        for tensors, variables in ((keeps, part.keep if save else ()), (extras, part.j_extra)):
            mine = []
            for b, v in zip(tensors[k], variables, strict=True):
                edge = part.joint_level.get(v) == EDGE
                mine.append(write(b, read(v, edges if edge else width, EDGE if edge else ROW), edge_start if edge else start))
            tensors[k] = mine
        return states, keeps, extras

    ends = sched.round_end
    num_classes = len(sched.shape.classes)

    def one_round(r: Any, carry: Any) -> Any:
        for k in range(len(kinds)):
            for c, (width, edges) in enumerate(sched.shape.classes if sched.shape.inner[k] else ()):
                end = ends[r, k * num_classes + c]
                carry = lax.while_loop(
                    lambda tc, end=end: tc[0] < end,
                    lambda tc, k=k, w=width, e=edges: (tc[0] + 1, task(k, w, e, tc[0], tc[1])),
                    carry,
                )
        return carry

    carry = (jnp.int32(0), (states, keeps, extras))
    _, (states, keeps, extras) = lax.fori_loop(0, sched.num_rounds, one_round, carry)
    extras = [
        [r.inner_edges(x) if p.role.level.get(v) == EDGE else r.inner(x) for v, x in zip(p.extra, xs, strict=True)]
        for p, r, xs in zip(parts, all_rows, extras, strict=True)
    ]
    return states, keeps, extras, None
