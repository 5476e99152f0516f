"""The derivative of a loop: a loop whose steps keep the values of a plan, and one in the other direction that reads them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex

from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Eqn, Var, is_var, opened, scan_parts
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.mesh_types import zeros
from cavs._remat.graph import Flat, Keep, Kept, planned


class TracedLoop(NamedTuple):
    """A `lax.scan`, whose `body` takes a number of constants, a number of values that it carries, and a row of each xs."""

    body: Any
    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: int

    @classmethod
    def of(cls, eqn: Eqn) -> "TracedLoop":
        consts, carry, _ = scan_parts(eqn.params, cast(Any, eqn.invars))
        length, reverse, unroll = (eqn.params[name] for name in ("length", "reverse", "unroll"))
        return cls(eqn.params["jaxpr"], len(consts), len(carry), length, reverse, unroll)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits what belongs to the operands into that of the constants, the carry and xs."""
        first, last = self.consts, self.consts + self.carry
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])

    def scan(
        self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, backwards: bool = False
    ) -> tuple[Any, Any]:
        return lax.scan(step, carry, xs, length=self.length, reverse=self.reverse != backwards, unroll=self.unroll)

    def run(self, step: Flat, operands: Sequence[Any]) -> list[Any]:
        """Runs the loop with `step`, a function like its body."""
        consts, carry, xs = self.split(operands)

        def one(state: Any, x: Any) -> tuple[Any, Any]:
            outs = step(*consts, *state, *x)
            return outs[: self.carry], outs[self.carry :]

        carry, ys = self.scan(one, carry, xs)
        return [*carry, *ys]

    def dependent(self, given: Sequence[int]) -> list[int]:
        """Returns the inputs of the body that are, or depend on, the inputs `given`, as far as derivatives go."""
        body, _ = opened(self.body)
        found = {body.invars[i] for i in given}
        size = -1
        while size != len(found):
            size = len(found)
            add_dependent(body.eqns, found)
            found.update(v for v, x in zip(self.split(body.invars)[1], body.outvars, strict=False) if is_var(x) and x in found)
        return [i for i, v in enumerate(body.invars) if v in found]


def add_dependent(eqns: Sequence[Eqn], found: set[Var]) -> None:
    """Adds the values that depend on those found, and the references into which an equation may write them."""
    for e in eqns:
        if e.primitive.name != "stop_gradient" and any(is_var(x) and x in found for x in e.invars):
            found.update(v for v in e.outvars if is_float(v))
            found.update(x for x in e.invars if e.effects and is_var(x))


def loop_with_derivative(loop: TracedLoop, keep: Keep) -> Flat:
    """Returns the flat function of a loop. `keep` chooses what a step keeps if these inputs of the body are differentiated."""

    def plain(*operands: Any) -> list[Any]:
        return loop.run(jex.jaxpr_as_fun(loop.body), operands)

    bare = loop._replace(body=None)  # the body is that of the graph

    def forward(kept: Kept, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs, count = _forward(kept, bare, tuple(map(type_of, operands)))(*operands), len(kept.graph.outs)
        return outs[:count], [*(operands[i] for i in _free(kept)), *outs[count:]]

    def backward(kept: Kept, values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        into = {i: x for i, x in zip(kept.graph.float_outs, cotangents, strict=True) if not isinstance(x, SymbolicZero)}
        given = [*values, *into.values()]
        return _backward(kept, bare, tuple(into), tuple(map(type_of, given)))(*given)

    return planned(plain, lambda given: keep(loop.dependent(given)), forward, backward)


def _free(kept: Kept) -> list[int]:
    """Returns the operands that the backward reads as they are."""
    return [kept.graph.invars.index(v) for v in kept.free]


@memoized
def _forward(kept: Kept, loop: TracedLoop, avals: tuple[Any, ...]) -> Flat:
    """Returns a function of the loop's operands, which returns its results, and the rows of all steps of each kept value.

    It is traced, because a search for plans runs the same loops in many traces.
    """

    def step(*args: Any) -> list[Any]:
        outs, values = kept.run_forward(args, late=False)
        return [*outs, *values[len(kept.free) :]]

    return jex.jaxpr_as_fun(jax.make_jaxpr(lambda *operands: loop.run(step, operands))(*avals))


@memoized
def _backward(kept: Kept, loop: TracedLoop, places: tuple[int, ...], avals: tuple[Any, ...]) -> Flat:
    """Returns a function that computes the cotangents of operands, traced like `_forward`."""
    return jex.jaxpr_as_fun(jax.make_jaxpr(lambda *args: _run_backward(kept, loop, places, args))(*avals))


def _run_backward(kept: Kept, loop: TracedLoop, places: Sequence[int], args: Sequence[Any]) -> list[Any]:
    """Runs the loop that computes the cotangents of operands, from the values for the backward and the cotangents of `places`.

    It carries the cotangents of the constants, which are sums over the steps, and those of the carry.
    """
    graph, rest = kept.graph, iter(args)
    numbers = range(len(graph.invars))
    consts, carry, xs = ([i for i in part if i in graph.diff] for part in loop.split(numbers))
    free, stacks = {i: next(rest) for i in _free(kept)}, [next(rest) for _ in kept.keep]
    into = dict(zip(places, rest, strict=True))
    rows = {i: x for i, x in free.items() if i in loop.split(numbers)[2]}
    ys = {i: x for i, x in into.items() if i >= loop.carry}

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        (sums, after), (row, values, cotangents) = state, x
        cotangents = cotangents | {i - loop.consts: g for i, g in zip(carry, after, strict=True)}
        values = [*(free | row).values(), *values]
        found = kept.pull_back(values, [cotangents.get(i, zeros(graph.outs[i])) for i in graph.float_outs], late=False)
        grads = dict(zip(graph.diff, found, strict=True))
        sums = [lax.add(total, grads[i]) for i, total in zip(consts, sums, strict=True)]
        return (sums, [grads[i] for i in carry]), [grads[i] for i in xs]

    first = [into.get(i - loop.consts, zeros(graph.invars[i])) for i in carry]
    state = [zeros(graph.invars[i]) for i in consts], first
    (sums, before), found = loop.scan(step, state, (rows, stacks, ys), backwards=True)
    grads = dict(zip([*consts, *carry, *xs], [*sums, *before, *found], strict=True))
    return [grads[i] for i in graph.diff]
