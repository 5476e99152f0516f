"""Per-row programs: equations written for ONE vertex (or one edge), evaluated for many at once.

A vertex function is traced for a single vertex. Its values live at one of three levels:

- STATIC: parameters and what follows from them alone; one value for all vertices;
- ROW: one value per vertex;
- EDGE: one value per child edge of a vertex (inside `gather_all`).

The primitives of `_function.children` move between the last two.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad

from cavs._function.calls import body_of, opened
from cavs._function.children import (
    REDUCTIONS,
    TO_EDGES,
    TO_ROWS,
    reduce_sum_p,
    spread_p,
    stack_p,
    stack_rows,
    unstack_p,
    unstack_rows,
)
from cavs._function.inline import inlined, unrolled
from cavs._function.products import rows_times_matrix

STATIC, ROW, EDGE = 0, 1, 2

tap_p = jex.Primitive("tap")
tap_p.def_abstract_eval(lambda x, delta: x)


def _tap_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # tap(x, delta) is x, and its derivative with respect to delta is the cotangent of x: it exposes the cotangent that
    # a product's parameter gradient needs ("cut cotangent") without a zero ever being added to x.
    return primals[0], ad.add_tangents(*tangents)


ad.primitive_jvps[tap_p] = _tap_jvp


class Program(NamedTuple):
    """Straight-line equations over flat inputs. `outs` may be inputs or literals."""

    invars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    outs: tuple[Any, ...]
    consts: dict[Any, Any]


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any, Any]:
    """`fn` traced to a `Program` with inner calls inlined; also the trees of its flat inputs and outputs."""
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, values = opened(unrolled(closed))
    eqns: list[Any] = []
    outs = inlined(jaxpr, {}, eqns)
    consts = dict(zip(jaxpr.constvars, values, strict=True))
    return (
        Program(tuple(jaxpr.invars), tuple(eqns), tuple(outs), consts),
        jax.tree.structure(args),
        jax.tree.structure(out_shape),
    )


def open_custom_calls(eqns: Sequence[Any], level: dict[Any, int]) -> tuple[list[Any], dict[Any, int]]:
    """`eqns` with functions of custom derivatives (such as `jax.nn.relu`) opened up, and the levels of all variables.

    Only for what is not differentiated any more.
    """
    out: list[Any] = []
    level = dict(level)
    for eqn in eqns:
        if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
            out.append(eqn)
            continue
        jaxpr, consts = body_of(eqn)
        local = dict(zip(jaxpr.invars, eqn.invars, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            local[var] = jex.Literal(value, var.aval)
        inside: list[Any] = []
        results = dict(zip(inlined(jaxpr, local, inside), eqn.outvars, strict=True))
        for e in open_custom_calls(inside, {})[0]:
            invars = [results.get(x, x) if is_var(x) else x for x in e.invars]
            out.append(e.replace(invars=invars, outvars=[results.get(v, v) for v in e.outvars]))
            level |= dict.fromkeys(out[-1].outvars, level.get(eqn.outvars[0], STATIC))
    return out, level


def is_var(x: Any) -> bool:
    """Whether `x` is a variable rather than a literal."""
    return not isinstance(x, jex.Literal)


def is_float(x: Any) -> bool:
    """Whether a variable, array or shape has a dtype that can be differentiated."""
    dtype = x.aval.dtype if hasattr(x, "aval") else x.dtype
    return jnp.issubdtype(dtype, jnp.inexact)


def level_of(x: Any, level: dict[Any, int]) -> int:
    """The level of a variable or literal."""
    return level.get(x, STATIC) if is_var(x) else STATIC


def value_of(x: Any, env: dict[Any, Any]) -> Any:
    """The value of a variable or literal."""
    return env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype)


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Runs one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = ((), params) if isinstance(params, dict) else params
    out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def levels(program_eqns: Sequence[Any], known: dict[Any, int]) -> dict[Any, int]:
    """The level of every variable, from those of the inputs (`known`; absent means STATIC)."""
    level = dict(known)
    for eqn in program_eqns:
        if eqn.primitive in TO_EDGES:
            lv = EDGE
        elif eqn.primitive in TO_ROWS:
            lv = ROW
        else:
            lv = max((level_of(x, level) for x in eqn.invars), default=STATIC)
        level |= dict.fromkeys(eqn.outvars, lv)
    return level


def evaluate(
    eqns: Sequence[Any],
    env: dict[Any, Any],
    level: dict[Any, int],
    segments: Any = None,
    num_rows: int = 0,
    turned: dict[Any, Any] | None = None,
    real: Any = None,
    fusion: bool = True,
    stored: bool = False,
    product: Callable[..., Any] = rows_times_matrix,
) -> None:
    """Runs `eqns` for all rows at once, adding their values to `env`.

    ROW values carry a leading axis of vertices, EDGE values one of edges, STATIC values none. `segments` (edges,) is
    the row of each edge's owner; another number than 0 .. `num_rows` - 1 if the edge is padding or another view's. `turned`
    holds transposes of weights, see `turned_weights`. `real` is the number of rows that are no padding, if some are; see
    `_stages.tensors` for what padding holds. Without `fusion` the compiler is kept from fusing equations; with `stored` the
    cotangents of products are stored, see `_stored_cotangent`. `product` is that of row values and a matrix.
    """

    def read(x: Any) -> Any:
        return env[x] if is_var(x) else x.val

    def of_row_0(x: Any) -> Any:
        """`x` with row 0's value in padding rows: they have no edges of their own."""
        if real is None or not x.shape[0]:
            return x
        return jnp.where((jnp.arange(x.shape[0]) < real).reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1])

    for eqn in eqns:
        args = [read(x) for x in eqn.invars]
        lv = [level_of(x, level) for x in eqn.invars]
        if eqn.primitive is spread_p:
            if lv[0] == STATIC:
                outs = [jnp.broadcast_to(args[0], (len(segments), *jnp.shape(args[0])))]
            else:
                outs = [args[0].at[jnp.where(segments < args[0].shape[0], segments, 0)].get(mode="clip")]
        elif eqn.primitive in REDUCTIONS:
            reduce = jax.ops.segment_sum if eqn.primitive is reduce_sum_p else jax.ops.segment_max
            x = take(args[0], EDGE, lv[0], len(segments))
            outs = [of_row_0(reduce(x, segments, num_rows, indices_are_sorted=True, mode="drop"))]
        elif eqn.primitive is stack_p:
            x = take(args[0], EDGE, lv[0], len(segments))
            outs = [of_row_0(stack_rows(x, segments, num_rows, eqn.params["size"]))]
        elif eqn.primitive is unstack_p:
            outs = [unstack_rows(take(args[0], ROW, lv[0], num_rows), segments, num_rows)]
        elif max(lv, default=STATIC) == STATIC:
            outs = bind(eqn, args)
        elif (axis := matrix_product(eqn, lv)) is not None:
            w, axis = (turned[eqn.invars[1]], 0) if turned and axis == 1 and eqn.invars[1] in turned else (args[1], axis)
            # As ONE two-dimensional product over all rows: for more axes XLA would transpose the operand first.
            x, how = args[0], (eqn.params["precision"], eqn.params["preferred_element_type"])
            z = product(x.reshape(-1, x.shape[-1]), w, axis, *how)
            z = z.reshape(*x.shape[:-1], z.shape[-1])
            outs = [_stored_cotangent(z) if stored else z]
        else:
            axes = [0 if v != STATIC else None for v in lv]
            outs = jax.vmap(lambda *a, eqn=eqn: bind(eqn, a), in_axes=axes)(*args)
        if not fusion:
            outs = jax.lax.optimization_barrier(list(outs))
        env.update(zip(eqn.outvars, outs, strict=True))


