"""Where a function can be cut into blocks, each of which the backward runs again from the few values that enter it.

By hand, one would put `jax.checkpoint` around such blocks. With N blocks, the backward needs the values between the blocks, and
those inside of one block at a time. The fewer values cross a cut, the better.
"""

from cavs._jaxpr.jaxprs import Var, is_var
from cavs._remat.graph import Graph
from cavs._remat.masks import kept_bytes

_BLOCKS = (2, 4, 8, 16, 32)  # about these numbers of blocks are tried


def fixed_values(graph: Graph) -> list[frozenset[Var]]:
    """Returns sets of values to keep, each of which cuts the function into more blocks than the one before."""
    crossing, inside = _crossing(graph), _inside(graph)
    found = (_cut(crossing, inside, sum(inside) / n) for n in _BLOCKS)
    return [values for values in dict.fromkeys(found) if values]


def _crossing(graph: Graph) -> list[frozenset[Var]]:
    """Returns for each equation the values that it or an earlier one makes and that a later one reads."""
    last = {x: i for i, e in enumerate(graph.forward) for x in e.invars if is_var(x)}
    last.update(dict.fromkeys((x for x in graph.outs if is_var(x)), len(graph.forward)))
    made = _depend(graph)
    alive: set[Var] = set()
    found = []
    for i, e in enumerate(graph.forward):
        alive = {v for v in alive if last[v] > i} | {v for v in e.outvars if last.get(v, -1) > i and v in made}
        found.append(frozenset(alive))
    return found


def _depend(graph: Graph) -> set[Var]:
    """Returns the values that depend on a costly equation: not, say, a transposed weight, which depends on an input alone."""
    costly = {v for i in graph.costly for v in graph.forward[i].outvars}
    found: set[Var] = set()
    for e in graph.forward:
        if any(v in costly for v in e.outvars) or any(x in found for x in e.invars if is_var(x)):
            found.update(e.outvars)
    return found


def _inside(graph: Graph) -> list[int]:
    """Returns for each equation the bytes of what the backward reads of its results."""
    needs = set(graph.needs)
    return [sum(kept_bytes(v) for v in e.outvars if v in needs) for e in graph.forward]


def _cut(crossing: list[frozenset[Var]], inside: list[int], most: float) -> frozenset[Var]:
    """Returns the values that cross cuts, such that about `most` bytes are inside of each block."""
    kept: set[Var] = set()
    start = 0
    while start < len(inside):
        end, size = start, 0
        while end < len(inside) and size <= most:
            size += inside[end]
            end += 1
        if end == len(inside):
            break
        at = min(range(start, end), key=lambda i: (sum(kept_bytes(v) for v in crossing[i] if v not in kept), -i))
        kept |= crossing[at]
        start = at + 1
    return frozenset(kept)
