"""The memory of a derivative, predicted from its equations: what is alive while they run one after the other."""

from typing import Any

from jax.extend import core as jex

from cavs._function.equations import needed
from cavs._function.jaxprs import Atom, Eqn, Var, is_var
from cavs._memory.buffers import peak_of_eqns
from cavs._memory.graph import Kept


def peak(kept: Kept) -> int:
    """Returns the bytes of temporary memory of the forward and the backward of a function, inputs and results aside.

    Kept values have buffers of their own, even if XLA could fuse them into what reads them.
    """
    graph = kept.graph
    have = set(graph.invars) | set(graph.consts)
    forward, _ = needed(graph.eqns, [*graph.outs, *kept.keep], have)
    order = forward + _backward(kept)
    results = {x for x in (*graph.outs, *graph.grads) if is_var(x)}
    return peak_of_eqns(order, [*graph.outs, *graph.grads], results, kept={v for v in kept.keep if v not in have}).bytes


def _backward(kept: Kept) -> list[Eqn]:
    """The backward in the order in which it runs, each stretch after what it computes again, in the forward's variables."""
    graph = kept.graph
    have = set(kept.keep) | set(kept.free) | set(graph.consts)
    rename: dict[Var, Any] = dict(graph.reads)
    copies: dict[Var, Any] = {}
    order: list[Eqn] = []
    for stretch in kept.stretches():
        missing = [graph.reads[x] for e in stretch for x in e.invars if is_var(x) and x in graph.reads]
        again, _ = needed(graph.eqns, [x for x in missing if is_var(x) and x not in have], have)
        for e in again:
            copies |= {v: jex.Var(v.aval) for v in e.outvars}
            order.append(e.replace(invars=[_at(x, copies) for x in e.invars], outvars=[copies[v] for v in e.outvars]))
        have |= {v for e in again for v in e.outvars}
        order += [e.replace(invars=[_at(_at(x, rename), copies) for x in e.invars]) for e in stretch]
    return order


def _at(x: Atom, rename: dict[Var, Any]) -> Any:
    return rename.get(x, x) if is_var(x) else x