def matrix_product(eqn: Any, lv: Sequence[int]) -> int | None:
    """The contracted axis of W where `eqn` is x @ W, x's last axis contracted, for row values x and a static matrix W."""
    if eqn.primitive.name != "dot_general" or lv[0] == STATIC or lv[1] != STATIC:
        return None
    (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
    x, w = eqn.invars
    plain = not lb and tuple(lc) == (len(x.aval.shape) - 1,) and len(w.aval.shape) == 2
    return rc[0] if plain else None


@jax.custom_vjp
def _stored_cotangent(x: Any) -> Any:
    """`x`, whose cotangent is computed once and stored. Where gates are parts of one product, XLA would store their cotangents
    apart, and put them together again for each of the three sums and products that read them."""
    return x


_stored_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.optimization_barrier(g),))


def turned_weights(eqns: Sequence[Any], level: dict[Any, int], weights: dict[Any, Any]) -> dict[Any, Any]:
    """W^T for each of `weights` (variable -> value) that `eqns` contract along its second axis, as the backward does.

    To be made once before a loop: XLA's CPU products with a transposed W turn it round again in every call, which for a
    few rows takes two to four times as long as the product itself (2 x 256 x 768: 31 us, and 8 us with W^T at hand).
    """
    out = {}
    for eqn in eqns:
        lv = [level_of(x, level) for x in eqn.invars]
        if matrix_product(eqn, lv) == 1 and eqn.invars[1] in weights:
            out[eqn.invars[1]] = weights[eqn.invars[1]].T
    return out


def take(values: Any, want: int, have: int, rows: int) -> Any:
    """A value of level `have` as one of level `want`: STATIC values are repeated."""
    return jnp.broadcast_to(values, (rows, *jnp.shape(values))) if want != STATIC and have == STATIC else values


def value_at(x: Any, want: int, rows: int, env: dict[Any, Any], level: dict[Any, int]) -> Any:
    """The value of a variable or literal as one of level `want`, with `rows` rows."""
    return take(value_of(x, env), want, level_of(x, level), rows)


def pad_rows(x: Any, rows: int, before: int = 0) -> Any:
    """`x` as the rows from `before` on of `rows`, zeros around them; keys of `jax.random` stay keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(pad_rows(jax.random.key_data(x), rows, before), impl=jax.random.key_impl(x))
    return jnp.pad(x, ((before, rows - before - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def needed(eqns: Sequence[Any], outs: Sequence[Any], available: set[Any]) -> tuple[list[Any], list[Any]]:
    """The equations that compute `outs` from `available` values, in order; and the available values they read."""
    want = {x for x in outs if is_var(x)}
    used = [x for x in outs if is_var(x) and x in available]
    keep = []
    for eqn in reversed(eqns):
        if any(v in want and v not in available for v in eqn.outvars):
            keep.append(eqn)
            for x in eqn.invars:
                if is_var(x) and x not in want:
                    want.add(x)
                    if x in available:
                        used.append(x)
    return keep[::-1], used


def reads(eqns: Sequence[Any], outs: Iterable[Any] = ()) -> set[Any]:
    """All variables that `eqns` read, and those among `outs`."""
    return {x for e in eqns for x in e.invars if is_var(x)} | {x for x in outs if is_var(x)}


def depends(eqns: Sequence[Any], seeds: set[Any]) -> set[Any]:
    """All variables that depend on `seeds` (themselves included)."""
    reached = set(seeds)
    for eqn in eqns:
        if any(is_var(x) and x in reached for x in eqn.invars):
            reached.update(eqn.outvars)
    return reached
