"""Sub-batches with accumulated gradients (moDNN, section 5.1): a batch in the memory of a part of it.

The loss of a part is cut at the sums that `cavs.data.total` and `cavs.data.mean` take over the whole batch. Before the cut are
values of a part. After it, the loss of the whole batch follows from the sums. The derivative of the loss by each sum is the
weight of that sum: the gradient of the loss is that of the weighted terms of all parts, added up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from cavs._feed.plan import dealt
from cavs._function.children import wide
from cavs._graphs.arguments import check_graphs
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.equations import alive, bind, depends, is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Eqn, Jaxpr, Var, bodies_in, is_var, opened, without_constants
from cavs._jaxpr.mesh_types import vary, varying, zeros
from cavs._jaxpr.names import WHOLE_BATCH
from cavs._jaxpr.promotion import promoting
from cavs._jaxpr.running_sums import run_and_add
from cavs._jaxpr.source_lines import line_of
from cavs._stages.cotangents import differentiated, instantiated, with_differentiated

Arrays: TypeAlias = list[jax.Array]
Params = TypeVar("Params")
Loss = TypeVar("Loss")  # a scalar, or with `has_aux` a pair

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_SUMS = ("add", "add_any", "sub")
_SCALES = ("mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "copy")
MSG_MIXED = (
    "{function}: loss: got values of one part of a batch together with cavs.data.total or cavs.data.mean, which are over the "
    "whole batch; expected a loss that follows from such totals and the parameters alone. Write cavs.data.total(x) for every "
    "jnp.sum(x) over graphs or vertices, and cavs.data.mean(x) for x.mean()."
)
MSG_TERM = (
    "{function}: loss: got a sum over graphs together with a term of the parameters alone{where}, which every part would add; "
    "expected such a term beside a total. Write cavs.data.total(losses) + penalty(params) for losses.sum() + penalty(params)."
)
MSG_MEAN = (
    "{function}: loss: got a mean over one part{where}, which would be added up over the parts; expected a sum over graphs, or "
    "cavs.data.mean and cavs.data.total. Write cavs.data.mean(losses) for losses.mean(), cavs.data.total(a) / "
    "cavs.data.total(b) for a.sum() / b.sum(), or cavs.data.total(losses.mean()) for the sum of the means of all parts."
)
MSG_INSIDE = (
    "{function}: loss: got cavs.data.total or cavs.data.mean inside {name}{where}; expected it outside of loops, conditions, "
    "jax.checkpoint and functions with derivatives of their own. Return the losses, and write cavs.data.total(losses) after it."
)
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
    if not isinstance(count, int) or count < 1 or not len(graphs) or len(graphs) % count:
        raise ValueError(
            f"deal: count: got {count!r} for {counted(len(graphs), 'graph')}; expected a divisor of the number of graphs, so "
            "that all sub-batches have one shape. Write a batch size that is a multiple of count."
        )
    sizes, levels = np.diff(graphs.vertex_offsets), graphs._facts.levels
    plain, each = dealt(sizes, count), len(graphs) // count
    most = _ROWS * sizes[plain].sum(1).max()
    others = [_by_height(sizes, levels, count, alike) for alike in _ALIKE if each % alike == 0]
    fitting = [plain, *(parts for parts in others if sizes[parts].sum(1).max() <= most)]
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
    more copy of the gradients.

    ```python
    parts = cavs.memory.deal(graphs, 8)                                       # eight sub-batches
    stacks = [batches.tree for batches in cavs.data.Loader(graphs, parts, steps=8, shapes=1)]
    total = cavs.memory.sub_batched(loss)                                     # loss(params, sched) of one sub-batch
    value, grads = jax.jit(jax.value_and_grad(total))(params, stacks)
    ```

    Args:
        loss: `loss(params, batch)`, a scalar: a sum over the graphs of the batch, or computed from `cavs.data.total` and
            `cavs.data.mean` and the parameters. Maxima are of one sub-batch, and would be added up.
        has_aux: whether `loss` returns `(loss, aux)`. The arrays of `aux` are added up, if they do not follow from totals; they
            have no gradient.

    Returns:
        `total(params, stacks)`, where `stacks` is a list of stacked batches, the `tree` of [`cavs.data.Batches`][]: pytrees
        whose arrays have a leading axis of sub-batches. It can be differentiated in reverse mode with respect to `params` and
        the float arrays of `stacks`.

    Raises:
        ValueError: when it is called, if sub-batches differ in their shapes.
        TypeError: when it is called, if `stacks` is not a list, or `loss` does not return a float scalar, adds a sum
            over graphs to a total, or a term of the parameters alone to a sum over graphs, is a mean over one sub-batch, or
            takes totals inside a loop.
    """
    if not callable(loss):
        raise TypeError(f"sub_batched: loss: got {loss!r}; expected a function loss(params, batch). Write sub_batched(loss).")
    return summed_over_parts("sub_batched", loss, has_aux)


