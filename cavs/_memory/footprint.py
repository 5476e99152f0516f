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
    makers = {v: i for i, e in enumerate(graph.eqns) for v in e.outvars}
    for stretch in kept.stretches():
        missing = [graph.reads[x] for e in stretch for x in e.invars if is_var(x) and x in graph.reads]
        again = [graph.eqns[i] for i in _behind(graph.eqns, missing, have, makers)]
        for e in again:
            copies |= {v: jex.Var(v.aval) for v in e.outvars}
            order.append(e.replace(invars=[_at(x, copies) for x in e.invars], outvars=[copies[v] for v in e.outvars]))
        have |= {v for e in again for v in e.outvars}
        order += [e.replace(invars=[_at(_at(x, rename), copies) for x in e.invars]) for e in stretch]
    return order


def _behind(eqns: list[Eqn], values: list[Atom], have: set[Var], makers: dict[Var, int]) -> list[int]:
    """The numbers of the equations that compute values from those in `have`: `needed`, if it is few of very many equations."""
    found: set[int] = set()
    todo = [x for x in values if is_var(x)]
    while todo:
        x = todo.pop()
        if x not in have and makers[x] not in found:
            found.add(makers[x])
            todo += [y for y in eqns[makers[x]].invars if is_var(y)]
    return sorted(found)


def _at(x: Atom, rename: dict[Var, Any]) -> Any:
    return rename.get(x, x) if is_var(x) else x
