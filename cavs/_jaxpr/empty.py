"""Leaves arrays of size 0 out of a function: kinds without vertices in a batch, and states of width 0, have such arrays.

XLA (jaxlib 0.10, 0.11) translates some modules with arrays of size 0 wrongly: a kernel launch before a slice of size 0 and a
call that reads it loses its configuration, and compilation ends with "No registered implementation for custom call".
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import bind, run_jaxpr
from cavs._jaxpr.jaxprs import CALLS, Atom, Eqn, Jaxpr, body_of, opened

_SUMS = ("dot_general", "reduce_sum")  # zero, if they are over nothing
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2}  # the operand that may be empty


def without_empty(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with constants for its results of size 0. No other equation then reads an array of size 0.

    Only equations that compute another size from an array of size 0 stay as they are, if they are not concatenations, paddings,
    updates or sums.
    """
    return evaluated_by(_run, fun)


def evaluated_by(
    evaluate: Callable[[Jaxpr, Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]], fun: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Returns `fun`, traced, with its equations evaluated by `evaluate(jaxpr, constants, arguments) -> results`."""

    @functools.wraps(fun)
    def again(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [n for n, x in enumerate(leaves) if isinstance(x, Tracer)]

        def flat(*values: jax.Array) -> PyTree:
            replaced = list(leaves)
            for n, x in zip(traced, values, strict=True):
                replaced[n] = x
            args, kwargs = tree.unflatten(replaced)
            return fun(*args, **kwargs)

        tracers = [leaves[n] for n in traced]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*tracers)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(*opened(closed), tracers))

    return again


def _run(jaxpr: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array]) -> list[jax.Array]:
    def results(eqn: Eqn, operands: list[Any]) -> Sequence[jax.Array]:
        with eqn.ctx.manager:
            return _results(eqn, operands)

    return run_jaxpr(jaxpr, consts, args, results)


def _results(eqn: Eqn, operands: list[Any]) -> Sequence[jax.Array]:
    name, sizes = eqn.primitive.name, [_size(x) for x in eqn.invars]
    if not any(map(_size, eqn.outvars)) and not eqn.effects or name in _SUMS and not all(sizes):
        return [lax.full(v.aval.shape, 0, v.aval.dtype) for v in eqn.outvars]
    if all(sizes):
        return bind(eqn, operands)
    if name in CALLS:
        return _run(*body_of(eqn), operands)
    if name == "concatenate":
        nonempty = [x for x, size in zip(operands, sizes, strict=True) if size]
        return nonempty if len(nonempty) == 1 else [lax.concatenate(nonempty, eqn.params["dimension"])]
    if name == "pad" and not sizes[0]:
        return [jnp.broadcast_to(operands[1], eqn.outvars[0].aval.shape)]
    if name in _UPDATES and not sizes[_UPDATES[name]]:
        return operands[:1]
    return bind(eqn, operands)


def _size(x: Atom) -> int:
    return getattr(x.aval, "size", 1)  # tokens and references to memory have none
