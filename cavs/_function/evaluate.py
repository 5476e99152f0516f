"""Evaluation of equations that were written for one vertex, for many vertices at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.children import (
    REDUCTIONS,
    TO_ROWS,
    reduce_sum_p,
    spread_p,
    stack_p,
    stack_rows,
    unstack_p,
    unstack_rows,
    wide,
)
from cavs._function.domains import EDGE, ROW, STATIC, Domain, Domains, domain_of, domains
from cavs._function.products import rows_times_matrix
from cavs._function.raw_keys import from_stored, is_key, key_impl, to_stored, zeros
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.choices import is_choice
from cavs._jaxpr.costs import may_repeat
from cavs._jaxpr.equations import bind, is_float, value_of, values
from cavs._jaxpr.hold_back import barrier, late_zero
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, opened
from cavs.kernels import Target, computed_once

# Each element of the result depends on the same element of the operands: no `vmap` is needed, which takes longer to trace.
_BY_ELEMENT = {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "tanh", "logistic", "exp", "log"}


def evaluate(
    eqns: Sequence[Eqn],
    env: Env,
    domain: Domains,
    segments: jax.Array | None = None,
    num_rows: int = 0,
    turned: Env | None = None,
    real: jax.Array | None = None,
    wanted: jax.Array | None = None,
    fusion: bool = True,
    stored: bool = False,
    product: Callable[..., jax.Array] = rows_times_matrix,
) -> None:
    """Runs `eqns` for all rows at once and adds their values to `env`.

    ROW values have a leading axis of vertices, EDGE values one of edges, STATIC values neither.

    Args:
        eqns: the equations, in order.
        env: values of their inputs. Gains the values of their outputs.
        domain: domain of each variable; absent variables are STATIC.
        segments: (edges,) int32, the row of each edge's owner. Padding edges, and edges of another view, have a value outside
            0 .. `num_rows` - 1. Only read by equations between rows and edges.
        num_rows: number of rows. Only read by these equations.
        turned: transposes of weights, see `turned_weights`.
        real: number of rows that are not padding, if some may be padding. `_stages.tensors` says what padding holds.
        wanted: whether there is any row whose values are read; by default whether any is real. If not, loops whose length
            depends on values do not run, as they may never end for padding.
        fusion: if false, the compiler is kept from fusing equations.
        stored: whether the cotangents of products are stored, see `_stored_cotangent`.
        product: multiplies row values by a matrix, with the arguments of `rows_times_matrix`.
    """
    once = computed_once(eqns)
    wanted = real > 0 if wanted is None and real is not None else wanted
    for eqn in eqns:
        args = values(eqn.invars, env)
        in_domains = [domain_of(x, domain) for x in eqn.invars]
        if eqn.primitive in (spread_p, unstack_p, *TO_ROWS):
            assert segments is not None
            outs = [_between_rows_and_edges(eqn, args[0], in_domains[0], segments, num_rows, real)]
        elif max(in_domains, default=STATIC) == STATIC:
            outs = bind(eqn, args)
        elif eqn.primitive.name in _BY_ELEMENT and STATIC not in in_domains and len({jnp.shape(x) for x in args}) == 1:
            outs = bind(eqn, args)
        elif (axis := matrix_product(eqn, domain)) is not None:
            w, axis = (turned[eqn.invars[1]], 0) if turned and axis == 1 and eqn.invars[1] in turned else (args[1], axis)
            # One two-dimensional product over all rows: if there were more axes, XLA would transpose the operand first.
            x, options = args[0], (eqn.params["precision"], eqn.params["preferred_element_type"])
            z = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, axis, *options)
            z = z.reshape(*x.shape[:-1], z.shape[-1])
            outs = [_stored_cotangent(z) if stored else z]
        elif is_choice(eqn) and in_domains[0] != STATIC and len(args[0]):
            outs = _every_branch(eqn, args, in_domains, wanted, product)
        else:
            axes = [0 if d != STATIC else None for d in in_domains]
            run = by_rows(lambda *a, eqn=eqn: bind(eqn, a), axes)
            outs = run(*args) if may_repeat(eqn) else _if_any(wanted, run, args)
        if not fusion or not once.isdisjoint(eqn.outvars):  # XLA fuses by computing again
            outs = barrier(list(outs))
        env.update(zip(eqn.outvars, outs, strict=True))


def by_rows(fn: Callable[..., PyTree], axes: Sequence[int | None]) -> Callable[..., PyTree]:
    """Returns `fn` for all rows: at once, or row by row if JAX cannot batch it, as `jax.lax.ragged_dot` in a loop.

    `axes`: for each argument, 0, or `None` if it is the same for all rows.
    """

    def of_rows(*args: jax.Array) -> PyTree:
        try:
            return jax.vmap(fn, axes)(*args)
        except NotImplementedError:
            rows = {i: x for i, (x, axis) in enumerate(zip(args, axes, strict=True)) if axis == 0}
            return lax.map(lambda row: fn(*(row.get(i, x) for i, x in enumerate(args))), rows)

    return of_rows


def _if_any(wanted: jax.Array | None, run: Callable[..., list[jax.Array]], args: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs an equation if its values are wanted, or if that is not known. Returns zeros if not."""
    if wanted is None:
        return run(*args)
    return lax.cond(wanted, run, lambda *args: list(map(zeros, jax.eval_shape(run, *args))), *args)


