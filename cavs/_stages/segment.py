"""The derivative of a part of F that runs in one batch. It keeps a minimum cut of what the forward computes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.children import wide
from cavs._function.evaluate import pad_rows
from cavs._function.products import sum_of_rows
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.costs import is_costly_in_f
from cavs._jaxpr.derivative import Derivative, cheapest, derivative
from cavs._jaxpr.equations import bind, depends, is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.hold_back import barrier, hold_back
from cavs._jaxpr.jaxprs import Eqn, PyTreeDef, Var
from cavs._stages.blocks import MANY_BYTES, blocks_of, in_blocks, joined
from cavs._stages.cotangents import zero_cotangent
from cavs._stages.saved import Transpose
from cavs.kernels import Target

T = TypeVar("T")


class _Part(NamedTuple):
    """A part of F with its derivative, traced."""

    derivative: Derivative  # both as one program
    places: list[int]  # the arguments that are differentiated
    shapes: list[jax.ShapeDtypeStruct]  # of all arguments
    tree: PyTreeDef  # of all arguments
    out_tree: PyTreeDef  # of the results
    cut: list[Var]  # what the forward stores for the backward
    alive: list[Var]  # which arguments and constants the backward reads besides
    again: bool  # whether what was gathered is gathered again, rather than alive from the forward to the backward

    def without_arrays(self) -> "_Part":
        """Returns what the backward reads of it. It may be kept after the trace to which its constants belong."""
        return self._replace(derivative=dataclasses.replace(self.derivative, consts={}))

    def float_results(self, cts: PyTree) -> list[jax.Array]:
        """Returns the cotangents of the results that are floats."""
        return [ct for ct, x in zip(jax.tree.leaves(cts), self.derivative.outs, strict=True) if is_float(x)]

    def with_zeros(self, cts: dict[int, jax.Array], shapes: list[jax.ShapeDtypeStruct]) -> tuple[PyTree, ...]:
        """Returns the cotangents of all arguments, of these shapes, with zeros where `cts` has none."""
        return self.tree.unflatten([cts[i] if i in cts else zero_cotangent(x) for i, x in enumerate(shapes)])


def with_vjp(
    fn: Callable[..., T],
    save: bool,
    args: tuple[PyTree, ...],
    gather: Callable[[], tuple[PyTree, ...]] = tuple,
    fixed: Collection[int] = (),
) -> tuple[T, list[Transpose]]:
    """Returns `fn(*args, *gather())`, and with `save` its transpose, which keeps a minimum cut.

    The transpose also keeps `args` and the arrays over which `fn` and `gather` close, as far as it reads them: these should be
    alive anyway.

    Args:
        save: whether to return the transpose.
        args: its first arguments.
        gather: returns the other arguments, such as rows of an array over which it closes.
        fixed: the arguments that are not differentiated, by their place among all of `fn`, flat.

    Returns:
        The result; and in a list a function from its cotangents to those of `args` and of what `gather` returned, as one
        tuple, or nothing.
    """
    if not save:
        return fn(*args, *gather()), []
    part = _traced(fn, args, gather, fixed)
    joint = part.derivative
    env = joint.consts | dict(zip(joint.invars, jax.tree.leaves(args), strict=True))
    run_equations(needed(joint.forward, [*joint.outs, *part.cut], set(env))[0], env)
    saved = [env[v] for v in part.cut], [env[v] for v in part.alive]
    transpose = jax.tree_util.Partial(functools.partial(_pull_back, part.without_arrays()), *saved)
    return part.out_tree.unflatten([value_of(x, env) for x in joint.outs]), [transpose]


def with_vjp_in_blocks(
    fn: Callable[..., T],
    save: bool,
    args: tuple[PyTree, ...],
    gather: Callable[[jax.Array], tuple[PyTree, ...]],
    index: jax.Array,
    size: int,
    fixed: Collection[int] = (),
) -> tuple[T, list[Transpose]]:
    """Like `with_vjp` of `fn(*args, *gather(index))`, but gathers and runs `size` rows at a time, in the backward, too.

    Args:
        fn: a pure function that computes `size` rows of each result.
        save, args: as in `with_vjp`.
        gather: from some of `index` to rows of the other arguments.
        index: (rows,) int32.
        size: the rows of a block. Rows after the last repeat the first one, and nothing reads them.
        fixed: as in `with_vjp`.

    Returns as `with_vjp`. The cotangents of `args` are sums over the blocks.
    """
    if not save:
        return in_blocks(lambda chunk: fn(*args, *gather(chunk)), index, size), []
    rows, blocks = index.shape[0], blocks_of(index, size)
    part = _traced(fn, args, gather, fixed, jax.ShapeDtypeStruct((size,), index.dtype))
    joint = part.derivative
    *invars, block = joint.invars
    env = joint.consts | dict(zip(invars, jax.tree.leaves(args), strict=True))
    eqns, inside = needed(joint.forward, [*joint.outs, *part.cut], {*env, block})[0], depends(joint.forward, {block})
    run_equations([e for e in eqns if e.outvars[0] not in inside], env)
    cut = [v for v in part.cut if v in inside]

    def forward(index: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        local = env | {block: index}
        run_equations([e for e in eqns if e.outvars[0] in inside], local)
        return [value_of(x, local) for x in joint.outs], [local[v] for v in cut]

    outs, kept = lax.map(forward, blocks)
    outs = [joined(x)[:rows] for x in outs]
    alive = [v for v in (*part.cut, *part.alive) if v not in inside]
    part = part._replace(cut=cut, alive=[*alive, block], again=False)
    transpose = functools.partial(_pull_back_in_blocks, part.without_arrays(), len(invars), rows)
    return part.out_tree.unflatten(outs), [jax.tree_util.Partial(transpose, kept, [env[v] for v in alive], blocks)]


def _traced(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    gather: Callable[..., tuple[PyTree, ...]],
    fixed: Collection[int],
    *index: jax.ShapeDtypeStruct,
) -> _Part:
    """Traces a part of F; of `args` only the shapes are read. With `index`, `gather` is given it."""
    flat, in_tree = jax.tree.flatten(args)
    gathered, gathered_tree = jax.tree.flatten(jax.eval_shape(gather, *index))
    count, out_trees = len(flat), []
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in flat] + gathered
    places = [i for i, x in enumerate(shapes) if is_float(x) and i not in fixed]

    def flat_fn(*values: jax.Array) -> list[jax.Array]:
        outs, tree = jax.tree.flatten(fn(*in_tree.unflatten(values[:count]), *gathered_tree.unflatten(values[count:])))
        out_trees[:] = [tree]
        return outs

    def arguments(*values: jax.Array) -> list[jax.Array]:
        return [*values[:count], *jax.tree.leaves(gather(*values[count:]))]

    joint = derivative(flat_fn, [*shapes[:count], *index], places, arguments)

    def price(i: int) -> float | None:  # the backward runs cheap equations again, but no product
        return None if is_costly_in_f(joint.forward[i]) else 0.0

    cut = cheapest(joint.forward, joint.needs, price, is_costly_in_f, comparisons=False)
    read = {*needed(joint.forward, joint.needs, {*joint.consts, *joint.invars, *cut})[1], *reads(joint.backward, joint.grads)}
    tree = jax.tree.structure((*in_tree.unflatten(flat), *gathered_tree.unflatten(gathered)))
    again = sum(math.prod(x.shape) * x.dtype.itemsize for x in gathered) > MANY_BYTES
    alive = [v for v in (*joint.consts, *joint.invars) if v in read]
    return _Part(joint, places, shapes, tree, out_trees[0], cut, alive, again)


def _pull_back(part: _Part, cut: list[jax.Array], alive: list[jax.Array], cts: PyTree) -> tuple[PyTree, ...]:
    """Returns the cotangents of the arguments."""
    return part.with_zeros(_cotangents(part, cut, alive, part.float_results(cts)), part.shapes)


def _pull_back_in_blocks(
    part: _Part, num_args: int, rows: int, cut: list[jax.Array], alive: list[jax.Array], blocks: jax.Array, cts: PyTree
) -> tuple[PyTree, ...]:
    """Returns the cotangents of the arguments; those after the first `num_args` have `rows` rows. `cut` is of all blocks."""
    count, size = blocks.shape
    cts = [pad_rows(x, count * size).reshape(count, size, *x.shape[1:]) for x in part.float_results(cts)]

    def backward(totals: dict[int, jax.Array], block: Any) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        index, cut, cts = block
        ct_args = _cotangents(part, cut, [*alive, index], cts)
        return {i: total + ct_args[i] for i, total in totals.items()}, {i: x for i, x in ct_args.items() if i not in totals}

    like = {i: part.shapes[i] for i in part.places if i < num_args}
    zeros = {i: wide(jnp.zeros(x.shape, x.dtype)) for i, x in like.items()}
    totals, gathered = lax.scan(backward, zeros, (blocks, cut, cts))
    ct_args = {i: x.astype(like[i].dtype) for i, x in totals.items()} | {i: joined(x)[:rows] for i, x in gathered.items()}
    shapes = [*part.shapes[:num_args], *(jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in part.shapes[num_args:])]
    return part.with_zeros(ct_args, shapes)


def _summed(eqn: Eqn, args: list[Any]) -> list[jax.Array]:
    """Runs an equation. A sum over rows, such as the gradient of a bias, is divided."""
    is_sum = eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,) and is_float(eqn.outvars[0])
    return [sum_of_rows(args[0])] if is_sum else bind(eqn, args)


def _cotangents(part: _Part, cut: list[jax.Array], alive: list[jax.Array], cts: list[jax.Array]) -> dict[int, jax.Array]:
    """Maps cotangents of float results to cotangents of the differentiated arguments, by their place."""
    # The barrier keeps XLA from merging what runs again with the forward's equations, whose results would stay alive. What
    # follows from `alive` alone, such as gathered rows in float16, XLA may merge: computing it again takes time on a GPU.
    joint, cut = part.derivative, barrier(cut)
    if part.again:  # gathers again, and not before the backward begins
        alive = hold_back(alive, cts, jnp.integer)
    held = hold_back(cut, cts, jnp.inexact) if Target.here().is_cpu else cut  # where XLA removes barriers
    kept = [*part.cut, *part.alive]
    env, local = (dict(zip(kept, [*values, *alive], strict=True)) for values in (cut, held))
    eqns = needed(joint.forward, joint.needs, set(env))[0]
    run_equations(eqns, local)
    env |= {v: local[v] for e in eqns for v in e.outvars} | dict(zip(joint.seeds, cts, strict=True))
    run_equations(joint.backward, env, _summed)
    return dict(zip(part.places, (value_of(x, env) for x in joint.grads), strict=True))
