"""The edges of `run`: rows of the user, one per edge, which `gather_all(..., edges=True)` reads."""

import jax

from cavs._function.evaluate import pad_rows
from cavs._function.plan import FunctionPlan
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule


def padded_edges(edges: PyTree, sched: Schedule) -> PyTree:
    """Returns the edges of `run` with their leaves padded to (Ep, ...).

    Raises:
        ValueError: a leaf has another number of rows.
    """
    shapes = [x.shape for x in jax.tree.leaves(edges)]
    if not shapes:
        return edges
    padded, exact = sched.shape.all_edges, int(sched.num_edges) if sched.is_concrete else None
    lengths = {shape[0] if shape else None for shape in shapes}
    if not lengths <= {padded, exact} or len(lengths) > 1 or None in lengths:
        expected = f"{padded} (padded)" if exact is None else f"{exact} (one row per edge) or {padded} (padded)"
        raise ValueError(
            f"run: edges: got leaves of shapes {shapes}; expected a first axis of {expected}. The rows have the order of "
            "Graphs.children. Under jax.jit, write sched.pad_edges(rows) on the host before the call."
        )
    return jax.tree.map(lambda x: pad_rows(x, padded), edges) if lengths != {padded} else edges


def check_read(edges: PyTree, plan: FunctionPlan) -> None:
    """Raises `ValueError` if F does not read the edges that it is given."""
    if edges is not None and not plan.reads_edges:
        raise ValueError(
            "run: edges: got edges, which F does not read; expected None. Write v.gather_all(lambda state, edge: ..., "
            "edges=True) in F, or omit edges."
        )