def _every_branch(
    eqn: Eqn,
    args: Sequence[jax.Array],
    in_domains: Sequence[Domain],
    wanted: jax.Array | None,
    product: Callable[..., jax.Array],
) -> list[jax.Array]:
    """Runs every branch of a `cond` whose rows choose, and selects. `jax.vmap` of it would give each row weights of its own.

    Rows that do not take a branch repeat one that does, so that neither the branch nor its derivative is infinite for them.
    """
    index, outs = args[0], list[jax.Array]()
    for number, branch in enumerate(eqn.params["branches"]):
        (jaxpr, consts), taken = opened(branch), index == number
        row, any_taken = jnp.argmax(taken), taken.any()  # if no row takes it, nothing is differentiated
        operands = [
            jnp.where(column(taken, x), x, lax.stop_gradient(x[row]))
            if domain != STATIC
            else jnp.where(any_taken, x, lax.stop_gradient(x))
            if is_float(x)
            else x  # a key stays the same for all vertices, also under `jax.vmap`
            for x, domain in zip(args[1:], in_domains[1:], strict=True)
        ]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
        domain = domains(jaxpr.eqns, dict(zip(jaxpr.invars, in_domains[1:], strict=True)))
        evaluate(jaxpr.eqns, env, domain, wanted=any_taken if wanted is None else any_taken & wanted, product=product)
        results = [value_at(x, in_domains[0], len(index), env, domain) for x in jaxpr.outvars]
        outs = [jnp.where(column(taken, x), x, before) for x, before in zip(results, outs, strict=True)] if outs else results
    return outs


def _between_rows_and_edges(
    eqn: Eqn, x: jax.Array, have: Domain, segments: jax.Array, num_rows: int, real: jax.Array | None
) -> jax.Array:
    """Runs an equation of `_function.children`, whose operand is `x` of domain `have`."""
    if is_float(eqn.invars[0]) and (widened := wide(x)).dtype != x.dtype:  # its derivative sums over children, in 32 bits
        return _between_rows_and_edges(eqn, widened, have, segments, num_rows, real).astype(x.dtype)
    if eqn.primitive is spread_p:
        if have == STATIC:
            return jnp.broadcast_to(x, (len(segments), *jnp.shape(x)))
        return x.at[jnp.where(segments < x.shape[0], segments, 0)].get(mode="clip")
    if eqn.primitive is unstack_p:
        return unstack_rows(take(x, ROW, have, num_rows), segments, num_rows)
    x = take(x, EDGE, have, len(segments))
    if eqn.primitive is stack_p:
        out = stack_rows(x, segments, num_rows, eqn.params["size"])
    else:
        assert eqn.primitive in REDUCTIONS
        can_be_late = real is not None and x.size and jnp.issubdtype(x.dtype, jnp.floating)
        reduce = jax.ops.segment_sum if eqn.primitive is reduce_sum_p else jax.ops.segment_max
        if eqn.primitive is reduce_sum_p and can_be_late:
            reduce = _late_sum
        out = reduce(x, segments, num_rows, indices_are_sorted=True, mode="drop")
    if real is None or not out.shape[0]:
        return out
    # Padding rows have no edges of their own: they repeat row 0.
    return jnp.where(column(jnp.arange(out.shape[0]) < real, out), out, out[:1])


