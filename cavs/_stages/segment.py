"""The derivative of a part of F that runs in one batch: it keeps a minimum cut of what the forward computes (Echo, section IV).

`jax.vjp` keeps what each equation's derivative reads: seven values per leaf of a Tree-LSTM, where three pre-activations are
enough. Here the part and its VJP are traced into one program. The backward runs cheap equations again, but no product.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.evaluate import pad_rows
from cavs._function.unroll import trace
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import Program, depends, is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.hold_back import barrier, hold_back
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, PyTreeDef, Var
from cavs._jaxpr.minimum_cut import keep_products
from cavs._stages.blocks import MANY_BYTES, blocks_of, joined
from cavs._stages.cotangents import zero_cotangent
from cavs._stages.saved import Transpose


class _SegmentBackward(NamedTuple):
    """What the backward runs. It has no arrays, except constants.

    Attributes:
        eqns: its equations.
        kept: the variables that the forward stores, or has in any case.
        seeds: the variables of the cotangents of float results, which are `results` among all of them.
        outs: the cotangents of the arguments that are differentiated, which are `floats` among all of them.
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


class _TracedPart(NamedTuple):
    """A part of F with its derivative, traced.

    Attributes:
        invars: the variables of the arguments that are not gathered, flat, and of the index from which others are gathered.
        consts: the values over which the part closes.
        eqns: the forward's equations.
        outs: its results, flat.
        out_tree: of the results.
        cut: what the forward stores for the backward.
        alive: which of `invars` and `consts` the backward reads besides.
        back: the backward.
    """

    invars: tuple[Var, ...]
    consts: Env
    eqns: list[Eqn]
    outs: tuple[Atom, ...]
    out_tree: PyTreeDef
    cut: list[Var]
    alive: list[Var]
    back: _SegmentBackward


def cut_vjp(
    fn: Callable[..., Any], args: tuple[PyTree, ...], gather: Callable[[], tuple[PyTree, ...]], fixed: Collection[int] = ()
) -> tuple[Any, Transpose]:
    """Returns `fn(*args, *gather())` and its transpose, which keeps a minimum cut.

    The transpose also keeps `args` and the arrays over which `fn` and `gather` close, as far as it reads them: these should be
    alive anyway.

    Args:
        fn: a pure function.
        args: its first arguments.
        gather: returns the other arguments, such as rows of an array over which it closes.
        fixed: the arguments that are not differentiated, by their place among all of `fn`, flat.

    Returns:
        The result, and a function from its cotangents to those of `args` and of what `gather` returned, as one tuple.
    """
    segment = _traced(fn, args, gather, fixed)
    env = segment.consts | dict(zip(segment.invars, jax.tree.leaves(args), strict=True))
    run_equations(segment.eqns, env)
    split = [env[v] for v in segment.cut], [env[v] for v in segment.alive]
    transpose = jax.tree_util.Partial(functools.partial(_pull_back, segment.back), *split)
    return segment.out_tree.unflatten([value_of(x, env) for x in segment.outs]), transpose


