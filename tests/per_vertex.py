"""The reference for random vertex functions: a handle `v` and a loop over vertices in plain JAX, which knows nothing of `cavs`."""

from typing import Any

import jax
import jax.numpy as jnp

Graph = list[list[int]]  # the children of each vertex


class PlainVertex:
    """`v` of one vertex: its children are a Python list of states."""

    def __init__(self, inputs: Any, children: list[Any], zero: Any):
        self.inputs, self.children, self.zero = inputs, children, zero
        self.pushed: dict[str | None, Any] = {}

    def pull(self, name: str | None = None) -> Any:
        return self.inputs if name is None else self.inputs[name]

    def gather(self, k: int) -> Any:
        return self.children[k] if k < len(self.children) else self.zero

    def has_child(self, k: int) -> Any:
        return jnp.asarray(k < len(self.children))

    def num_children(self) -> Any:
        return jnp.int32(len(self.children))

    def is_leaf(self) -> bool:
        return not self.children

    def gather_all(self, fn: Any = lambda state: state, reduce: str = "sum") -> Any:
        """`fn` of each child, stacked and reduced; zeros if there is no child."""
        if not self.children:
            shapes = jax.eval_shape(lambda: _reduced([fn(self.zero)], reduce))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return _reduced([fn(child) for child in self.children], reduce)

    def scatter(self, state: Any) -> None:
        self.state = state

    def push(self, value: Any, name: str | None = None) -> None:
        self.pushed[name] = value


def _reduced(outs: list[Any], how: str) -> Any:
    if how == "softmax":
        weights = jax.nn.softmax(jnp.stack([score for score, _ in outs]))
        return jax.tree.map(lambda *xs: jnp.tensordot(weights, jnp.stack(xs), 1), *[value for _, value in outs])
    reduce = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}[how]
    return jax.tree.map(lambda *xs: reduce(jnp.stack(xs), axis=0), *outs)


def per_vertex(
    functions: dict[Any, Any], params: Any, graphs: list[Graph], kinds: list[Any], inputs: Any, zero: Any
) -> tuple[list[Any], list[Any]]:
    """States and pushes of all vertices, graph after graph; `kinds` and the rows of `inputs` are in that order.

    A vertex's function is compiled once for a kind and a number of children.
    """

    def step(kind: Any, params: Any, mine: Any, children: list[Any]) -> Any:
        v = PlainVertex(mine, children, zero)
        functions[kind](params, v)
        return v.state, v.pushed[None] if None in v.pushed else v.pushed

    compiled = jax.jit(step, static_argnums=0)
    states: list[Any] = []
    pushes: list[Any] = []
    for graph in graphs:
        base, done = len(states), {}
        states += [None] * len(graph)
        pushes += [None] * len(graph)

        def visit(vertex: int, graph: Graph = graph, base: int = base, done: dict[int, Any] = done) -> Any:
            if vertex not in done:
                children = [visit(child) for child in graph[vertex]]
                row = base + vertex
                mine = jax.tree.map(lambda x: x[row], inputs)
                done[vertex], pushes[row] = compiled(kinds[row], params, mine, children)
                states[row] = done[vertex]
            return done[vertex]

        for vertex in range(len(graph)):
            visit(vertex)
    return states, pushes


def stacked(functions: dict[Any, Any], params: Any, graphs: list[Graph], kinds: list[Any], inputs: Any, zero: Any) -> Any:
    """The pushes of `per_vertex`, leaves (V, ...)."""
    pushes = per_vertex(functions, params, graphs, kinds, inputs, zero)[1]
    if pushes:
        return jax.tree.map(lambda *xs: jnp.stack(xs), *pushes)
    one = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), inputs)
    first = next(iter(functions))
    shapes = jax.eval_shape(lambda: per_vertex(functions, params, [[[]]], [first], one, zero)[1][0])
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