def _late_sum(x: jax.Array, segments: jax.Array, num_rows: int, **kwargs: Any) -> jax.Array:
    """Returns `jax.ops.segment_sum(...)`, with zeros that begin to exist after `x`, and not when the program starts."""
    zeros = jnp.broadcast_to(late_zero([x[(0,) * x.ndim]]).astype(x.dtype), (num_rows, *x.shape[1:]))
    return zeros.at[jnp.where(segments < 0, num_rows, segments)].add(x, **kwargs)


def matrix_product(eqn: Eqn, domain: Domains) -> int | None:
    """Returns the contracted axis of W if `eqn` is x @ W for row values x and a static matrix W, else `None`.

    The last axis of x must be the contracted one. `domain`: of each variable, as for `evaluate`.
    """
    if eqn.primitive.name != "dot_general":
        return None
    (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
    x, w = eqn.invars
    if domain_of(x, domain) == STATIC or domain_of(w, domain) != STATIC:
        return None
    plain = not lb and tuple(lc) == (len(x.aval.shape) - 1,) and len(w.aval.shape) == 2
    return rc[0] if plain else None


@jax.custom_vjp
def _stored_cotangent(x: jax.Array) -> jax.Array:
    """Returns `x`; its cotangent is computed once and stored.

    If gates are parts of one product, XLA would otherwise store their cotangents apart, and concatenate them again for each of
    the three sums and products that read them.
    """
    return x


_stored_cotangent.defvjp(lambda x: (x, None), lambda _, g: (barrier(g),))


def turned_weights(eqns: Sequence[Eqn], domain: Domains, weights: Env) -> Env:
    """Returns W^T for each of `weights` that `eqns` contract along its second axis, as the backward does.

    Call this once before a loop: XLA's CPU products with a transposed W transpose it again in every call. For a few rows that
    takes two to four times as long as the product itself (2 x 256 x 768: 31 us, and 8 us if W^T is given). Elsewhere products
    read W either way, and W^T would only take memory.
    """
    if not Target.here().is_cpu:
        return {}
    turned = (eqn.invars[1] for eqn in eqns if matrix_product(eqn, domain) == 1)
    return {w: weights[w].T for w in turned if w in weights}


def take(x: jax.Array, want: Domain, have: Domain, rows: int) -> jax.Array:
    """Returns a value of domain `have` as one of domain `want`: STATIC values are repeated."""
    return jnp.broadcast_to(x, (rows, *jnp.shape(x))) if want != STATIC and have == STATIC else x


def value_at(x: Atom, want: Domain, rows: int, env: Env, domain: Domains) -> jax.Array:
    """Returns the value of a variable or literal as one of domain `want`, with `rows` rows."""
    return take(value_of(x, env), want, domain_of(x, domain), rows)


def column(values: Any, like: Any) -> Any:
    """Returns `values`, (rows,), in a shape that broadcasts over the rows of `like`, (rows, ...)."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def pad_rows(x: jax.Array, rows: int, before: int = 0) -> jax.Array:
    """Returns an array of `rows` rows: `before` rows of zeros, `x`, and zeros. Keys of `jax.random` stay keys."""
    if is_key(x):
        return from_stored(pad_rows(to_stored(x), rows, before), key_impl(x))
    return jnp.pad(x, ((before, rows - before - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
