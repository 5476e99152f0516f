"""`interpret`: evaluates F vertex by vertex in plain Python. It defines what every engine must compute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.arrays import as_arrays
from cavs._function.gather_all import check_child_function, score_and_value
from cavs._function.misuse import call_pure
from cavs._function.raw_keys import from_stored, stored_aval
from cavs._function.vertex import Pushed, Vertex, VertexFunction, check_function
from cavs._graphs.checks import vertex_at
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.mesh_types import unsharded
from cavs._run.plans import plan_of

# (row, params, row of the inputs, rows of the edges to the children, states of the children) -> (state, pushes)
Call: TypeAlias = Callable[[int, PyTree, PyTree, PyTree, list[PyTree]], tuple[PyTree, PyTree]]


class _PlainVertex(Vertex):
    """The handle of one vertex: gathered values are concrete arrays, nothing is traced or batched."""

    def __init__(
        self, function: VertexFunction, avals: list[jax.ShapeDtypeStruct], inputs: PyTree, edges: PyTree, children: list[PyTree]
    ):
        tree = function.state_tree
        stored = [jnp.zeros(a.shape, a.dtype) for a in map(stored_aval, avals)]
        zero = tree.unflatten(map(from_stored, stored, function.key_impls))
        slots = [_copied(children[k] if k < len(children) else zero) for k in range(function.arity)]
        edge = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), edges)
        super().__init__(function, avals, inputs, edge, slots, np.int32(len(children)), stored, not children)
        self._children, self._rows = children, edges

    def has_child(self, k: int) -> np.bool_:
        super().has_child(k)
        return np.bool_(k < len(self._children))

    def gather_all(self, fn: Callable[..., PyTree] = lambda state: state, reduce: str = "sum", edges: bool = False) -> PyTree:
        if not self._children:
            return super().gather_all(fn, reduce, edges)
        check_child_function(fn, edges, self._edges)
        if edges:
            outs = [fn(_copied(child), jax.tree.map(lambda x, k=k: x[k], self._rows)) for k, child in enumerate(self._children)]
        else:
            outs = [fn(_copied(child)) for child in self._children]
        if reduce == "softmax":
            scores = jax.nn.softmax(_stack([score_and_value(o)[0] for o in outs]))
            return jax.tree.map(lambda *xs: jnp.tensordot(scores, _stack(xs), 1), *[o[1] for o in outs])
        if reduce == "max":  # XLA might compute an operand again, and round it differently: then none equals the maximum
            outs = barrier(outs)
        fns = {"sum": lambda x, axis: x.sum(axis, jnp.int32 if x.dtype == bool else x.dtype), "mean": jnp.mean, "max": jnp.max}
        if reduce not in fns:
            return super().gather_all(fn, reduce, edges)
        return jax.tree.map(lambda *xs: fns[reduce](_stack(xs), axis=0), *outs)


def interpret(
    F: VertexFunction[Pushed], params: PyTree, graphs: Graphs, inputs: PyTree = None, *, edges: PyTree = None
) -> Pushed:
    """Computes what [`cavs.run`][] computes, one vertex at a time in plain Python, children before parents.

    Values are concrete arrays: `print`, `breakpoint()` and `assert` work inside F. An error in F has a note that names the
    vertex. The function is differentiable, but slow.

    Args:
        F: the vertex function.
        params: any pytree of arrays.
        graphs: the graphs; `graphs[7]` selects one.
        inputs: a pytree of arrays (V, ...) with exactly one row per vertex, or `None`.
        edges: a pytree of arrays (E, ...) with exactly one row per edge, in the order of `graphs.children`, or `None`.

    Returns:
        The pushes, a pytree of arrays (V, ...) in the order of the graphs' vertices.

    Raises:
        TypeError: `F` or `graphs` is something else, or a leaf of `params`, `inputs` or `edges` is not an array.
        ValueError: `inputs` or `edges` has another number of rows, the graphs lack kinds, or F scatters or pushes nothing at a
            vertex.
    """
    check_function("interpret", F)
    return loop(F, params, graphs, inputs, edges, functools.partial(at_vertex, F, graphs))


def loop(F: VertexFunction, params: PyTree, graphs: Graphs, inputs: PyTree, edges: PyTree, call: Call) -> PyTree:
    """Implements `interpret`; `call` evaluates one vertex."""
    check_graphs(graphs, "interpret(F, params, graphs, inputs)")
    params = jax.tree.map(unsharded, as_arrays(params, "interpret: params"))
    inputs = checked_rows("interpret: inputs", inputs, graphs.num_vertices, "vertex")
    edges = checked_rows("interpret: edges", edges, graphs.num_edges, "edge")
    if not graphs.num_vertices:
        row, edge = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows) for rows in (inputs, edges))
        plan = plan_of(F, jax.eval_shape(lambda: params), row, edges=edge)
        pushes = [jnp.zeros((0, *a.shape), a.dtype) for a in plan.push_avals]
        return plan.push_tree.unflatten(map(from_stored, pushes, plan.push_impls))
    states: list[PyTree] = [None] * graphs.num_vertices
    pushed: list[PyTree] = [None] * graphs.num_vertices
    for r in np.argsort(graphs.height, kind="stable"):
        number = jnp.asarray(r)
        row_inputs = jax.tree.map(lambda x, i=number: x[i], inputs)
        try:
            states[r], pushed[r] = call(
                r, params, row_inputs, edges_of(graphs, r, edges), [states[c] for c in children_of(graphs, r)]
            )
        except Exception as error:
            graph, vertex = vertex_at(graphs.vertex_offsets, r)
            error.add_note(f"in F at vertex {vertex} of graph {graph} (row {r}, level {graphs.height[r]})")
            raise
    return jax.tree.map(lambda *xs: _stack(xs), *pushed)


def at_vertex(
    F: VertexFunction, graphs: Graphs, row: int, params: PyTree, inputs: PyTree, edges: PyTree, children: list[PyTree]
) -> tuple[PyTree, PyTree]:
    """(state, pushes) of the vertex in a flat row, from its row of the inputs, and the edges to and states of its children."""
    v = _PlainVertex(F, F.state_avals(params, inputs), inputs, edges, children)
    call_pure(F.fns[kind_of(F, graphs, row)], params, v)
    if v.scattered is None or not v.pushed:
        method = "scatter" if v.scattered is None else "push"
        raise ValueError(f"interpret: F: got no {method} at row {row}; expected one. Write v.{method}(...).")
    return F.state_tree.unflatten(v.scattered), v._value


def compiled(F: VertexFunction, graphs: Graphs, at: Callable[..., Any] = at_vertex) -> Callable[..., Any]:
    """Returns `at(F, graphs, row, ...)` as a function of the rest, compiled once per kind and number of children.

    It is faster for many vertices, but `print` has no values.
    """
    cache: dict[tuple[str | None, int], Callable[..., Any]] = {}

    def call(row: int, *args: PyTree) -> Any:
        key = (kind_of(F, graphs, row), int(graphs.child_offsets[row + 1] - graphs.child_offsets[row]))
        if key not in cache:
            cache[key] = jax.jit(functools.partial(at, F, graphs, row))
        return cache[key](*args)

    return call


def kind_of(F: VertexFunction, graphs: Graphs, row: int) -> str | None:
    """The name of the function of F that runs a vertex; `None` if F has one function."""
    if None in F.fns:
        return None
    if graphs.kind is None:
        raise ValueError(
            f"interpret: graphs: got none with kinds; expected the kinds {sorted(F.fns)}, for which F has functions."
        )
    return graphs.kind_names[graphs.kind[row]] if graphs.kind_names else str(graphs.kind[row])


def children_of(graphs: Graphs, row: int) -> np.ndarray:
    """The flat rows of a vertex's children."""
    children = graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]]
    return children + row - vertex_at(graphs.vertex_offsets, row)[1]


