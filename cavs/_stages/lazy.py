"""Lazy batching (Cavs 3.5): parameter gradients of the recurrent part, for many vertices at once.

For every equation Y = f(A, p) that reads a parameter p, the levels store the cotangent dY (a cut cotangent). This module
transposes f ONCE for all rows of a span: for a product Y = A p that is the single product A^T dY.

It does so in blocks of rows if a product reads much more of a vertex than it scatters. An example is the score of attention
inside F: its lazy gradient reads a matrix per vertex, which is computed again from what the vertex pulls. In blocks, this takes
the memory of a block, and one pass over the gradients of the parameters per block.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.domains import EDGE, ROW, STATIC, Domains, domain_of
from cavs._function.evaluate import evaluate, matrix_product, value_at
from cavs._function.joint import ParamUse
from cavs._function.products import sum_of_rows, weight_gradient
from cavs._function.split import Split
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.derivative import vjp_at
from cavs._jaxpr.equations import needed, reads
from cavs._jaxpr.hold_back import barrier, hold_back
from cavs._jaxpr.jaxprs import Atom, Env, Var, is_var
from cavs._stages.blocks import block_of
from cavs._stages.cotangents import Floats, mask_rows, merged
from cavs._stages.entrance import Copied, Memory, entrance, fixed, kept_values, slots_together
from cavs._stages.operands import LazyProduct, Operand, Products, operands, split_rows
from cavs._stages.tensors import Index, Rows, RowSpan, get_rows, repeated, window
from cavs.kernels import Target

JOINED_BYTES = 32 << 20  # up to which XLA for GPUs joins products (its option xla_gpu_dot_merger_threshold_mb)


class Direct(NamedTuple):
    """How an engine computes lazy gradients from operands where these lie."""

    products: Products  # the sums of products
    cuts: dict[Var, Operand]  # where the cut cotangents lie


class OwnRows(NamedTuple):
    """The rows of a span that belong to its task. F may compute anything on the other rows (see `_stages.tensors`)."""

    rows: jax.Array  # (span.size,) bool. The last row is one of them.
    edges: jax.Array  # (span.edges,) bool. The last edge is one of them, if there is any.


def lazy_gradients(
    part: Split,
    rows: Rows,
    span: RowSpan,
    memory: Memory,
    cuts: Env,
    own: OwnRows | None = None,
    known: Env | None = None,
    direct: Direct | None = None,
    exponents: Mapping[Var, jax.Array] | None = None,
    copies: Mapping[int, Copied] | None = None,
) -> Floats:
    """Computes the cotangents of the recurrent part's static values, summed over the rows of a span.

    Args:
        span: the rows to sum over.
        cuts: the cut cotangents, (span.size, ...) or (span.edges, ...), zero in padding.
        own: the rows and edges of the span that count. `None` if all do, and F has no edges or the span is all rows.
        known: operands that are known, so they are not computed again.
        direct: computes products from operands where these lie. `None`: XLA computes all.
        exponents: for operands, those of `weight_gradient`, where they are known.
        copies: by the index of a state leaf, what to gather rows from instead.

    Returns the cotangents, by the index of the static value.
    """
    values = part.reverse.operands
    known = {v: repeated(x, rows.real_edges if part.joint.domain[v] == EDGE else rows.real) for v, x in (known or {}).items()}
    states = [(copies or {}).get(i, x) for i, x in enumerate(memory.states)]
    known = slots_together(part, rows, span, states, values) | known
    eqns, available = needed(part.joint.program.eqns, values, part.joint.available | set(known))
    wanted = reads(eqns, available)
    env = fixed(part, memory.statics) | entrance(part, rows, span, states, memory.crossing, wanted)
    kept, real = kept_values(part, span, memory, wanted, env), rows.count - (span.start - rows.pad)
    if own is None and span.size == rows.size:
        kept = {v: repeated(x, rows.real_edges if part.joint.row_domain(v) == EDGE else rows.real) for v, x in kept.items()}
    elif own is None:
        first = kept_values(part, RowSpan(rows.pad, 1, rows.edge_pad, 0), memory, wanted, env)
        kept = {v: repeated(x, jnp.arange(span.size) < real, first[v]) for v, x in kept.items()}
    env |= kept
    scattered = zip(part.forward.states, memory.states, strict=True)
    if scattered := [(v, x) for v, x in scattered if is_var(v) and v in wanted and v not in env]:
        index = span.rows(rows.padded(rows.row))
        env |= {v: get_rows(x, index) for v, x in scattered}
    env |= known
    local = dict(env)
    if direct:  # XLA for CPUs would compute operands before the library's calls, and keep them during these
        local = dict(zip(env, hold_back(list(env.values()), list(cuts.values()), jnp.inexact), strict=True))
    evaluate(eqns, local, part.joint.domain, span.segments(rows) if part.gathers_all else None, span.size, real=real)
    env |= {v: local[v] for e in eqns for v in e.outvars}

    located = operands(part, rows, span, memory, values) if direct else {}
    place: dict[Atom, int] = {v: i for i, v in enumerate(part.recurrent.statics)}
    totals: Floats = {}
    products: list[LazyProduct] = []
    for use in part.reverse.uses:
        n = span.size_in(use.domain)
        counted = own and (own.edges if use.domain == EDGE else own.rows)
        if direct and (product := _direct_product(part, use, place, env, located, direct.cuts, n)):
            products.append(product._replace(rows=product.rows * (rows.real_edges.sum() if use.domain == EDGE else rows.count)))
            continue
        for i, ct in _transpose(part, use, place, memory.statics, env, cuts, n, counted, exponents or {}):
            totals[i] = totals[i] + ct if i in totals else ct
    if direct and products:
        sums = direct.products(products)
        totals = merged(totals, {i: ct.reshape(memory.statics[i].shape) for i, ct in sums.items()})
    return totals


def not_joined(cts: Env, gradients: Floats) -> Env:
    """Returns `cts` so that XLA for GPUs does not join products of them with the products in `gradients`.

    XLA joins products that read one cut cotangent if it is small, as in plans for little memory. Then the results, which may be
    the gradients of large weights, are all there at once.
    """
    small = sum(x.nbytes for x in cts.values()) < JOINED_BYTES
    if not Target.here().is_gpu or not gradients or not small:
        return cts
    _, tied = barrier((list(gradients.values()), list(cts.values())))
    return dict(zip(cts, tied, strict=True))


def _direct_product(
    part: Split, use: ParamUse, place: dict[Atom, int], env: Env, located: dict[Var, Operand], cuts: dict[Var, Operand], n: int
) -> LazyProduct | None:
    """Returns the product that is the transpose of an equation in float32, if it is one: of x @ W, or of x + b."""
    domain = part.role.domain
    cut, out = use.cuts[0], use.eqn.outvars[0].aval
    avals = [x.aval for x in use.eqn.invars]
    if not (is_var(cut) and cut in cuts and len(use.statics) == 1 and out.shape):
        return None
    if any(x.dtype != jnp.float32 or not math.prod(x.shape) for x in (*avals, out)):
        return None
    if (bias := _bias(use, domain)) is not None:
        return LazyProduct(place[bias], None, cuts[cut], 1)
    axis = matrix_product(use.eqn, domain)
    if axis is None or 0 not in use.operands:
        return None
    x, pieces = use.operands[0], math.prod(avals[0].shape[:-1])
    if is_var(x) and x in located:
        left = located[x]
    else:
        left = Operand(value_at(x, ROW, n, env, part.joint.domain), None, 0)
    left, right = split_rows(left, pieces), split_rows(cuts[cut], pieces)
    if left is None or right is None:
        return None
    if axis == 1:
        left, right = right, left
    return LazyProduct(place[use.eqn.invars[use.statics[0]]], left, right, pieces)


def _bias(use: ParamUse, domain: Domains) -> Var | None:
    """Returns the static value b if the equation is x + b, of the shape of x, for rows x; else `None`."""
    eqn, statics = use.eqn, [x for x in use.eqn.invars if is_var(x) and domain_of(x, domain) == STATIC]
    if eqn.primitive.name not in ("add", "add_any") or len(statics) != 1 or not is_var(use.cuts[0]):
        return None
    return statics[0] if statics[0].aval.shape == eqn.outvars[0].aval.shape else None


def _transpose(
    part: Split,
    use: ParamUse,
    place: dict[Atom, int],
    statics: list[jax.Array],
    env: Env,
    cuts: Env,
    n: int,
    counted: jax.Array | None,
    exponents: Mapping[Var, jax.Array],
) -> list[tuple[int, jax.Array]]:
    """Returns (static value, cotangent) for one equation, summed over n rows, or over those that are `counted`."""
    domain = part.role.domain
    in_domains, args = [domain_of(x, domain) for x in use.eqn.invars], []
    if max(in_domains) == STATIC:
        return []
    for i, (x, in_domain) in enumerate(zip(use.eqn.invars, in_domains, strict=True)):
        if not is_var(x):
            args.append(x.val)
        elif in_domain == STATIC:
            args.append(statics[place[x]] if x in place else part.role.program.consts[x])
        elif i in use.operands:
            value = value_at(use.operands[i], ROW, n, env, part.joint.domain)
            args.append(value if counted is None else repeated(value, counted, value[-1:]))  # the last row counts
        else:  # the gradient does not depend on it
            args.append(jnp.zeros((n, *x.aval.shape), x.aval.dtype))
    cotangents = [cuts[v] if is_var(v) else jnp.zeros((n, *v.aval.shape), v.aval.dtype) for v in use.cuts]
    if counted is not None:
        cotangents = [mask_rows(ct, counted) for ct in cotangents]

    axis = matrix_product(use.eqn, domain)
    if axis is not None:
        a, ct = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (args[0], cotangents[0]))
        known = exponents.get(x) if is_var(x := use.operands[0]) else None
        gradient = weight_gradient(a, ct, args[1], axis, use.eqn.params["precision"], known)
        return [(place[use.eqn.invars[1]], _if_any(gradient, counted))]
    if (bias := _bias(use, domain)) is not None:
        return [(place[bias], _if_any(sum_of_rows(cotangents[0]), counted))]

    operands = [Var(x.aval) for x in use.eqn.invars]  # a variable may be read twice

    def of_rows(*args: jax.Array) -> list[jax.Array]:
        env = dict(zip(operands, args, strict=True))
        evaluate([use.eqn.replace(invars=operands)], env, dict(zip(operands, in_domains, strict=True)))
        return [env[v] for v in use.eqn.outvars]

    out = vjp_at(of_rows, args, use.statics)[1](cotangents)
    return [(place[use.eqn.invars[i]], _if_any(ct, counted)) for i, ct in zip(use.statics, out, strict=True)]


def _if_any(x: jax.Array, counted: jax.Array | None) -> jax.Array:
    """Returns `x`, or zeros if no row counts."""
    return x if counted is None else jnp.where(counted.any(), x, jnp.zeros_like(x))


def lazy_block(part: Split, size: int) -> int:
    """Returns how many of `size` vertices lazy gradients are batched over at a time, 0 for all."""
    if part.gathers_all:  # the edges of a block would have to be found
        return 0
    read = max(map(bytes_of_var, part.reverse.operands), default=0)
    return block_of(read, sum(map(bytes_of_var, part.forward.states)), size)


def lazy_gradients_in_blocks(part: Split, rows: Rows, memory: Memory, cuts: Env, size: int) -> Floats:
    """Like `lazy_gradients` of all rows of a kind, `size` at a time."""

    def block(number: Index) -> Floats:
        first = jnp.asarray(number, jnp.int32) * size
        start = jnp.minimum(first, rows.size - size)  # the last block begins earlier, in rows of the one before it
        counted = start + jnp.arange(size) >= first
        block_cuts = {v: mask_rows(window(x, start, size), counted) for v, x in cuts.items()}
        return lazy_gradients(part, rows, RowSpan(rows.pad + start, size, rows.edge_pad, 0), memory, block_cuts)

    totals = {i: jnp.zeros(x.shape, x.dtype) for i, x in jax.eval_shape(block, 0).items()}
    return lax.fori_loop(0, -(-rows.size // size), lambda i, totals: merged(totals, block(i)), totals)
