"""Lazy batching (Cavs 3.5): parameter gradients of the recurrent part, for many vertices at once.

The levels leave the cut cotangent dY of every equation Y = f(A, p) that reads a parameter p. Here f is transposed ONCE
for all rows of a view: for a product Y = A p that is the single product A^T dY.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cavs._function.domains import EDGE, ROW, STATIC, domain_of
from cavs._function.equations import bind, is_float, needed, reads
from cavs._function.evaluate import evaluate, matrix_product, value_at
from cavs._function.jaxprs import is_var
from cavs._function.joint import ParamUse
from cavs._function.products import weight_gradient
from cavs._function.split import Split
from cavs._stages.cotangents import mask_rows
from cavs._stages.entrance import Memory, entrance, fixed, kept_values, slots_together
from cavs._stages.tensors import Rows, View, get_rows, repeated


class Some(NamedTuple):
    """Some of n rows (or edges)."""

    which: Any  # (n,) bool
    one: Any  # the number of one of them, if there is any


class Mine(NamedTuple):
    """The rows and edges of a view that are its own. What F makes of the others may be anything (`_stages.tensors`)."""

    rows: Some
    edges: Some


def lazy_gradients(
    part: Split,
    rows: Rows,
    view: View,
    memory: Memory,
    cuts: dict[Any, Any],
    mine: Mine | None = None,
    given: dict[Any, Any] | None = None,
) -> dict[int, Any]:
    """Cotangents of the recurrent part's static values, by their index, summed over the rows of `view`.

    `cuts` maps cut cotangents to their (view.size, ...) or (view.edges, ...) rows, zero where a row is padding. Without `mine`
    the view is all rows; else only those count. `given` operands are not computed.
    """
    operands = [v for u in part.reverse.uses for v in u.operands.values() if is_var(v)]
    given = {v: repeated(x, rows.real_edges if part.joint.domain[v] == EDGE else rows.real) for v, x in (given or {}).items()}
    given = slots_together(part, rows, view, memory.states, operands) | given
    eqns, available = needed(part.joint.program.eqns, operands, part.joint.available | set(given))
    wanted = reads(eqns, available)
    env = fixed(part, memory.statics) | entrance(part, rows, view, memory.states, memory.crossing, wanted)
    kept = kept_values(part, view, memory, wanted, env)
    if mine is None:
        kept = {v: repeated(x, rows.real_edges if part.joint.domain.get(v) == EDGE else rows.real) for v, x in kept.items()}
    env |= kept
    own = [
        (v, x) for v, x in zip(part.forward.states, memory.states, strict=True) if is_var(v) and v in wanted and v not in env
    ]
    if own:
        index = view.rows(rows.padded(rows.row))
        env |= {v: get_rows(x, index) for v, x in own}
    env |= given
    real = rows.count - (view.start - rows.pad)
    evaluate(eqns, env, part.joint.domain, view.segments(rows) if part.gathers_all else None, view.size, real=real)

    place = {v: i for i, v in enumerate(part.recurrent.statics)}
    totals: dict[int, Any] = {}
    for use in part.reverse.uses:
        n = view.edges if use.domain == EDGE else view.size
        which = mine and (mine.edges if use.domain == EDGE else mine.rows)
        for i, ct in _transpose(part, use, place, memory.statics, env, cuts, n, which):
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
    mine: Some | None,
) -> list[tuple[int, Any]]:
    """(static value, cotangent) for one equation, over n rows at once."""
    level = part.role.domain
    args, axes = [], []
    for i, x in enumerate(use.eqn.invars):
        static = domain_of(x, level) == STATIC
        axes.append(None if static else 0)
        if not is_var(x):
            args.append(x.val)
        elif static:
            args.append(statics[place[x]] if x in place else part.role.program.consts[x])
        elif i in use.operands:
            value = value_at(use.operands[i], ROW, n, env, part.joint.domain)
            args.append(value if mine is None else _only(value, mine))
        else:  # its value does not matter for the gradient
            args.append(jnp.zeros((n, *x.aval.shape), x.aval.dtype))
    if all(a is None for a in axes):
        return []
    cotangents = [cuts[v] if is_var(v) else jnp.zeros((n, *v.aval.shape), v.aval.dtype) for v in use.cuts]
    if mine is not None:
        cotangents = [mask_rows(ct, mine.which) for ct in cotangents]

    axis = matrix_product(use.eqn, [STATIC if a is None else use.domain for a in axes])
    if axis is not None:
        a, ct = args[0].reshape(-1, args[0].shape[-1]), cotangents[0].reshape(-1, cotangents[0].shape[-1])
        gradient = weight_gradient(a, ct, args[1], axis, use.eqn.params["precision"])
        return [(place[use.eqn.invars[1]], _if_any(gradient, mine))]

    def f(values: list[Any]) -> list[Any]:
        full = list(args)
        for i, x in zip(use.statics, values, strict=True):
            full[i] = x
        outs = jax.vmap(lambda *a: bind(use.eqn, a), in_axes=axes)(*full)
        return [o for o, v in zip(outs, use.eqn.outvars, strict=True) if is_float(v)]

    (out,) = jax.vjp(f, [args[i] for i in use.statics])[1](cotangents)
    return [(place[use.eqn.invars[i]], _if_any(ct, mine)) for i, ct in zip(use.statics, out, strict=True)]


def _only(x: Any, mine: Some) -> Any:
    """`x` with one of our rows in all others."""
    return jnp.where(mine.which.reshape(-1, *(1,) * (x.ndim - 1)), x, x[mine.one])


def _if_any(x: Any, mine: Some | None) -> Any:
    return x if mine is None else jnp.where(mine.which.any(), x, jnp.zeros_like(x))
