"""Sub-batches with accumulated gradients (moDNN, section 5.1): a batch in the memory of a part of it."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from cavs._feed.plan import dealt
from cavs._function.arrays import as_arrays
from cavs._function.children import wide
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_bool
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Arrays, opened, without_constants
from cavs._jaxpr.mesh_types import vary, varying, zeros
from cavs._jaxpr.running_sums import run_and_add
from cavs._memory.parted_loss import PartedLoss, parted
from cavs._stages.cotangents import differentiated, with_differentiated

Params = TypeVar("Params")
Loss = TypeVar("Loss")  # a scalar, or with `has_aux` a pair
_ROWS = 1.01  # how much larger the largest part may become, as a factor, if parts then have fewer levels
_LEVEL = 100  # rows that take as long as one more level: an estimate
_ALIKE = (1, 4, 16)  # numbers of graphs of about equal size that are dealt to a part at a time


def deal(graphs: Graphs, count: int) -> np.ndarray:
    """Deals graphs into sub-batches of equal numbers of graphs and about equal numbers of vertices.

    A part has as many levels as its deepest graph, so among graphs of about equal size, the deep ones go to the same part.

    Args:
        graphs: the graphs of a batch, G of them.
        count: the number of sub-batches. It divides G.

    Returns:
        (count, G / count) int, the graphs of each sub-batch, for [`cavs.data.Loader`][].

    Raises:
        TypeError: if `graphs` is something else.
        ValueError: if `count` does not divide the number of graphs.
    """
    check_graphs(graphs, "deal(graphs, count)")
    count = int(count) if isinstance(count, np.integer) else count
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or not len(graphs) or len(graphs) % count:
        raise ValueError(
            f"deal: count: got {count!r} for {counted(len(graphs), 'graph')}; expected a divisor of the number of graphs, so "
            "that all sub-batches have one shape. Write a batch size that is a multiple of count."
        )
    sizes, levels = np.diff(graphs.vertex_offsets), graphs._facts.levels
    plain, per_part = dealt(sizes, count), len(graphs) // count
    limit = _ROWS * sizes[plain].sum(1).max()
    alternatives = [_by_height(sizes, levels, count, alike) for alike in _ALIKE if per_part % alike == 0]
    fitting = [plain, *(parts for parts in alternatives if sizes[parts].sum(1).max() <= limit)]
    return min(fitting, key=lambda parts: count * sizes[parts].sum(1).max() + _LEVEL * levels[parts].max(1).sum())


def _by_height(sizes: np.ndarray, levels: np.ndarray, count: int, alike: int) -> np.ndarray:
    """Deals `alike` graphs to each part at a time: among those of about equal size, the first part gets the deepest."""
    groups = np.argsort(-sizes, kind="stable").reshape(-1, count * alike)
    groups = np.take_along_axis(groups, np.argsort(-levels[groups], axis=1, kind="stable"), 1)
    return np.ascontiguousarray(groups.reshape(-1, count, alike).swapaxes(0, 1).reshape(count, -1))


def sub_batched(loss: Callable[[Params, Any], Loss], has_aux: bool = False) -> Callable[[Params, list[Any]], Loss]:
    """Returns a loss over a batch in parts, whose derivative needs the memory of one part at a time.

    The result and its gradient are the same as for the whole batch, up to rounding, if the loss is a sum over graphs, or
    follows from [`cavs.data.total`][] and [`cavs.data.mean`][], which are over the whole batch. Forward and backward of one
    sub-batch run before the next one starts, and gradients are added up: the batch takes the memory of a sub-batch, and one
    more copy of the gradients (moDNN, section 5.1).

    ```python
    parts = cavs.memory.deal(graphs, 8)                                       # eight sub-batches
    stacks = [batches.tree for batches in cavs.data.Loader(graphs, parts, steps=8, shapes=1)]
    total = cavs.memory.sub_batched(loss)                                     # loss(params, sched) of one sub-batch
    value, grads = jax.jit(jax.value_and_grad(total))(params, stacks)
    ```

    What follows the last sum over rows in `loss` is checked: a mean, a quotient of two sums, a sum divided by the number of its
    rows, and a maximum, a power and the like of a sub-batch are refused. What is not checked, and would be added up: statistics
    of a sub-batch before that sum, such as batch normalisation; constants, as in `losses.sum() + 1`; variances, `x.var()`;
    single elements or rows, such as `losses[0]`; and means by weights, `losses @ weights`.

    Write `cavs.data.total(y)` to add up any `y` of each part on purpose, such as `cavs.data.total(x.mean())`, and for a weight:
    `losses.sum() * 0.1` is taken for a mean if a part has ten rows, and `cavs.data.total(losses) * 0.1` is not.

    Args:
        loss: `loss(params, batch)`, a scalar: a sum over the graphs of the batch, or computed from `cavs.data.total` and
            `cavs.data.mean` and the parameters.
        has_aux: whether `loss` returns `(loss, aux)`. The arrays of `aux` are added up, if they do not follow from totals; they
            have no gradient.

    Returns:
        `total(params, stacks)`, where `stacks` is a list of stacked batches, the `tree` of [`cavs.data.Batches`][]: pytrees
        whose arrays have a leading axis of sub-batches. It can be differentiated in reverse mode with respect to `params` and
        the float arrays of `stacks`.

    Raises:
        ValueError: when it is called, if sub-batches differ in their shapes.
        TypeError: `has_aux` is no bool; or, when it is called, `stacks` is not a list, or `loss` does not return a float
            scalar, adds a sum over graphs to a total, or a term of the parameters alone to a sum over graphs, is a mean or
            another function of one sub-batch that is no sum, or takes totals inside a loop.
    """
    check_takes("sub_batched: loss", loss, "params", "batch", write="sub_batched(loss)")
    check_bool("sub_batched: has_aux", has_aux)
    return summed_over_parts("sub_batched", loss, has_aux)


def checked_scalar(function: str, value: Any, hint: str = "") -> jax.Array:
    """Returns what a loss returned. Raises a `TypeError`, in the name of `function`, if it is no float scalar."""
    if not isinstance(value, jax.Array) or value.shape or not is_float(value):
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__
        raise TypeError(
            f"{function}: loss: got {got}; expected a float scalar, the sum over the graphs. Write jnp.sum(...){hint}."
        )
    return value


def summed_over_parts(function: str, loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Returns what `sub_batched` returns. Errors name `function`."""

    hint = ", and has_aux=True if the loss returns more" * (function == "sub_batched")

    def one(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        value, aux = loss(params, batch) if has_aux else (loss(params, batch), ())
        return checked_scalar(function, value, hint), aux

    def checked(params: PyTree, stacks: list[PyTree]) -> Any:
        if not isinstance(stacks, list) or not stacks:  # a tuple may be a batch: `(sched, x)`
            raise TypeError(
                f"sub_batched: stacks: got {'an empty' if isinstance(stacks, list) else 'a'} {type(stacks).__name__}; expected "
                "a list of stacked batches. Write [batch] for each batch of cavs.data.Loader(..., parts=8, steps=1)."
            )
        lengths = [{jnp.shape(x)[:1] for x in jax.tree.leaves(s)} for s in stacks]
        if any(len(of) != 1 or () in of for of in lengths):
            raise ValueError(
                f"{function}: stacks: got arrays of leading axes {sorted(set().union(*lengths))}; expected one number of "
                "sub-batches in all arrays of a stack. Write jax.tree.map(lambda *xs: jnp.stack(xs), *batches)."
            )
        alike = {(jax.tree.structure(s), *((jnp.shape(x)[1:], jnp.result_type(x)) for x in jax.tree.leaves(s))) for s in stacks}
        if len(alike) > 1:  # the loss is traced once
            raise ValueError(
                f"{function}: stacks: got sub-batches of {len(alike)} shapes; expected equal structures, shapes and dtypes in "
                "all stacks. Write cavs.data.Loader(..., shapes=1)."
            )
        # Inside a `jax.shard_map` that checks types, what the result depends on differs between devices before it is read.
        axes = tuple(sorted(frozenset().union(*map(varying, jax.tree.leaves((params, stacks))))))
        arguments = as_arrays(params, f"{function}: params"), as_arrays(list(stacks), f"{function}: stacks")
        params, arrays = jax.tree.map(lambda x: vary(x, axes), arguments)
        # Arrays that `loss` closes over may be differentiated and batched, too, so they become parameters.
        closed, shapes = jax.make_jaxpr(one, return_shape=True)(params, _first(arrays))
        no_consts, consts = without_constants(closed)
        flat, batches = [*consts, *jax.tree.leaves(params)], list(map(jax.tree.leaves, arrays))
        of_part = parted(function, opened(no_consts)[0], len(flat), sum(len(leaves[0]) for leaves in batches))
        outs = _differentiable(function, of_part)(flat, batches)
        out, aux = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return (out, aux) if has_aux else out

    return checked


def _differentiable(function: str, of_part: "PartedLoss") -> Callable[[Arrays, list[Arrays]], Arrays]:
    """Returns the results for all parts as a function of parameters and stacks, with its derivative. Errors name `function`."""

    def plain(params: Arrays, stacks: list[Arrays]) -> Arrays:
        return of_part.after(params, *_summed(lambda batch: of_part.before(params, batch), stacks))

    def forward(varied: tuple[list[bool], list[list[bool]]], params: Arrays, stacks: list[Arrays]) -> Any:
        in_params, in_batch = varied[0], [any(of) for of in zip(*varied[1], strict=True)]
        _check_closed_over(function, params, in_params, stacks)
        weights = of_part.weights(params, lambda which: _summed(lambda x: of_part.before(params, x, which)[1], stacks))

        def value_and_grad(batch: Arrays) -> Any:
            def of(by: PyTree) -> tuple[jax.Array, PyTree]:
                sums_and_terms = of_part.before(*with_differentiated((params, batch), by))
                return of_part.weighed(*sums_and_terms, weights), sums_and_terms

            by = differentiated((params, batch), (in_params, in_batch))
            (_, sums), (by_params, by_batch) = jax.value_and_grad(of, has_aux=True)(by)
            return (sums, by_params), by_batch

        (sums, by_params), by_stacks = _summed(value_and_grad, stacks, each=True)
        if of_part.reads_params():
            of_whole = lambda by: of_part.after(with_differentiated(params, by), *sums)[0]  # noqa: E731
            direct = jax.grad(of_whole)(differentiated(params, in_params))
            by_params = jax.tree.map(jnp.add, by_params, direct)
        return of_part.after(params, *sums), jax.tree_util.Partial(backward, (by_params, by_stacks))

    def backward(gradients: PyTree, cts: list[Any]) -> PyTree:
        return jax.tree.map(lambda x: x * cts[0].astype(x.dtype), gradients)  # `None` where nothing is differentiated

    # Nothing computes cotangents of inputs that nobody asks for.
    return reverse_differentiable(plain, forward, "sub_batched")


def _first(stacks: list[PyTree]) -> PyTree:
    """Returns the types of the arrays of one sub-batch."""
    return jax.tree.map(lambda x: jex.mapped_aval(x.shape[0], 0, jax.typeof(x)), stacks[0])


def _check_closed_over(function: str, params: Arrays, varied: list[bool], stacks: list[Arrays]) -> None:
    """Raises a `ValueError` for arrays that a loss closes over, if their gradient is a sum over devices."""
    axes = varying(stacks[0][0])
    if any(is_varied and varying(x) != axes for x, is_varied in zip(params, varied, strict=True)):
        raise ValueError(
            f"{function}: loss: closes over an array that is differentiated, and the same on all devices of a jax.shard_map "
            "with check_vma=True; expected it among the parameters. Write loss(params, batch) with params | {'name': array}."
        )


def _summed(fn: Callable[[PyTree], Any], stacks: list[PyTree], each: bool = False) -> Any:
    """Returns the sum of `fn(batch)` over all batches; with `each`, `fn` also returns values that are stacked instead."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(_first(stacks))  # traced once, for its shapes and for all stacks
    like = shapes[0] if each else shapes
    total, stacked = jax.tree.map(lambda x: wide(zeros(x)), like), []

    def step(total: PyTree, batch: PyTree) -> tuple[PyTree, Any]:
        sums, kept = run_and_add(closed, jax.tree.leaves(batch), jax.tree.leaves(total))
        kept = jax.tree.unflatten(jax.tree.structure(shapes[1]), kept) if each else None
        return jax.tree.unflatten(jax.tree.structure(total), sums), kept

    for stack in stacks:
        # A stack waits for the one before it, so that one sub-batch is alive at a time.
        total, stack = barrier((total, stack)) if stacked else (total, stack)
        total, kept = lax.scan(step, total, stack)
        stacked.append(kept)
    total = jax.tree.map(lambda x, struct: x.astype(struct.dtype), total, like)
    return (total, stacked) if each else total
