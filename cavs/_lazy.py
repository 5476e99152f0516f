"""Lazy batching (Cavs 3.5): parameter gradients of the recurrent part, for many vertices at once.

The levels leave the cut cotangent dY of every equation Y = f(A, p) that reads a parameter p. Here f is transposed ONCE
for all rows of a view: for a product Y = A p that is the single product A^T dY.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._rows import EDGE, ROW, STATIC, bind, evaluate, is_float, is_var, matrix_product, needed, take
from cavs._split import ParamUse, Split
from cavs._tensors import Rows, View, get_rows


def lazy_gradients(
    part: Split,
    rows: Rows,
    view: View,
    memory: dict[str, Any],
    cuts: dict[Any, Any],
    mask: Any = None,
    given: dict[Any, Any] | None = None,
) -> dict[int, Any]:
    """Cotangents of the recurrent part's static values, by their index, summed over the rows of `view`.

    `memory` is what the forward saved for this kind: `states`, `statics`, `crossing`, `kept`, `extras` (the last three
    with slack). `cuts` maps cut cotangents to their (view.size, ...) or (view.edges, ...) rows, zero where a row is
    padding. With `mask` = (rows, edges), other rows than those count as padding, too. `given` operands are not computed.
    """
    operands = [v for u in part.uses for v in u.operands.values() if is_var(v)]
    given = given or {}
    eqns, reads = needed(part.joint.eqns, operands, part.available | set(given))
    wanted = {x for e in eqns for x in e.invars if is_var(x)} | set(reads)
    states, statics = memory["states"], memory["statics"]
    kids = view.rows(rows.kids)
    env = dict(part.joint.consts) | dict(zip(part.j_statics, statics[: len(part.j_statics)], strict=True))
    env[part.j_num_children] = view.rows(rows.num_children)
    env |= {v: view.rows(x) for v, x in zip(part.j_cross, memory["crossing"], strict=True) if v in wanted}
    env |= {v: get_rows(states[i], kids[:, k]) for v, (k, i) in zip(part.j_slots, part.slots, strict=True) if v in wanted}
    if any(v in wanted for v in part.j_child):
        children = view.of_edges(rows.edge_child)
        env |= {v: get_rows(states[i], children) for v, i in zip(part.j_child, part.child, strict=True) if v in wanted}
    for variables, tensors in ((part.keep, memory["kept"]), (part.j_extra, memory["extras"])):
        for v, x in zip(variables, tensors, strict=True):
            if is_var(v) and v in wanted and v not in env:
                env[v] = view.of_edges(x) if part.joint_level.get(v) == EDGE else view.rows(x)
    own = view.rows(rows.padded(rows.row)) if any(is_var(v) and v in wanted for v in part.j_states) else None
    env |= {
        v: get_rows(b, own) for v, b in zip(part.j_states, states, strict=True) if is_var(v) and v in wanted and v not in env
    }
    env |= given
    real = rows.count - (view.start - rows.pad)
    evaluate(eqns, env, part.joint_level, view.segments(rows) if part.child else None, view.size, real=real)

    place = {v: i for i, v in enumerate(part.recurrent_statics)}
    totals: dict[int, Any] = {}
    for use in part.uses:
        mine = None if mask is None else mask[use.level == EDGE]
        for i, ct in _transpose(part, use, place, statics, env, cuts, view.edges if use.level == EDGE else view.size, mine):
            totals[i] = totals[i] + ct if i in totals else ct
    return totals


def _transpose(
    part: Split,
    use: ParamUse,
    place: dict[Any, int],
    statics: list[Any],
    env: dict[Any, Any],
    cuts: dict[Any, Any],
    n: int,
    mask: Any,
) -> list[tuple[int, Any]]:
    """(static value, cotangent) for one equation, over n rows at once."""
    level = part.role.level
    args, axes = [], []
    for i, x in enumerate(use.eqn.invars):
        static = not is_var(x) or level.get(x, STATIC) == STATIC
        axes.append(None if static else 0)
        if not is_var(x):
            args.append(x.val)
        elif static:
            args.append(statics[place[x]] if x in place else part.role.program.consts[x])
        elif i in use.operands:
            v = use.operands[i]
            value = env[v] if is_var(v) else jnp.asarray(v.val, v.aval.dtype)
            value = take(value, ROW, part.joint_level.get(v, STATIC) if is_var(v) else STATIC, n)
            args.append(value if mask is None else mask_rows(value, mask))
        else:  # its value does not matter for the gradient
            args.append(jnp.zeros((n, *x.aval.shape), x.aval.dtype))
    if all(a is None for a in axes):
        return []
    cotangents = [cuts[v] if is_var(v) else jnp.zeros((n, *v.aval.shape), v.aval.dtype) for v in use.cuts]
    if mask is not None:
        cotangents = [mask_rows(ct, mask) for ct in cotangents]

    axis = matrix_product(use.eqn, [STATIC if a is None else use.level for a in axes])
    if axis is not None:
        a, ct = args[0].reshape(-1, args[0].shape[-1]), cotangents[0].reshape(-1, cotangents[0].shape[-1])
        pair = (a, ct) if axis == 0 else (ct, a)
        kwargs = {"precision": use.eqn.params["precision"], "preferred_element_type": args[1].dtype}
        return [(place[use.eqn.invars[1]], lax.dot_general(*pair, (((0,), (0,)), ((), ())), **kwargs))]

    def f(values: list[Any]) -> list[Any]:
        full = list(args)
        for i, x in zip(use.statics, values, strict=True):
            full[i] = x
        outs = jax.vmap(lambda *a: bind(use.eqn, a), in_axes=axes)(*full)
        return [o for o, v in zip(outs, use.eqn.outvars, strict=True) if is_float(v)]

    (out,) = jax.vjp(f, [args[i] for i in use.statics])[1](cotangents)
    return [(place[use.eqn.invars[i]], ct) for i, ct in zip(use.statics, out, strict=True)]


def mask_rows(x: Any, real: Any) -> Any:
    """`x` with zeros in the rows where `real` is false."""
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
