"""`interpret`: F vertex by vertex in plain Python: the definition that every engine must equal, and a debugger's view."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.gather_all import score_and_value
from cavs._function.stored import from_stored, stored_aval
from cavs._function.vertex import Vertex, VertexFunction, as_arrays
from cavs._graphs.graphs import Graphs


class _PlainVertex(Vertex):
    """The handle of one real vertex: gathers are real arrays, nothing is traced or batched."""

    def __init__(self, function: VertexFunction, avals: list[Any], inputs: Any, children: list[Any]):
        tree = function.state_tree
        stored = [jnp.zeros(a.shape, a.dtype) for a in map(stored_aval, avals)]
        zero = tree.unflatten(map(from_stored, stored, function.key_impls))
        slots = [children[k] if k < len(children) else zero for k in range(function.arity)]
        super().__init__(function, avals, inputs, slots, np.int32(len(children)), stored, not children)
        self._children = children

    def has_child(self, k: int) -> Any:
        super().has_child(k)
        return np.bool_(k < len(self._children))

    def gather_all(self, fn: Any = lambda state: state, reduce: str = "sum") -> Any:
        if not self._children:
            return super().gather_all(fn, reduce)
        outs = [fn(child) for child in self._children]
        if reduce == "softmax":
            scores = jax.nn.softmax(_stack([score_and_value(o)[0] for o in outs]))
            return jax.tree.map(lambda *xs: jnp.tensordot(scores, _stack(xs), 1), *[o[1] for o in outs])
        how = {"sum": lambda x, axis: x.sum(axis, jnp.int32 if x.dtype == bool else x.dtype), "mean": jnp.mean, "max": jnp.max}
        if reduce not in how:
            return super().gather_all(fn, reduce)
        return jax.tree.map(lambda *xs: how[reduce](_stack(xs), axis=0), *outs)


def interpret(F: VertexFunction, params: Any, graphs: Graphs, inputs: Any = None) -> Any:
    """What `cavs.run` computes, one vertex at a time in plain Python, children before parents: `print`, `breakpoint()` and
    `assert` inside F work, and values are real arrays. An error in F says at which vertex it was.

    **Arguments:** as `run`, but `graphs` themselves (`graphs[7]` for one of them) and `inputs` with exactly one row per
    vertex (V, ...).

    **Returns:** the pushes, leaves (V, ...), rows in the graphs' vertex order. Slow; differentiable.
    """
    return loop(F, params, graphs, inputs, functools.partial(at_vertex, F, graphs))


def loop(F: VertexFunction, params: Any, graphs: Graphs, inputs: Any, call: Callable[..., tuple[Any, Any]]) -> Any:
    """`interpret` by way of `call(row, params, row of the inputs, children's states) -> (state, pushes)`."""
    params, inputs = as_arrays(params, "interpret: params"), as_arrays(inputs, "interpret: inputs")
    leaves = jax.tree.leaves(inputs)
    if any(jnp.shape(x)[:1] != (graphs.num_vertices,) for x in leaves):
        raise ValueError(
            f"interpret: inputs has leaves of shapes {[jnp.shape(x) for x in leaves]}, wanted a first axis of "
            f"{graphs.num_vertices}: one row per vertex."
        )
    if not graphs.num_vertices:
        plan = F.plan(*jax.eval_shape(lambda: (params, jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), inputs))))
        pushes = [jnp.zeros((0, *a.shape), a.dtype) for a in plan.push_avals]
        return plan.push_tree.unflatten(map(from_stored, pushes, plan.push_impls))
    states: list[Any] = [None] * graphs.num_vertices
    pushed: list[Any] = [None] * graphs.num_vertices
    for r in np.argsort(graphs.height, kind="stable"):
        number = jnp.asarray(r)
        mine = jax.tree.map(lambda x, i=number: x[i], inputs)
        try:
            states[r], pushed[r] = call(r, params, mine, [states[c] for c in children_of(graphs, r)])
        except Exception as error:
            graph, vertex = place_of(graphs, r)
            error.add_note(f"in F at vertex {vertex} of graph {graph} (row {r}, level {graphs.height[r]})")
            raise
    return jax.tree.map(lambda *xs: _stack(xs), *pushed)


def at_vertex(F: VertexFunction, graphs: Graphs, row: int, params: Any, inputs: Any, children: list[Any]) -> tuple[Any, Any]:
    """(state, pushes) of the vertex in a flat row, from its row of the inputs and its children's states."""
    v = _PlainVertex(F, F.state_avals(params, inputs), inputs, children)
    F.fns[kind_of(F, graphs, row)](params, v)
    if v.scattered is None or not v.pushed:
        raise ValueError(f"F {'scatters' if v.scattered is None else 'pushes'} nothing at flat vertex {row}.")
    return F.state_tree.unflatten(v.scattered), v.pushed[None] if None in v.pushed else v.pushed


def compiled(F: VertexFunction, graphs: Graphs) -> Callable[..., tuple[Any, Any]]:
    """`at_vertex`, compiled once for a kind and a number of children: faster over many vertices, but prints nothing."""
    kept: dict[Any, Any] = {}

    def call(row: int, params: Any, inputs: Any, children: list[Any]) -> tuple[Any, Any]:
        key = (kind_of(F, graphs, row), len(children))
        if key not in kept:
            kept[key] = jax.jit(functools.partial(at_vertex, F, graphs, row))
        return kept[key](params, inputs, children)

    return call


def kind_of(F: VertexFunction, graphs: Graphs, row: int) -> str | None:
    """The name of the function of F that runs a vertex."""
    if None in F.fns:
        return None
    if graphs.kind is None:
        raise ValueError(f"interpret: F has functions for kinds {sorted(F.fns)}, but the graphs have no kinds.")
    return graphs.kind_names[graphs.kind[row]] if graphs.kind_names else str(graphs.kind[row])


def children_of(graphs: Graphs, row: int) -> np.ndarray:
    """Flat rows of a vertex's children."""
    base = graphs.vertex_offsets[place_of(graphs, row)[0]]
    return graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]] + base


def place_of(graphs: Graphs, row: int) -> tuple[int, int]:
    """(graph, vertex within it) of a flat row."""
    graph = int(np.searchsorted(graphs.vertex_offsets, row, side="right")) - 1
    return graph, int(row - graphs.vertex_offsets[graph])


def _stack(xs: Sequence[Any]) -> Any:
    # In blocks: one concatenation of thousands of arrays compiles for long. Compiled, as else each slice of a block's
    # transpose compiles on its own.
    xs = [_block([jnp.asarray(x) for x in xs[i : i + 16]]) for i in range(0, len(xs), 16)]
    while len(xs) > 1:
        xs = [_joined(xs[i : i + 16]) for i in range(0, len(xs), 16)]
    return xs[0]


_block, _joined = jax.jit(jnp.stack), jax.jit(jnp.concatenate)
