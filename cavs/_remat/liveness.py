"""The memory of a derivative, estimated from its equations: this orders plans before they are compiled.

XLA fuses cheap equations with what reads them, so most values never exist in memory. A value has a buffer if a product, a loop,
a sum or a scatter makes or reads it. It is free after the last equation that reads it, directly or through fused equations.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cavs._jaxpr.costs import CUMULATIVE, REDUCTIONS, bytes_of_var, is_costly
from cavs._jaxpr.equations import renamed
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import CALLS, Atom, Eqn, Jaxpr, Var, bodies_in, is_var, scan_parts
from cavs._remat.graph import Kept

_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "copy"}
_SUMS = REDUCTIONS | CUMULATIVE
_COPIES = {"device_put"}  # between device and host
_UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"}
_INLINED = (*CALLS, "checkpoint", "remat2", "core_call", "platform_dependent")
_KERNELS = {"mpmd_map", "pallas_call", "core_map"}  # what is inside lies on the chip


def estimated_peak(kept: Kept) -> int:
    """Returns the bytes of temporary memory of the forward and the backward of a function, inputs and results aside."""
    graph = kept.graph
    inputs = {*graph.invars, *graph.consts}
    order = kept.to_run()
    names: dict[Var, Var] = {}  # of what runs again
    for step in kept.steps:
        for e in step.again:
            names |= {v: Var(v.aval) for v in e.outvars}
            order.append(renamed(e, names))
        order += [renamed(e, names) for e in step.stretch]
    outs = [*graph.outs, *graph.grads]
    return _peak(order, outs, {v for v in kept.variables if v not in inputs}, {x for x in outs if is_var(x)})


def _peak(eqns: Sequence[Eqn], outs: Iterable[Atom], kept: Collection[Var] = (), results: Collection[Var] = ()) -> int:
    """Returns the most bytes of buffers that are alive at the same time, if equations run in this order.

    `outs`: what is read after the last equation. `kept`: values that have a buffer even if they could be fused. `results`:
    values whose buffers belong to somebody else. So do those of inputs.
    """
    stored = _stored(eqns) | {*kept, *results}
    sources: dict[Var, frozenset[Var]] = {}  # for each value, the buffers from which it is computed
    last_use: dict[Var, int] = {}
    for i, e in enumerate(eqns):
        read = frozenset[Var]().union(*(sources.get(x, ()) for x in e.invars if is_var(x)))
        if stored.isdisjoint(e.outvars):
            sources |= dict.fromkeys(e.outvars, read)
        else:
            sources |= {v: frozenset([v]) for v in e.outvars}
            last_use |= dict.fromkeys(read, i) | dict.fromkeys(e.outvars, i)
    last_use |= {s: len(eqns) for x in outs if is_var(x) for s in sources.get(x, ())}
    ends: dict[int, list[Var]] = {}
    for x, i in last_use.items():
        ends.setdefault(i, []).append(x)

    def size(values: Iterable[Var]) -> int:
        return sum(bytes_of_var(v) for v in values if v not in results)

    alive = peak = 0
    for i, e in enumerate(eqns):
        new, dying = [v for v in e.outvars if v in last_use], [x for x in ends.get(i, ()) if x not in e.outvars]
        shared = size(_overwritten(e, dying, sources))
        peak = max(peak, alive + max(size(new) - shared, 0) + _inside(e))
        alive += size(new) - size(ends.get(i, ()))
    return peak


def _stored(eqns: Sequence[Eqn]) -> set[Var]:
    """Returns the values that have a buffer."""
    views = {e.outvars[0]: e.invars[0] for e in eqns if e.primitive.name in _VIEWS}
    stored: set[Var] = set()
    for e in filter(_is_alone, eqns):
        stored.update(e.outvars)
        for x in e.invars[:1] if e.primitive.name in _UPDATES else () if e.primitive.name in _SUMS else e.invars:
            while is_var(x) and x in views:
                x = views[x]
            stored.update([x] if is_var(x) else ())
    return stored


def _is_alone(e: Eqn) -> bool:
    """Returns whether an equation is not fused with others."""
    return e.primitive.name in _SUMS | _UPDATES | _COPIES or is_costly(e) or bool(bodies_in(e))


def _overwritten(e: Eqn, dying: Collection[Var], sources: Mapping[Var, frozenset[Var]]) -> set[Var]:
    """Returns the buffers that an equation overwrites with its results: updates, loops and elementwise equations can."""
    name = e.primitive.name
    operands: Any = e.invars
    if name == "scan":
        operands = scan_parts(e.params, operands)[1]
    elif name == "while":
        operands = operands[e.params["cond_nconsts"] + e.params["body_nconsts"] :]
    elif _is_alone(e):
        operands = operands[:1] if name in _UPDATES else []
    sizes = {bytes_of_var(v) for v in e.outvars}
    return {s for x in operands if is_var(x) for s in sources.get(x, ()) if s in dying and bytes_of_var(s) in sizes}


def _inside(e: Eqn) -> int:
    """Returns the bytes of one step of a loop, or of a branch."""
    return 0 if e.primitive.name in _KERNELS else max(map(_of_body, bodies_in(e)), default=0)


@functools.lru_cache(1 << 10)
def _of_body(body: Jaxpr) -> int:
    return _peak(*inlined(body, _INLINED))
