"""A plan of a function as JSON: for each graph, the results of equations that it keeps."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from cavs._jaxpr.jaxprs import Eqn, Var, bodies_in
from cavs._remat.graph import Graph, Kept


def as_json(kept: Mapping[str, Kept], chunks: Mapping[str, int]) -> dict[str, Any]:
    """Returns what each graph keeps, and the chunks of loops, as JSON can hold it."""
    regions = {name: {"graph": mark(own.graph.forward), "keep": _places(own)} for name, own in kept.items()}
    return {"regions": regions, "chunks": dict(chunks)}


def kept_as_saved(graph: Graph, name: str, saved: dict[str, Any]) -> Kept:
    """Returns what a saved plan keeps of a graph.

    Raises:
        ValueError: the plan is that of another function, or of other shapes.
    """
    found = saved["regions"].get(name)
    if found is None or found["graph"] != mark(graph.forward):
        raise ValueError(
            "recompute: plan: got the plan of another function, or of arguments of other shapes; expected one that "
            "recompute(fn).plan(...).save(path) wrote for these. Write recompute(fn) to plan again."
        )
    return graph.keeping(tuple(graph.invars[j] if i < 0 else graph.forward[i].outvars[j] for i, j in found["keep"]))


def _places(kept: Kept) -> list[tuple[int, int]]:
    """Returns the equation and the number of each kept value; of inputs -1 and their number."""
    graph = kept.graph
    places: dict[Var, tuple[int, int]] = {v: (-1, j) for j, v in enumerate(graph.invars)}
    places |= {v: (i, j) for i, e in enumerate(graph.forward) for j, v in enumerate(e.outvars)}
    return [places[v] for v in kept.keep]


def mark(eqns: Sequence[Eqn]) -> str:
    """Returns a hash of equations and their types, also of those in loops and calls."""
    text = ";".join(
        f"{e.primitive.name}:{','.join(v.aval.str_short() for v in e.outvars)}:{','.join(mark(b.eqns) for b in bodies_in(e))}"
        for e in eqns
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
