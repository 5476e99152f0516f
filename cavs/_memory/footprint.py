"""The memory of a derivative, predicted from its equations: what is alive while they run one after the other."""

from collections.abc import Sequence
from typing import cast

from jax.extend import core as jex

from cavs._function.jaxprs import Atom, Var, is_var
from cavs._memory.buffers import peak_of_operations
from cavs._memory.graph import Graph, Kept
from cavs._memory.operations import Operation


def peak(kept: Kept) -> int:
    """Returns the bytes of temporary memory of the forward and the backward of a function, inputs and results aside.

    Kept values have buffers of their own, even if XLA could fuse them into what reads them.
    """
    graph = kept.graph
    have = set(graph.invars) | set(graph.consts)
    makers = {v: i for i, o in enumerate(graph.operations) for v in o.outvars}
    order = [graph.operations[i] for i in _behind(graph, [*graph.outs, *kept.keep], have, makers)]
    order += _backward(kept, makers)
    results = {x for x in (*graph.outs, *graph.grads) if is_var(x)}
    return peak_of_operations(order, [*graph.outs, *graph.grads], results, {v for v in kept.keep if v not in have}).bytes


def _backward(kept: Kept, makers: dict[Var, int]) -> list[Operation]:
    """The backward in the order in which it runs, each stretch after what it computes again, in the forward's variables."""
    graph = kept.graph
    have = set(kept.keep) | set(kept.free) | set(graph.consts)
    copies: dict[Var, Atom] = {}
    order: list[Operation] = []
    for stretch in graph.stretches:
        again = _behind(graph, [x for o in stretch for x in o.reads if x in makers], have, makers)
        for o in (graph.operations[i] for i in again):
            results = [cast(Var, jex.Var(v.aval)) for v in o.outvars]
            copies |= dict(zip(o.outvars, results, strict=True))
            order.append(o.renamed(copies, results))
            have.update(o.outvars)
        order += [o.renamed(copies) for o in stretch]
    return order


def _behind(graph: Graph, values: Sequence[Atom], have: set[Var], makers: dict[Var, int]) -> list[int]:
    """The numbers of the operations of the forward that compute values from those in `have`."""
    found: set[int] = set()
    todo = [x for x in values if is_var(x)]
    while todo:
        x = todo.pop()
        if x not in have and makers[x] not in found:
            found.add(makers[x])
            todo += graph.operations[makers[x]].reads
    return sorted(found)
