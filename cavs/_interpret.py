"""`interpret`: F vertex by vertex in plain Python: the definition that every engine must equal, and a debugger's view."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs import Graphs
from cavs._vertex import Vertex, VertexFunction


class _PlainVertex(Vertex):
    """The handle of one real vertex: gathers are real arrays, nothing is traced or batched."""

    def __init__(self, function: VertexFunction, avals: list[Any], inputs: Any, children: list[Any]):
        tree = function.state_tree
        zero = tree.unflatten([jnp.zeros(a.shape, a.dtype) for a in avals])
        slots = [children[k] if k < len(children) else zero for k in range(function.arity)]
        super().__init__(function, avals, inputs, slots, np.int32(len(children)), zero, not children)
        self._children = children

    def has_child(self, k: int) -> Any:
        super().has_child(k)
        return np.bool_(k < len(self._children))

    def gather_all(self, fn: Any = lambda state: state, reduce: str = "sum") -> Any:
        if not self._children:
            return super().gather_all(fn, reduce)
        outs = [fn(child) for child in self._children]
        if reduce == "softmax":
            scores = jax.nn.softmax(_stack([self._score_and_value(o)[0] for o in outs]))
            return jax.tree.map(lambda *xs: jnp.tensordot(scores, _stack(xs), 1), *[o[1] for o in outs])
        how = {"sum": lambda x, axis: x.sum(axis, x.dtype), "mean": jnp.mean, "max": jnp.max}
        if reduce not in how:
            return super().gather_all(fn, reduce)
        return jax.tree.map(lambda *xs: how[reduce](_stack(xs), axis=0), *outs)


def interpret(F: VertexFunction, params: Any, graphs: Graphs, inputs: Any = None) -> Any:
    """What `cavs.run` computes, one vertex at a time in plain Python, children before parents: prints and breakpoints
    inside F work, and values are real arrays.

    **Arguments:** as `run`, but `graphs` themselves and `inputs` with exactly one row per vertex (V, ...).

    **Returns:** the pushes, leaves (V, ...), rows in the graphs' vertex order. Slow; differentiable.
    """
    leaves = jax.tree.leaves(inputs)
    if any(jnp.shape(x)[:1] != (graphs.num_vertices,) for x in leaves):
        raise ValueError(
            f"interpret: inputs has leaves of shapes {[jnp.shape(x) for x in leaves]}, wanted a first axis of "
            f"{graphs.num_vertices}: one row per vertex."
        )
    avals = F.state_avals(jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, inputs))
    if not graphs.num_vertices:
        plan = F.plan(*jax.eval_shape(lambda: (params, jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), inputs))))
        return plan.push_tree.unflatten([jnp.zeros((0, *a.shape), a.dtype) for a in plan.push_avals])
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    states: list[Any] = [None] * graphs.num_vertices
    pushed: list[Any] = [None] * graphs.num_vertices
    for r in np.argsort(graphs.height, kind="stable"):
        kids = graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]] + base[r]
        kind = None
        if None not in F.fns:
            if graphs.kind is None:
                raise ValueError(f"interpret: F has functions for kinds {sorted(F.fns)}, but the graphs have no kinds.")
            kind = graphs.kind_names[graphs.kind[r]] if graphs.kind_names else str(graphs.kind[r])
        number = jnp.asarray(r)
        v = _PlainVertex(F, avals, jax.tree.map(lambda x, i=number: x[i], inputs), [states[c] for c in kids])
        F.fns[kind](params, v)
        if v.scattered is None or not v.pushed:
            raise ValueError(f"F {'scatters' if v.scattered is None else 'pushes'} nothing at flat vertex {r}.")
        states[r] = F.state_tree.unflatten(v.scattered)
        pushed[r] = v.pushed[None] if None in v.pushed else v.pushed
    return jax.tree.map(lambda *xs: _stack(xs), *pushed)


def _stack(xs: Sequence[Any]) -> Any:
    # In blocks: one concatenation of thousands of arrays compiles for long, and each of its slices in the transpose.
    xs = [jnp.asarray(x)[None] for x in xs]
    while len(xs) > 1:
        xs = [jnp.concatenate(xs[i : i + 16]) for i in range(0, len(xs), 16)]
    return xs[0]
