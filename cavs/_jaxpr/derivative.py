"""A function and its derivative in reverse mode as one program, and the cheapest values that one keeps for the other.

`jax.vjp` keeps what each equation's derivative reads: seven values per leaf of a Tree-LSTM, where three pre-activations are
enough. Here the forward and the VJP are traced into one program, and a minimum cut chooses what is kept (Echo, section IV). The
backward computes the rest again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray

from cavs._jaxpr.costs import bytes_of_var, may_repeat
from cavs._jaxpr.equations import depends, is_float, needed
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Var, is_var, opened
from cavs._jaxpr.minimum_cut import minimum_cut
from cavs._jaxpr.names import Names, chosen, without_names
from cavs._jaxpr.reverse_only import refusal_in
from cavs.kernels import COMPARISONS, computed_once

_NEVER = 1 << 20  # times the size of a value that is not to be kept


@dataclass(frozen=True, eq=False)
class Derivative:
    """A flat function and its VJP, in one program."""

    invars: list[Var]  # the arguments
    outs: list[Atom]  # the results
    seeds: list[Var]  # the cotangents of the results that are floats
    grads: list[Atom]  # the cotangents of the differentiated arguments
    consts: Env  # the arrays over which the function closes
    forward: list[Eqn]  # the equations of the function, and of what its VJP reads
    backward: list[Eqn]  # the equations that lead from `seeds` to `grads`
    needs: list[Var]  # the values of the forward that the backward reads, arguments included
    named: dict[str, set[Var]]  # the values of the forward that the user has named
    refusal: str | None  # why JAX cannot differentiate this again in reverse mode, as with calls of `run`; else `None`


def vjp_at(
    fn: Callable[..., Sequence[Any]], args: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Returns the results of `fn`, and its VJP: from cotangents of float results to cotangents of the arguments at `places`."""

    def of_places(values: list[Any]) -> tuple[list[Any], list[Any]]:
        all_args = list(args)
        for i, x in zip(places, values, strict=True):
            all_args[i] = x
        outs = list(fn(*all_args))
        return [x for x in outs if is_float(x)], outs

    _, pull_back, outs = jax.vjp(of_places, [args[i] for i in places], has_aux=True)
    return outs, jax.tree_util.Partial(_first, pull_back)


def _first(pull_back: Callable[..., Any], cts: Sequence[Any]) -> list[Any]:
    return pull_back(list(cts))[0]


def derivative(
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    places: Sequence[int],
    arguments: Callable[..., Sequence[Any]] = lambda *args: args,
) -> Derivative:
    """Traces a function and its VJP.

    Args:
        fn: takes arrays and returns a flat list of arrays.
        avals: the types of the arguments of the whole.
        places: the arguments of `fn` that are differentiated.
        arguments: maps the arguments of the whole to the arguments of `fn`.
    """
    whole: Any = jax.make_jaxpr(lambda *args: vjp_at(fn, arguments(*args), places), return_shape=True)(*avals)
    first, (out_types, pull_back) = whole
    types, tree = jax.tree.flatten(pull_back)
    cotangents = [type_of(x) for x in out_types if is_float(x)]
    second = jax.make_jaxpr(lambda saved, cts: tree.unflatten(saved)(cts))(list(map(type_of, types)), cotangents)
    (jaxpr, values), (back, back_consts) = opened(first), opened(second)

    forward, atoms, named = without_names(*inlined(jaxpr))
    outs, saved, seeds = atoms[: len(out_types)], atoms[len(out_types) :], back.invars[len(types) :]
    backward, grads, _ = without_names(*inlined(back, rename=dict(zip(back.invars, saved, strict=False))))
    backward, _ = needed(backward, grads)
    consts = dict(zip([*jaxpr.constvars, *back.constvars], [*values, *back_consts], strict=True))
    needs = read_by(backward, grads, {*seeds, *back.constvars, *(v for e in backward for v in e.outvars)})
    refusal = refusal_in(jaxpr) or refusal_in(back)
    return Derivative(jaxpr.invars, outs, seeds, grads, consts, forward, backward, needs, named, refusal)