def summed_over_parts(function: str, loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Returns what `sub_batched` returns. Errors name `function`."""

    def one(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        value, aux = loss(params, batch) if has_aux else (loss(params, batch), ())
        if not isinstance(value, jax.Array) or value.shape or not is_float(value):
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__
            more = ", and has_aux=True if the loss returns more" * (function == "sub_batched")
            raise TypeError(
                f"{function}: loss: got {got}; expected a float scalar, the sum over the graphs. Write jnp.sum(...){more}."
            )
        return value, aux

    def checked(params: PyTree, stacks: list[PyTree]) -> Any:
        if not isinstance(stacks, list) or not stacks:  # a tuple may be a batch: `(sched, x)`
            raise TypeError(
                f"sub_batched: stacks: got a {type(stacks).__name__}; expected a list of stacked batches. Write [batch] for "
                "each batch of cavs.data.Loader(..., parts=8, steps=1)."
            )
        alike = {(jax.tree.structure(s), *((jnp.shape(x)[1:], jnp.result_type(x)) for x in jax.tree.leaves(s))) for s in stacks}
        if len(alike) > 1:  # the loss is traced once
            raise ValueError(
                f"{function}: stacks: got sub-batches of {len(alike)} shapes; expected equal structures, shapes and dtypes in "
                "all stacks. Write cavs.data.Loader(..., shapes=1)."
            )
        # Inside a `jax.shard_map` that checks types, what the result depends on differs between devices before it is read.
        axes = tuple(sorted(frozenset().union(*map(varying, jax.tree.leaves((params, stacks))))))
        params, found = jax.tree.map(lambda x: vary(jnp.asarray(x), axes), (params, list(stacks)))
        # Arrays that `loss` closes over may be differentiated and batched, too, so they become parameters.
        closed, shapes = jax.make_jaxpr(one, return_shape=True)(params, _first(found))
        without, consts = without_constants(cast(ClosedJaxpr, closed))
        flat, batches = [*consts, *jax.tree.leaves(params)], list(map(jax.tree.leaves, found))
        of_part = parted(function, opened(without)[0], len(flat), sum(len(leaves[0]) for leaves in batches))
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
                found = of_part.before(*with_differentiated((params, batch), by))
                return of_part.weighed(*found, weights), found

            by = differentiated((params, batch), (in_params, in_batch))
            (_, sums), (by_params, by_batch) = jax.value_and_grad(of, has_aux=True)(by)
            return (sums, by_params), by_batch

        (sums, by_params), by_stacks = _summed(value_and_grad, stacks, each=True)
        if of_part.reads_params():
            of_whole = lambda by: of_part.after(with_differentiated(params, by), *sums)[0]  # noqa: E731
            direct = jax.grad(of_whole)(differentiated(params, in_params))
            by_params = jax.tree.map(jnp.add, by_params, direct)
        return of_part.after(params, *sums), (by_params, by_stacks)

    def backward(gradients: PyTree, cts: list[Any]) -> PyTree:
        (scale,) = instantiated(cts[:1])
        return jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)  # `None` where nothing is differentiated

    # Nothing computes cotangents of inputs that nobody asks for.
    return reverse_differentiable(plain, forward, backward, "sub_batched")


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
    total = jax.tree.map(lambda x, of: x.astype(of.dtype), total, like)
    return (total, stacked) if each else total


# --- the loss of one part, cut at its totals ---


@dataclass(eq=False)
class PartedLoss:
    """A loss as equations, cut at its totals. All methods take and return flat arrays."""

    params: list[Var]  # the variables of the parameters
    batch: list[Var]  # the variables of one part of the batch
    before_cut: list[Eqn]  # the equations that do not depend on totals
    after_cut: list[Eqn]  # the others, and those without effects that follow from the parameters alone
    outs: list[Atom]  # the loss, and the other results
    is_whole: list[bool]  # for each result, whether it follows from totals; the others are summed over the parts
    totals: dict[Var, Atom]  # the variables of the totals, and for each what one part adds to it
    parts: int  # the number of parts

    def before(self, params: Arrays, batch: Arrays, which: Sequence[int] | None = None) -> tuple[Arrays, Arrays]:
        """Returns what is summed over the parts: the results that do not follow from totals, and the terms of totals.

        `which`: the totals whose terms alone are computed; `None` for everything.
        """
        terms, outs = list(self.totals.values()), list[Atom]()
        if which is None:
            outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if not is_whole]
        else:
            terms = [terms[i] for i in which]
        eqns = needed(self.before_cut, terms, set())[0]
        if which is None or any(e.effects for e in eqns):
            eqns = alive(self.before_cut, [*outs, *terms])
        found = self._run(eqns, [*self.params, *self.batch], [*params, *batch], [*outs, *terms])
        return found[: len(outs)], found[len(outs) :]

    def after(self, params: Arrays, sums: Arrays, totals: Arrays) -> Arrays:
        """Returns the results for the whole batch, from the sums over all parts."""
        outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if is_whole]
        eqns = alive(self.after_cut, outs, {*self.totals})
        found = iter(self._run(eqns, [*self.params, *self.totals], [*params, *totals], outs))
        summed = iter(sums)
        return [next(found) if is_whole else next(summed) for is_whole in self.is_whole]

    def weights(self, params: Arrays, sums_of: Callable[[Sequence[int]], Arrays]) -> dict[int, jax.Array]:
        """Returns the derivatives of the loss by the totals that are floats; none if it does not follow from totals.

        `sums_of`: computes the totals with these numbers. Called once, if the derivatives depend on totals.
        """
        if not self.is_whole[0]:
            return {}
        totals, shapes = list(self.totals), [v.aval for v in self.totals]
        floats = [i for i, v in enumerate(totals) if is_float(v)]

        def derivatives(given: Arrays) -> Arrays:
            def loss(some: Arrays) -> jax.Array:
                values = dict(enumerate(given)) | dict(zip(floats, some, strict=True))
                return self._run(self._of_loss, [*self.params, *totals], [*params, *values.values()], self.outs[:1])[0]

            return jax.grad(loss)([given[i] for i in floats])

        traced: Any = jax.make_jaxpr(derivatives)(shapes)
        eqns: list[Eqn] = []
        outs = inlined(opened(traced)[0], {}, eqns, _CALLS)
        read = reads(needed(eqns, outs, set())[0], outs)
        which = [i for i, v in enumerate(opened(traced)[0].invars) if v in read]
        known = dict(zip(which, sums_of(which) if which else [], strict=True))
        return dict(zip(floats, derivatives([known.get(i, zeros(x)) for i, x in enumerate(shapes)]), strict=True))

    @promoting
    def weighed(self, sums: Arrays, terms: Arrays, weights: dict[int, jax.Array]) -> jax.Array:
        """Returns the function of one part whose gradients add up to that of the loss."""
        if not self.is_whole[0]:
            return sums[0]
        return sum((weights[i] * terms[i] for i in weights), jnp.zeros((), self.outs[0].aval.dtype))

    def reads_params(self) -> bool:
        """Returns whether the loss depends on parameters other than through totals."""
        return self.is_whole[0] and not reads(self._of_loss, self.outs[:1]).isdisjoint(self.params)

    @property
    def _of_loss(self) -> list[Eqn]:
        """The equations from totals to the loss."""
        return needed(self.after_cut, self.outs[:1], {*self.totals})[0]

    def _run(self, eqns: Sequence[Eqn], names: Sequence[Var], values: Arrays, outs: Sequence[Atom]) -> Arrays:
        env = dict(zip(names, values, strict=True))
        # Other totals are of what is the same in all parts, such as a number of elements.
        run_equations(eqns, env, lambda e, of: [of[0] * self.parts] if _is_total(e) else bind(e, of))
        return [value_of(x, env) for x in outs]


def parted(function: str, jaxpr: Jaxpr, count: int, parts: int) -> PartedLoss:
    """Cuts the loss of one part of a batch: a jaxpr without constants, whose first result is a scalar.

    The first `count` inputs are parameters, the others a part of the batch. Raises a `TypeError`, which names `function`, if
    the loss uses totals where parts cannot be added up.
    """
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, _CALLS, lambda eqn: any(map(_totals_in, bodies_in(eqn))))
    of_part, of_whole = set(jaxpr.invars[count:]), set[Var]()
    totals: dict[Var, Atom] = {}
    before, after = list[Eqn](), list[Eqn]()
    for eqn in eqns:
        if inside := [total for body in bodies_in(eqn) for total in _totals_in(body)]:
            raise TypeError(MSG_INSIDE.format(function=function, name=eqn.primitive.name, where=line_of(inside[0])))
        read = {x for x in eqn.invars if is_var(x)}
        if read & of_whole and (_is_total(eqn) or eqn.effects and read & of_part):
            raise TypeError(MSG_MIXED.format(function=function))
        after += [eqn] if read & of_whole or not eqn.effects else []
        before += [] if read & of_whole else [eqn]
        made = {*eqn.outvars, *(read if eqn.effects else ())}  # it may write to references
        of_whole |= made if read & of_whole or _is_total(eqn) and read & of_part else set()
        if not _is_total(eqn):
            of_part |= made if read & of_part else set()
        elif read & of_part:
            totals[eqn.outvars[0]] = eqn.invars[0]
    if any(x in of_part and x in of_whole for x in outs if is_var(x)):
        raise TypeError(MSG_MIXED.format(function=function))
    is_whole = [is_var(x) and x in of_whole for x in outs]
    if not is_whole[0] and (wrong := _no_sum(jaxpr, count)):
        message, eqn = wrong
        if message is MSG_TERM or function == "sub_batched" and parts > 1:  # `plan` compares the numbers
            raise TypeError(message.format(function=function, where=line_of(eqn)))
    return PartedLoss(jaxpr.invars[:count], jaxpr.invars[count:], before, after, outs, is_whole, totals, parts)


def _no_sum(jaxpr: Jaxpr, count: int) -> tuple[str, Eqn] | None:
    """Returns why the loss of one part is no sum over graphs, a message, and the equation; `None` if nothing was found.

    Such an equation adds a term of the parameters alone, or divides by what the part determines, as a mean does.
    """
    eqns: list[Eqn] = []
    todo = inlined(jaxpr, {}, eqns)[:1]
    of_params, of_part = (depends(eqns, {*given}) for given in (jaxpr.invars[:count], jaxpr.invars[count:]))
    made_by = {v: e for e in eqns for v in e.outvars}
    while todo:
        x = todo.pop()
        eqn = made_by.pop(x, None) if is_var(x) else None  # each equation once
        if eqn is None:
            continue
        read = [x for x in eqn.invars if is_var(x)]
        more, is_sum = [x for x in read if x in of_part], eqn.primitive.name in _SUMS
        if is_sum and any(x in of_params and x not in of_part for x in read):
            return MSG_TERM, eqn
        if eqn.primitive.name == "div" and (len(more) == 2 or _is_mean(eqn, made_by)):
            return MSG_MEAN, eqn
        todo += more if is_sum or eqn.primitive.name in _SCALES and len(more) == 1 else []
    return None


def _is_mean(eqn: Eqn, made_by: dict[Var, Eqn]) -> bool:
    """Returns whether a quotient is a sum of values, divided by their number."""
    x, by = eqn.invars
    made = made_by.get(x) if is_var(x) else None
    if made is None or made.primitive.name != "reduce_sum" or is_var(by):
        return False
    return bool(by.val * eqn.outvars[0].aval.size == made.invars[0].aval.size)


def _is_total(eqn: Eqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == WHOLE_BATCH


def _totals_in(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of a jaxpr that are totals, also inside of its calls and loops."""
    inside = [total for eqn in jaxpr.eqns for body in bodies_in(eqn) for total in _totals_in(body)]
    return [*filter(_is_total, jaxpr.eqns), *inside]
