"""Runs equations as `run_equations` does, but zeros have no memory before they are needed.

XLA for GPUs fills the stacked results of all `lax.scan` of a program with zeros at its start, in one kernel, so all of them
occupy memory all the time. Here the zeros depend on the operands of their loop, so each loop has a kernel of its own. The same
holds for the zeros to which a scatter adds, such as the gradient of a table of embeddings.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from cavs._jaxpr.costs import bytes_of_var, on_host
from cavs._jaxpr.equations import bind, lines_of, values
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Env, Eqn, Literal, is_var, scan_parts
from cavs._jaxpr.mesh_types import vary, varying

_SMALL = 1 << 16  # bytes: memory that is not worth a barrier


def run_late(eqns: Sequence[Eqn], env: Env, before: Callable[[Eqn], None] = lambda eqn: None) -> None:
    """Runs equations and adds their results to `env`. `before` each of them, a function may change `env`."""
    fills = {e.outvars[0]: e for e in eqns if e.primitive.name == "broadcast_in_dim" and not is_var(e.invars[0])}
    for eqn in eqns:
        before(eqn)
        args = values(eqn.invars, env)
        with lines_of(eqn):
            filled = {i: fills[x] for i, x in enumerate(eqn.invars) if is_var(x) and x in fills}
            if eqn.primitive.name == "scan" and _can_be_late(eqn):
                outs = _scan(eqn, args, filled)
            elif eqn.primitive.name == "scatter-add" and 0 in filled and _adds_few_rows(eqn):
                # Both results of the barrier are read. XLA would drop an unread one, and with it the dependence.
                zero, added = barrier((_literal(filled[0]), args[2]))
                outs = bind(eqn, [jnp.broadcast_to(zero, eqn.outvars[0].aval.shape), args[1], added])
            else:
                outs = bind(eqn, args)
        env.update(zip(eqn.outvars, outs, strict=True))


def _can_be_late(eqn: Eqn) -> bool:
    plain = all(isinstance(v.aval.dtype, jnp.dtype) and not on_host(v) for v in eqn.outvars)
    return plain and eqn.params["length"] > 1 and not eqn.effects and max(map(bytes_of_var, eqn.outvars), default=0) >= _SMALL


def _adds_few_rows(eqn: Eqn) -> bool:
    """Returns whether the result of a scatter is large, and larger than what it adds, which a barrier keeps apart."""
    return bytes_of_var(eqn.outvars[0]) > max(_SMALL, bytes_of_var(cast(Any, eqn.invars[2])))


def _literal(fill: Eqn) -> jax.Array:
    return jnp.asarray(cast(Literal, fill.invars[0]).val, fill.outvars[0].aval.dtype)


def _scan(eqn: Eqn, args: Sequence[Any], fills: dict[int, Eqn]) -> list[Any]:
    """Runs a loop of `lax.scan`. `fills`: the operands that are constants in all elements, by their equations."""
    late = jax.custom_jvp(lambda *args: _late_scan(eqn, args, fills))
    # Second derivatives use the original loop.
    late.defjvp(lambda primals, tangents: jax.jvp(lambda *args: bind(eqn, args), primals, tangents))
    return late(*args)


def _late_scan(eqn: Eqn, args: Sequence[Any], fills: dict[int, Eqn]) -> list[Any]:
    places = cast(list[list[int]], scan_parts(eqn.params, cast(Any, range(len(args)))))
    consts, carry, xs = ([args[i] for i in part] for part in places)
    stacked = eqn.outvars[len(carry) :]
    filled = [(k, fills[i]) for k, i in enumerate(places[1]) if i in fills]
    inits = [_literal(e) for _, e in filled]
    inits += [jnp.zeros((), v.aval.dtype) for v in stacked]
    ready = [x for k, x in enumerate(carry) if all(k != j for j, _ in filled)]
    # XLA computes the last operand first. It is to be a cotangent, not what is computed again: JAX has cotangents in front.
    inits, _ = barrier((inits, [*ready, *reversed(xs)]))
    for (k, e), x in zip(filled, inits, strict=False):
        carry[k] = jnp.broadcast_to(x, e.outvars[0].aval.shape)
    types = [cast(Any, v.aval) for v in stacked]
    results = [vary(jnp.broadcast_to(x, t.shape), tuple(varying(t))) for t, x in zip(types, inits[len(filled) :], strict=True)]
    step = jex.jaxpr_as_fun(eqn.params["jaxpr"])

    def body(state: Any, x: Any) -> tuple[Any, None]:
        index, x = x
        outs = step(*consts, *state[0], *x)
        ys = outs[len(carry) :]
        return (
            outs[: len(carry)],
            [lax.dynamic_update_index_in_dim(r, y, index, 0) for r, y in zip(state[1], ys, strict=True)],
        ), None

    length, options = eqn.params["length"], {k: eqn.params[k] for k in ("reverse", "unroll")}
    (carry, results), _ = lax.scan(body, (carry, results), (jnp.arange(length), xs), length=length, **options)
    return [*carry, *results]