def read_by(eqns: Sequence[Eqn], results: Sequence[Atom], without: set[Var]) -> list[Var]:
    """Returns what equations and results read, in the order of the equations, except what is in `without`."""
    read = dict.fromkeys([*(x for e in eqns for x in e.invars if is_var(x)), *filter(is_var, results)])
    return [v for v in read if v not in without]


def type_of(x: Any) -> Any:
    """Returns the type of a variable, an abstract value or an array; a `jax.ShapeDtypeStruct` stays one."""
    x = getattr(x, "aval", x)
    return x if isinstance(x, ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)


def cheapest(
    forward: Sequence[Eqn],
    needs: Collection[Var],
    price: Callable[[int], float | None],
    stops: Callable[[Eqn], bool],
    *,
    free: Collection[Var] = (),
    stored: Sequence[Var] = (),
    preferred: Collection[Var] = (),
    names: Names = (),
    named: Mapping[str, Collection[Var]] | None = None,
    size: Callable[[Var], float] = bytes_of_var,
    comparisons: bool = True,
) -> list[Var]:
    """Returns the cheapest values to keep from which the backward follows, with what the user asks for by name.

    Args:
        price: from the index of an equation to the price in bytes of running it again; `None`: never.
        stops: whether an equation is one of those that a user's "recompute" runs again, whatever its price.
        free: values that the backward has in any case.
        stored: inputs that cost their size if they are kept.
        preferred: values that are kept if the backward needs them.
        names: what the user asks for by name.
        named: the values that the user has named.
        size: the bytes of a value if it is kept.
        comparisons: whether results of `compared` are kept.
    """
    named, kept = named or {}, set(preferred)
    kept |= chosen(named, names, "keep") | chosen(named, names, "offload")
    never = chosen(named, names, "recompute")
    stopped = {v for e in forward if stops(e) for v in e.outvars} if never else set[Var]()
    again, once = set(needed(forward, [*never], stopped)[1]), set[Var]()

    def price_of(i: int) -> float | None:
        if not once.isdisjoint(forward[i].outvars):
            return None
        return 0.0 if not again.isdisjoint(forward[i].outvars) and may_repeat(forward[i]) else price(i)

    while True:
        cost = lambda v: size(v) * (_NEVER if v in never else 1)  # noqa: E731
        cut = minimum_cut(forward, needs, price_of, {*free, *kept}, stored, cost)
        available = {*cut, *free, *kept}
        more = compared(forward, needs, available) - once if comparisons else set()
        if not more:
            break
        once |= more
    read = needed(forward, list(needs), available)[1]
    return [*cut, *(v for v in dict.fromkeys(read) if v in kept and v not in free and v not in cut)]


def compared(eqns: Sequence[Eqn], wanted: Iterable[Var], available: set[Var]) -> set[Var]:
    """Returns the results of comparisons that must not run again, because they compare a kept value with one computed again.

    The gradient of a maximum goes where an operand equals it. If the maximum is kept and its operand computed again, they may
    differ in the last bit: a sum on a GPU runs in another order, or the compiler rounds differently among other equations. Then
    the gradient would go nowhere.

    `available`: what the backward has, before it computes anything again.
    """
    comparisons: set[Var] = set()
    related = computed_once(eqns)
    for eqn in needed(eqns, list(wanted), available)[0]:
        if eqn.primitive.name in COMPARISONS and is_float(eqn.invars[0].aval):
            if eqn.primitive.name not in ("eq", "ne") and related.isdisjoint(filter(is_var, eqn.invars)):
                continue  # a limit such as in `relu`: near it, either result is right
            before, kept = needed(eqns, eqn.invars, available)
            if set(kept) & depends(eqns, {v for e in before for v in e.outvars}):
                comparisons.add(eqn.outvars[0])
    return comparisons
