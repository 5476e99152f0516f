"""What the backward keeps of the forward: a minimum cut, each variable counted once however many read it (as in Echo's
footprint accounting)."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs._function.domains import EDGE, STATIC, Domains
from cavs._function.jaxprs import is_var

# Not run a second time in the backward: what costs more than storing its result.
_COSTLY = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call", "sort", "reduce_children_max"}
# An edge value stands for this many of its kind per vertex when bytes are counted.
_EDGES_PER_ROW = 2


def minimum_cut(eqns: Sequence[Any], sinks: set[Any], free: set[Any], level: Domains) -> list[Any]:
    """The cheapest variables to store so that all `sinks` follow from them and from `free` without running a product twice.

    A maximum flow (Edmonds and Karp, 1972) from the results of costly equations to the sinks; a variable's capacity is its
    bytes per vertex. Of the minimum cuts, the one nearest the sinks: the same bytes, the least to run again.
    """
    made = {v: e for e in eqns for v in e.outvars if level.get(v, STATIC) != STATIC and v not in free}
    source, sink = "source", "sink"
    capacity: dict[Any, dict[Any, float]] = {}

    def edge(a: Any, b: Any, c: float) -> None:
        capacity.setdefault(a, {})[b] = capacity.get(a, {}).get(b, 0.0) + c
        capacity.setdefault(b, {}).setdefault(a, 0.0)

    for v, e in made.items():
        edge(("in", v), ("out", v), _bytes_a_vertex(v, level))
        if e.primitive.name in _COSTLY:
            edge(source, ("in", v), float("inf"))
        for x in e.invars:
            if is_var(x) and x in made:
                edge(("out", x), ("in", v), float("inf"))
    for v in sinks:
        if v in made:
            edge(("out", v), sink, float("inf"))

    def search(start: Any, forward: bool) -> dict[Any, Any]:
        """Breadth-first: what `start` reaches along edges with room (or is reached from), with where it came from."""
        seen = {start: None}
        queue = deque([start])
        while queue:
            a = queue.popleft()
            for b in capacity.get(a, {}):
                room = capacity[a][b] if forward else capacity[b][a]
                if room > 0 and b not in seen:
                    seen[b] = a
                    queue.append(b)
        return seen

    while sink in (seen := search(source, True)):
        path, b = [], sink
        while seen[b] is not None:
            path.append((seen[b], b))
            b = seen[b]
        amount = min(capacity[a][b] for a, b in path)
        assert amount < float("inf"), "a product's result is not storable"
        for a, b in path:
            capacity[a][b] -= amount
            capacity[b][a] += amount
    reaches_sink = search(sink, False)
    return [v for v in made if ("out", v) in reaches_sink and ("in", v) not in reaches_sink]


def _bytes_a_vertex(v: Any, level: Domains) -> float:
    itemsize = getattr(v.aval.dtype, "itemsize", 4)  # keys of `jax.random` have none
    return float(np.prod(v.aval.shape, dtype=float) * itemsize * (_EDGES_PER_ROW if level.get(v) == EDGE else 1))