def edges_of(graphs: Graphs, row: int, edges: PyTree) -> PyTree:
    """The rows of the edges from a vertex to its children."""
    index = jnp.arange(graphs.child_offsets[row], graphs.child_offsets[row + 1])
    return jax.tree.map(lambda x: x[index], edges)


def checked_rows(name: str, rows: PyTree, count: int, noun: str) -> PyTree:
    """Returns arrays with one row per `noun`. Raises a `ValueError`, which begins with `name`, if there are not `count`."""
    rows = jax.tree.map(unsharded, as_arrays(rows, name))
    shapes = [jnp.shape(x) for x in jax.tree.leaves(rows)]
    if any(shape[:1] != (count,) for shape in shapes):
        raise ValueError(f"{name}: got leaves of shapes {shapes}; expected a first axis of {count}, one row per {noun}.")
    return rows


def _copied(state: PyTree) -> PyTree:
    """Returns a state in new dicts and lists: F may change those that it gathers, which other parents gather, too."""
    return jax.tree.map(lambda x: x, state)


def _stack(values: Sequence[Any]) -> jax.Array:
    # One concatenation of thousands of arrays takes long to compile, so stack in blocks. Each block is jitted because
    # otherwise every slice in the transpose of a block would be compiled separately.
    xs = [_block([jnp.asarray(x) for x in values[i : i + 16]]) for i in range(0, len(values), 16)]
    while len(xs) > 1:
        xs = [_joined(xs[i : i + 16]) for i in range(0, len(xs), 16)]
    return xs[0]


_block, _joined = jax.jit(jnp.stack), jax.jit(jnp.concatenate)
