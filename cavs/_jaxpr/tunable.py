"""Calls whose options can be changed after they are traced, as a memory plan does with the calls of `run` in a loss.

The options are a value in the equation of the call, so nothing decides them but the jaxpr. A call that is differentiated inside
the traced function is not a call any more: it keeps the options that it had. So do calls inside of a `jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import ClosedJaxpr, Eqn, Jaxpr, bodies_in, opened
from cavs._jaxpr.ruled import Arrays, Flat, Rules, as_call, call, pushed, retraced, ruled_p, rules_in, types_of

CallOf = Callable[[Any], tuple[Callable[..., PyTree], str]]  # from options to a function, and the engine that runs it


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TunableRules(Rules):
    """The rules of a call with options."""

    names: frozenset[str]  # the values that can be kept by name
    engine: str  # the name of the engine that runs, if it is known
    with_options: Callable[[Any], "TunableRules"]  # returns the rules with other options


def tunable(call_of: CallOf, options: Any, names: Collection[str] = ()) -> Callable[..., PyTree]:
    """Returns the function `call_of(options)` of pytrees of arrays, as one call that `with_options` can change."""

    def flattened(flat: Callable[[Callable[..., PyTree]], Flat]) -> TunableRules:
        def rules(options: Any) -> TunableRules:
            fn, engine = call_of(options)
            return _rules(flat(fn), engine, frozenset(names), rules)

        return rules(options)

    return as_call(flattened)


def _rules(run: Flat, engine: str, names: frozenset[str], with_options: Callable[[Any], TunableRules]) -> TunableRules:
    def batch(over: Callable[..., Flat], dims: list[int | None], operands: Arrays) -> Arrays:
        def batched(run: Flat, engine: str) -> TunableRules:
            return _rules(over(run, tuple(dims)), engine, names, again)

        def again(options: Any) -> TunableRules:
            rules = with_options(options)
            return batched(rules.run, rules.engine)

        return call(batched(run, engine), *operands)

    return TunableRules(run, functools.partial(pushed, run), batch, names=names, engine=engine, with_options=with_options)


def tuned(
    fn: Callable[..., PyTree], options: Any, look: Callable[[list[TunableRules]], None] = lambda calls: None
) -> Callable[..., PyTree]:
    """Returns a function of pytrees of arrays, whose tunable calls have these options. `look` is given the calls."""

    def run(*args: PyTree) -> PyTree:
        args = jax.tree.map(jnp.asarray, args)  # the schedule of a plan is of NumPy
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        closed = with_options(cast(ClosedJaxpr, closed), options)
        look(list(rules_in(opened(closed)[0], TunableRules)))
        return jax.tree.unflatten(jax.tree.structure(shapes), jex.jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return run


def with_options(jaxpr: Jaxpr | ClosedJaxpr, options: Any) -> Any:
    """Returns a jaxpr whose tunable calls, also those in loops and the like, have these options."""
    inside, consts = opened(jaxpr)
    eqns = [_changed(e, options) for e in inside.eqns]
    if all(a is b for a, b in zip(eqns, inside.eqns, strict=True)):
        return jaxpr
    effects = frozenset().union(inside.effects, *(e.effects for e in eqns))
    inside = inside.replace(eqns=eqns, effects=effects)
    return jex.ClosedJaxpr(inside, consts) if hasattr(jaxpr, "consts") else inside


def _changed(eqn: Eqn, options: Any) -> Eqn:
    if eqn.primitive is ruled_p:
        rules = eqn.params["rules"]
        if not isinstance(rules, TunableRules):
            return eqn  # its derivative is not in the jaxpr
        rules, avals = rules.with_options(options), [x.aval for x in eqn.invars]
        traced = retraced(rules, avals)
        effects = types_of(*avals, call=traced, rules=rules)[1]
        return eqn.replace(params={"call": traced, "rules": rules}, effects=frozenset(effects))
    if eqn.primitive.name == "shard_map":
        return eqn  # its body cannot be traced outside of its mesh
    params = {name: _changed_parameter(x, options) for name, x in eqn.params.items()}
    if all(x is eqn.params[name] for name, x in params.items()):
        return eqn
    changed = eqn.replace(params=params)
    return changed.replace(effects=frozenset().union(eqn.effects, *(body.effects for body in bodies_in(changed))))


def _changed_parameter(x: Any, options: Any) -> Any:
    if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr):
        return with_options(cast(Jaxpr, x), options)
    if isinstance(x, tuple) and x and all(isinstance(y, jex.ClosedJaxpr | jex.Jaxpr) for y in x):
        changed = tuple(_changed_parameter(y, options) for y in x)
        return x if all(a is b for a, b in zip(x, changed, strict=True)) else changed
    return x
