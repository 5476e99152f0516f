"""`readout`: one value per graph from one per vertex."""

from typing import Any

import jax
import jax.numpy as jnp

from cavs._schedule.schedule import Schedule

READOUTS = ("sum", "mean", "max", "softmax")


def readout(values: Any, sched: Schedule, reduce: str = "sum", *, score: Any = None) -> Any:
    """Sum, mean, maximum or attention over the vertices of each graph (the readouts of Gilmer et al., 2017, section 2;
    attention as in Li et al., 2016, equation 7, with a softmax over the graph).

    Plain JAX: composes with `jit`, `grad`, `vmap`. All vertices are `cavs.run(...)` itself, roots `h[sched.roots]`.

    **Arguments:**

    - `values`: pytree of arrays with one row per vertex, as `cavs.run` returns: (V, ...), or padded (Vp, ...). What stands
      in padding is not read.
    - `sched`: from `cavs.schedule`.
    - `reduce`: `"sum"`, `"mean"`, `"max"`, or `"softmax"`: the sum of the values weighted by the softmax of `score`
      over the vertices of each graph.
    - `score`: (V,) or (Vp,) floats, for `"softmax"` alone.

    **Returns:** the pytree with leaves (G, ...), in the order of the graphs.

    **Raises:** `TypeError` or `ValueError` for arguments that do not fit each other.
    """
    if not isinstance(sched, Schedule):
        raise TypeError(f"readout: sched is a {type(sched).__name__}, wanted a cavs.Schedule. Write cavs.schedule(graphs).")
    if reduce not in READOUTS:
        raise ValueError(f"readout: reduce is {reduce!r}, wanted one of {', '.join(map(repr, READOUTS))}.")
    if (score is not None) != (reduce == "softmax"):
        has = "a score" if score is not None else "no score"
        raise ValueError(f'readout: reduce is {reduce!r} with {has}; wanted readout(values, sched, "softmax", score=...).')
    padded, graphs = sched.shape.vertices, sched.shape.graphs
    allowed = {padded, int(sched.host().num_vertices)} if sched.is_concrete else {padded}
    values = jax.tree.map(jnp.asarray, values)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(values)] + ([] if score is None else [jnp.shape(score)])
    rows = {s[0] if s else None for s in shapes}
    if len(rows) > 1 or not rows <= allowed or (score is not None and len(shapes[-1]) != 1):
        raise ValueError(
            f"readout: values (and score) have leaves of shapes {shapes}, wanted a first axis of "
            f"{' or '.join(map(str, sorted(allowed)))}: one row per vertex, as cavs.run returns without select; "
            "a score is 1-d."
        )
    if not rows:
        return values
    graph = jnp.asarray(sched.graph)[: rows.pop()]

    def total(x: Any) -> Any:  # padding is of graph G, which is dropped
        return jax.ops.segment_sum(x, graph, graphs, indices_are_sorted=True)

    def top(x: Any) -> Any:
        return jax.ops.segment_max(x, graph, graphs, indices_are_sorted=True)

    def per_graph(x: Any, like: Any) -> Any:
        return x.reshape(-1, *(1,) * (like.ndim - 1))

    if reduce == "max":
        return jax.tree.map(top, values)
    if reduce == "sum":
        return jax.tree.map(total, values)
    if reduce == "mean":
        count = total(jnp.ones_like(graph))
        return jax.tree.map(lambda x: total(x) / per_graph(count, x), values)
    score = jnp.where(graph < graphs, jnp.asarray(score), 0)
    weight = jnp.exp(score - jax.lax.stop_gradient(top(score)).at[graph].get(mode="clip"))
    return jax.tree.map(lambda x: total(per_graph(weight, x) * x) / per_graph(total(weight), x), values)
