"""The derivative of a part of F that runs in one batch: it keeps a minimum cut of what the forward computes (Echo, section IV).

`jax.vjp` keeps what each equation's derivative reads: seven values per leaf of a Tree-LSTM, where three pre-activations are
enough. Here the part and its VJP are traced into one program. The backward runs cheap equations again, but no product.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.equations import Program, depends, is_float, needed, reads, run_equations, trace, value_of
from cavs._function.jaxprs import Atom, Eqn, PyTreeDef, Var
from cavs._function.minimum_cut import keep_products
from cavs._graphs.pytree import PyTree
from cavs._stages.cotangents import zero_cotangent
from cavs._stages.saved import Transpose

# Bytes of gathered arrays from which the backward gathers them again: below, a further kernel takes longer than it is worth.
MANY_BYTES = 32 << 20


class _SegmentBackward(NamedTuple):
    """What the backward runs. It has no arrays, except constants.

    Attributes:
        eqns: its equations.
        kept: the variables that the forward stores, or has in any case.
        seeds: the variables of the cotangents of float results, which are `results` among all of them.
        outs: the cotangents of the float arguments, which are `floats` among all of them.
        shapes: of all arguments.
        tree: of all arguments.
        again: whether what was gathered is gathered again, rather than alive from the forward to the backward.
    """

    eqns: list[Eqn]
    kept: list[Var]
    seeds: tuple[Var, ...]
    results: list[int]
    outs: tuple[Atom, ...]
    floats: list[int]
    shapes: list[jax.ShapeDtypeStruct]
    tree: PyTreeDef
    again: bool


def cut_vjp(
    fn: Callable[..., Any], args: tuple[PyTree, ...], gather: Callable[[], tuple[PyTree, ...]]
) -> tuple[Any, Transpose]:
    """Returns `fn(*args, *gather())` and its transpose, which keeps a minimum cut.

    The transpose also keeps `args` and the arrays over which `fn` and `gather` close, as far as it reads them: these should be
    alive anyway.

    Args:
        fn: a pure function.
        args: its first arguments.
        gather: returns the other arguments, such as rows of an array over which it closes.

    Returns:
        The result, and a function from its cotangents to those of `args` and of what `gather` returned, as one tuple.
    """
    flat, in_tree = jax.tree.flatten(args)
    taken, taken_tree = jax.tree.flatten(jax.eval_shape(gather))
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in flat] + taken
    floats = [i for i, x in enumerate(shapes) if is_float(x)]
    result_shapes, out_tree = jax.tree.flatten(jax.eval_shape(lambda: fn(*args, *gather())))
    results = [i for i, x in enumerate(result_shapes) if is_float(x)]

    def joint(values: list[jax.Array], cts: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        values = [*values, *jax.tree.leaves(gather())]

        def of_floats(changed: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            full = list(values)
            for i, x in zip(floats, changed, strict=True):
                full[i] = x
            outs = jax.tree.leaves(fn(*in_tree.unflatten(full[: len(flat)]), *taken_tree.unflatten(full[len(flat) :])))
            return [outs[i] for i in results], outs

        _, vjp, outs = jax.vjp(of_floats, [values[i] for i in floats], has_aux=True)
        return outs, vjp(cts)[0]

    program, _, _ = trace(joint, shapes[: len(flat)], [result_shapes[i] for i in results])
    values, seeds = program.invars[: len(flat)], program.invars[len(flat) :]
    outs, cts = program.outs[: len(result_shapes)], program.outs[len(result_shapes) :]
    forward, backward, cut, alive = _cut(program, outs, cts, set(seeds))
    env = dict(program.consts) | dict(zip(values, flat, strict=True))
    run_equations(forward, env)
    tree = jax.tree.structure((*in_tree.unflatten(flat), *taken_tree.unflatten(taken)))
    again = sum(math.prod(x.shape) * x.dtype.itemsize for x in taken) > MANY_BYTES
    back = _SegmentBackward(backward, [*cut, *alive], seeds, results, cts, floats, shapes, tree, again)
    split = [env[v] for v in cut], [env[v] for v in alive]
    transpose = jax.tree_util.Partial(functools.partial(_pull_back, back), *split)
    return out_tree.unflatten([value_of(x, env) for x in outs]), transpose


def _cut(
    program: Program, outs: tuple[Atom, ...], cts: tuple[Atom, ...], seeds: set[Var]
) -> tuple[list[Eqn], list[Eqn], list[Var], list[Var]]:
    """Returns the forward's and the backward's equations, what one stores for the other, and what that reads besides."""
    later = depends(program.eqns, seeds)
    own = [e for e in needed(program.eqns, cts, set())[0] if e.outvars[0] in later]
    first = [e for e in program.eqns if e.outvars[0] not in later]
    free = {*program.consts, *program.invars} - seeds
    cut = keep_products(first, reads(own, cts) - later)
    backward, _ = needed(program.eqns, cts, free | seeds | set(cut))
    read = reads(backward, cts)
    alive = [v for v in (*program.consts, *program.invars) if v in read - seeds]
    return needed(first, [*outs, *cut], free)[0], backward, cut, alive


def after(cts: list[jax.Array], alive: list[jax.Array]) -> list[jax.Array]:
    """Returns `alive` with indices that are only known after the cotangents, so that XLA gathers again, and not before."""
    firsts = [x[(0,) * x.ndim] for x in cts if x.size][:1]
    late = [jnp.minimum(jnp.isnan(x).astype(jnp.int32), 0) for x in firsts]  # 0, whatever x is
    return [x + late[0].astype(x.dtype) if late and jnp.issubdtype(x.dtype, jnp.integer) and x.ndim else x for x in alive]


def not_before(cts: list[jax.Array], cut: list[jax.Array]) -> list[jax.Array]:
    """Returns `cut`, multiplied by 1 on a CPU, which is only known after the cotangents: XLA removes barriers there."""
    first = next((x[(0,) * x.ndim] for x in cts if x.size), None)
    if first is None or jax.default_backend() != "cpu":
        return cut
    one = jnp.maximum(jnp.isnan(first).astype(jnp.int32), 1)
    return [x * one.astype(x.dtype) if is_float(x) else x for x in cut]


def _pull_back(back: _SegmentBackward, cut: list[jax.Array], alive: list[jax.Array], cts: PyTree) -> tuple[PyTree, ...]:
    """Returns the cotangents of the arguments."""
    flat = jax.tree.leaves(cts)
    # The barrier keeps XLA from merging what runs again with the forward's equations, whose results would stay alive. What
    # follows from `alive` alone, such as gathered rows in float16, XLA may merge: computing it again takes time on a GPU.
    cut = lax.optimization_barrier(cut)
    cts = [flat[i] for i in back.results]
    if back.again:
        alive = after(cts, alive)
    env = dict(zip(back.kept, [*cut, *alive], strict=True))
    behind = depends(back.eqns, set(back.seeds))
    again = [e for e in back.eqns if e.outvars[0] not in behind]
    local = dict(zip(back.kept, [*not_before(cts, cut), *alive], strict=True))
    run_equations(again, local)
    env |= {v: local[v] for e in again for v in e.outvars} | dict(zip(back.seeds, cts, strict=True))
    run_equations([e for e in back.eqns if e.outvars[0] in behind], env)
    found = dict(zip(back.floats, (value_of(x, env) for x in back.outs), strict=True))
    return back.tree.unflatten([found[i] if i in found else zero_cotangent(x) for i, x in enumerate(back.shapes)])
