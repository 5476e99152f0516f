"""The reference for random vertex functions: `v` and a loop over vertices in plain JAX, independent of `cavs`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Graph = list[list[int]]  # the children of each vertex
MOST_UNROLLED = 4  # children that `gather_all` visits in a Python loop; it visits more in one that XLA compiles once


class Mine(NamedTuple):
    """The inputs of one vertex: its row of the inputs, and the rows of its edges followed by padding."""

    inputs: Any
    edges: Any


def with_edges(inputs: Any, edges: Any, graphs: list[Graph]) -> Any:
    """Returns the inputs of a net that reads edges (rows in the order of the children): `Mine`, with leaves (V, ...)."""
    counts = [len(children) for graph in graphs for children in graph]
    begin, most = np.cumsum(counts) - counts, max(counts, default=0)
    index = np.minimum(begin[:, None] + np.arange(most), max(sum(counts) - 1, 0)).astype(int)
    return Mine(inputs, jax.tree.map(lambda x: jnp.asarray(x)[index], edges))


class PlainVertex:
    """`v` of one vertex: its children are a Python list of states."""

    def __init__(self, inputs: Any, children: list[Any], zero: Any):
        self.inputs, self.edges = inputs if isinstance(inputs, Mine) else (inputs, None)
        self.children, self.zero = children, zero
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

    def gather_all(self, fn: Any = lambda state: state, reduce: str = "sum", edges: bool = False) -> Any:
        """Applies `fn` to each child, stacks and reduces the results. Returns zeros if there is no child."""
        rows = [self.children]
        if edges:
            rows.append([jax.tree.map(lambda x, k=k: x[k], self.edges) for k in range(len(self.children))])
        if not self.children:
            zeros = [self.zero, *[jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), self.edges)][: len(rows) - 1]]
            shapes = jax.eval_shape(lambda: _reduced(_stacked([fn(*zeros)]), reduce))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if len(self.children) <= MOST_UNROLLED:
            return _reduced(_stacked([fn(*row) for row in zip(*rows, strict=True)]), reduce)
        return _reduced(jax.lax.map(lambda row: fn(*row), [_stacked(r) for r in rows]), reduce)

    def scatter(self, state: Any) -> None:
        self.state = state

    def push(self, value: Any, name: str | None = None) -> None:
        self.pushed[name] = value


def _stacked(rows: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *rows)


def _reduced(outs: Any, how: str) -> Any:
    """Reduces leaves (children, ...)."""
    if how == "softmax":
        scores, values = outs
        return jax.tree.map(lambda x: jnp.tensordot(jax.nn.softmax(scores), x, 1), values)
    if how == "sum":
        return jax.tree.map(lambda x: x.sum(0, dtype=jnp.int32 if x.dtype == bool else x.dtype), outs)
    # The barrier keeps XLA from computing x again for the comparison in the derivative of a maximum: x may then differ in the
    # last bit, so that none is the maximum, and the gradient is NaN.
    outs = jax.lax.optimization_barrier(outs)
    return jax.tree.map(lambda x: {"mean": jnp.mean, "max": jnp.max}[how](x, axis=0), outs)


class Steps:
    """One vertex, alone and with its derivative `jax.vjp`, each compiled once for every kind and number of children.

    `functions` by kind; `zero`: the state of no child.
    """

    def __init__(self, functions: dict[Any, Any], zero: Any):
        self.functions, self.zero = functions, zero
        self.forward = jax.jit(self._forward, static_argnums=0)
        self.both = jax.jit(self._both, static_argnums=0)
        self.shapes: dict[tuple[Any, int], Any] = {}

    def _forward(self, kind: Any, params: Any, mine: Any, children: list[Any]) -> Any:
        v = PlainVertex(mine, children, self.zero)
        self.functions[kind](params, v)
        return v.state, v.pushed[None] if None in v.pushed else v.pushed

    def _both(self, kind: Any, params: Any, mine: Any, children: list[Any], ct: Any) -> Any:
        out, vjp = jax.vjp(lambda *args: self._forward(kind, *args), params, mine, children)
        return out, vjp(ct)

    def differentiable(self, kind: Any, params: Any, mine: Any, children: list[Any]) -> Any:
        """The state and the push, by the program that `both` compiles for the derivative."""
        if (key := (kind, len(children))) not in self.shapes:
            self.shapes[key] = jax.eval_shape(lambda *args: self._forward(kind, *args), params, mine, children)
        return self.both(kind, params, mine, children, jax.tree.map(_zero, self.shapes[key]))[0]


class PerVertex:
    """A net as a loop over vertices, and a loop for the gradient.

    `graphs`; `kinds` of all vertices, graph after graph.
    """

    def __init__(self, steps: Steps, graphs: list[Graph], kinds: list[Any]):
        self.steps, self.kinds = steps, kinds
        self.children: list[list[int]] = []
        for graph in graphs:
            base = len(self.children)
            self.children += [[base + child for child in children] for children in graph]
        self.order = _children_first(self.children)

        @jax.custom_vjp
        def net(params: Any, inputs: Any) -> Any:
            return self._run(steps.forward, params, inputs)[0]

        net.defvjp(lambda params, inputs: self._run(steps.differentiable, params, inputs), self._run_back)
        self.net = net

    def __call__(self, params: Any, inputs: Any) -> Any:
        """Returns the pushes of all vertices, leaves (V, ...), for inputs (V, ...). Differentiable in reverse mode."""
        return self.net(params, inputs)

    def _run(self, step: Any, params: Any, inputs: Any) -> Any:
        rows, states, pushes = _rows(inputs, len(self.order)), [None] * len(self.order), [None] * len(self.order)
        for r in self.order:
            kids = [states[c] for c in self.children[r]]
            states[r], pushes[r] = step(self.kinds[r], params, rows[r], kids)
        if pushes:
            return jax.tree.map(lambda *xs: _stack(xs), *pushes), (params, rows, states, pushes)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
        kind = next(iter(self.steps.functions))
        shapes = jax.eval_shape(lambda p, x: self.steps._forward(kind, p, x, []), params, one)[1]
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes), (params, inputs, [], [])

    def _run_back(self, saved: Any, cts: Any) -> Any:
        params, rows, states, pushes = saved
        if not pushes:
            return jax.tree.map(_zero, (params, rows))
        ct_rows = _rows(cts, len(rows))
        ct_states: list[Any] = [jax.tree.map(_zero, s) for s in states]
        ct_params, ct_inputs = jax.tree.map(_zero, params), [None] * len(rows)
        for r in reversed(self.order):
            kids = [states[c] for c in self.children[r]]
            p, ct_inputs[r], ct_kids = self.steps.both(self.kinds[r], params, rows[r], kids, (ct_states[r], ct_rows[r]))[1]
            ct_params = jax.tree.map(_plus, ct_params, p)
            for c, ct in zip(self.children[r], ct_kids, strict=True):
                ct_states[c] = jax.tree.map(_plus, ct_states[c], ct)
        return ct_params, jax.tree.map(lambda *xs: _stack(xs), *ct_inputs)


def _children_first(children: list[list[int]]) -> list[int]:
    order: dict[int, None] = {}

    def visit(r: int) -> None:
        if r not in order:
            for c in children[r]:
                visit(c)
            order[r] = None

    for r in range(len(children)):
        visit(r)
    return list(order)


def _rows(tree: Any, count: int) -> list[Any]:
    """Returns a tree for each row, as NumPy arrays, which need no compilation."""
    tree = jax.tree.map(lambda x: x if _is_key(x) else np.asarray(x), tree)
    return [jax.tree.map(lambda x, r=r: _row(x, r), tree) for r in range(count)]


def _row(x: Any, r: int) -> Any:
    return np.zeros(x.shape[1:], x.dtype) if x.dtype == jax.dtypes.float0 else x[r]


def _stack(xs: Any) -> Any:
    return jnp.stack(xs) if _is_key(xs[0]) else np.stack([np.asarray(x) for x in xs])


def _plus(a: Any, b: Any) -> Any:
    return a if b.dtype == jax.dtypes.float0 else np.asarray(a) + np.asarray(b)


def _zero(x: Any) -> Any:
    return np.zeros(x.shape, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.float0)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