def cut_vjp_in_blocks(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    gather: Callable[[jax.Array], tuple[PyTree, ...]],
    index: jax.Array,
    size: int,
    fixed: Collection[int] = (),
) -> tuple[Any, Transpose]:
    """Like `cut_vjp` of `fn(*args, *gather(index))`, but gathers and runs `size` rows at a time, in the backward, too.

    Args:
        fn: a pure function that computes `size` rows of each result.
        args: as in `cut_vjp`.
        gather: from some of `index` to rows of the other arguments.
        index: (rows,) int32.
        size: the rows of a block. Rows after the last repeat the first one, and nothing reads them.
        fixed: as in `cut_vjp`.

    Returns:
        As `cut_vjp`. The cotangents of `args` are sums over the blocks.
    """
    rows, blocks = index.shape[0], blocks_of(index, size)
    segment = _traced(fn, args, gather, fixed, jax.ShapeDtypeStruct((size,), index.dtype))
    *invars, block = segment.invars
    inside = depends(segment.eqns, {block})
    env = segment.consts | dict(zip(invars, jax.tree.leaves(args), strict=True))
    run_equations([e for e in segment.eqns if e.outvars[0] not in inside], env)
    cut = [v for v in segment.cut if v in inside]

    def forward(index: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        local = env | {block: index}
        run_equations([e for e in segment.eqns if e.outvars[0] in inside], local)
        return [value_of(x, local) for x in segment.outs], [local[v] for v in cut]

    outs, kept = lax.map(forward, blocks)
    outs = [joined(x)[:rows] for x in outs]
    alive = [v for v in (*segment.cut, *segment.alive) if v not in inside]
    back = segment.back._replace(kept=[*cut, *alive, block], again=False)
    transpose = functools.partial(_pull_back_in_blocks, back, len(invars), rows)
    return segment.out_tree.unflatten(outs), jax.tree_util.Partial(transpose, kept, [env[v] for v in alive], blocks)


def _traced(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    gather: Callable[..., tuple[PyTree, ...]],
    fixed: Collection[int],
    *index: jax.ShapeDtypeStruct,
) -> _TracedPart:
    """Traces a part of F; of `args` only the shapes are read. With `index`, `gather` is given it."""
    flat, in_tree = jax.tree.flatten(args)
    taken, taken_tree = jax.tree.flatten(jax.eval_shape(gather, *index))
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in flat] + taken
    floats = [i for i, x in enumerate(shapes) if is_float(x) and i not in fixed]
    result_shapes, out_tree = jax.tree.flatten(jax.eval_shape(fn, *args, *taken_tree.unflatten(taken)))
    results = [i for i, x in enumerate(result_shapes) if is_float(x)]

    def joint(
        values: list[jax.Array], index: tuple[jax.Array, ...], cts: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        values = [*values, *jax.tree.leaves(gather(*index))]

        def of_floats(changed: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            full = list(values)
            for i, x in zip(floats, changed, strict=True):
                full[i] = x
            outs = jax.tree.leaves(fn(*in_tree.unflatten(full[: len(flat)]), *taken_tree.unflatten(full[len(flat) :])))
            return [outs[i] for i in results], outs

        _, vjp, outs = jax.vjp(of_floats, [values[i] for i in floats], has_aux=True)
        return outs, vjp(cts)[0]

    program, _, _ = trace(joint, shapes[: len(flat)], index, [result_shapes[i] for i in results])
    count = len(flat) + len(index)
    values, seeds = program.invars[:count], program.invars[count:]
    outs, cts = program.outs[: len(result_shapes)], program.outs[len(result_shapes) :]
    forward, backward, cut, alive = _cut(program, outs, cts, set(seeds))
    tree = jax.tree.structure((*in_tree.unflatten(flat), *taken_tree.unflatten(taken)))
    again = sum(math.prod(x.shape) * x.dtype.itemsize for x in taken) > MANY_BYTES
    back = _SegmentBackward(backward, [*cut, *alive], seeds, results, cts, floats, shapes, tree, again)
    return _TracedPart(values, program.consts, forward, outs, out_tree, cut, alive, back)


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


def _pull_back(back: _SegmentBackward, cut: list[jax.Array], alive: list[jax.Array], cts: PyTree) -> tuple[PyTree, ...]:
    """Returns the cotangents of the arguments."""
    flat = jax.tree.leaves(cts)
    found = _cotangents(back, cut, alive, [flat[i] for i in back.results])
    return back.tree.unflatten([found[i] if i in found else zero_cotangent(x) for i, x in enumerate(back.shapes)])


def _pull_back_in_blocks(
    back: _SegmentBackward,
    num_args: int,
    rows: int,
    cut: list[jax.Array],
    alive: list[jax.Array],
    blocks: jax.Array,
    cts: PyTree,
) -> tuple[PyTree, ...]:
    """Returns the cotangents of the arguments; those after the first `num_args` have `rows` rows. `cut` is of all blocks."""
    flat, (count, size) = jax.tree.leaves(cts), blocks.shape
    cts = [pad_rows(flat[i], count * size).reshape(count, size, *flat[i].shape[1:]) for i in back.results]

    def backward(totals: dict[int, jax.Array], block: Any) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        index, cut, cts = block
        found = _cotangents(back, cut, [*alive, index], cts)
        return {i: total + found[i] for i, total in totals.items()}, {i: x for i, x in found.items() if i not in totals}

    zeros = {i: jnp.zeros(back.shapes[i].shape, back.shapes[i].dtype) for i in back.floats if i < num_args}
    totals, gathered = lax.scan(backward, zeros, (blocks, cut, cts))
    found = totals | {i: joined(x)[:rows] for i, x in gathered.items()}
    shapes = [*back.shapes[:num_args], *(jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in back.shapes[num_args:])]
    return back.tree.unflatten([found[i] if i in found else zero_cotangent(x) for i, x in enumerate(shapes)])


def _cotangents(
    back: _SegmentBackward, cut: list[jax.Array], alive: list[jax.Array], cts: list[jax.Array]
) -> dict[int, jax.Array]:
    """Returns the cotangents of the arguments that are differentiated, by their place, from those of float results."""
    # The barrier keeps XLA from merging what runs again with the forward's equations, whose results would stay alive. What
    # follows from `alive` alone, such as gathered rows in float16, XLA may merge: computing it again takes time on a GPU.
    cut = barrier(cut)
    if back.again:  # gathers again, and not before the backward begins
        alive = hold_back(alive, cts, jnp.integer)
    env = dict(zip(back.kept, [*cut, *alive], strict=True))
    behind = depends(back.eqns, set(back.seeds))
    again = [e for e in back.eqns if e.outvars[0] not in behind]
    local = dict(
        zip(back.kept, [*(hold_back(cut, cts, jnp.inexact) if jax.default_backend() == "cpu" else cut), *alive], strict=True)
    )
    run_equations(again, local)
    env |= {v: local[v] for e in again for v in e.outvars} | dict(zip(back.seeds, cts, strict=True))
    run_equations([e for e in back.eqns if e.outvars[0] in behind], env)
    return dict(zip(back.floats, (value_of(x, env) for x in back.outs), strict=True))
