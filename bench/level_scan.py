"""A vertex function in a plain `lax.scan` over the tasks of a batch, under `jax.grad`: what people write without this library.

For `bench.memory`: how much less memory `cavs.run` needs for the same function and batch, whole and in parts.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.budgets import Measured, Step, difference_of

PLANS = {"whole": 1, "two parts": 2, "four parts": 4, "sixteen parts": 16}

TASK = 128  # rows of a task: a level is one or several, so little is padding


def against_scan(program: str, engine: str, graphs: int, hidden: int, steps: int) -> Measured:
    """Measures a program in the level scan, and with plans of several numbers of parts.

    Yields once when all is compiled, and nothing has run.

    Returns:
        A record. "plans" has for the scan and for each plan its "name", temporary bytes ("temp"), "ms" of a step, and the
        largest difference of a gradient to that of the scan, relative to its largest element.
    """
    step = Step(program, engine, graphs, hidden)
    vertices = step.graphs.num_vertices
    x = np.concatenate([step.rows(step.graphs), np.zeros((1, *step.row), np.float32)])
    some = tasks(step.graphs)
    roots = np.setdiff1d(np.arange(vertices), np.concatenate([children.ravel() for _, children in some]))
    avals = step.F.state_avals(step.params, jax.ShapeDtypeStruct(step.row, jnp.float32))
    shapes = step.F.state_tree.unflatten([a.shape for a in avals])

    def loss(params: Any, batch: Any) -> jax.Array:
        pushes = level_scan(step.F.fns[None], shapes, params, *batch)
        return jnp.sum(jnp.tanh(pushes[roots]) ** 2)

    batch = jax.device_put((some, x))
    scan = jax.jit(jax.value_and_grad(loss)).lower(step.params, batch).compile()
    ready = {"jax.grad of a level scan": (scan, batch)}
    for name, parts in PLANS.items():
        plan, _ = step.plan(parts=parts)
        batch = jax.device_put(plan.batch(step.graphs))
        lowered = jax.jit(jax.value_and_grad(plan.loss)).lower(step.params, batch)
        ready[name] = lowered.compile(plan.compiler_options), batch
    yield
    want, found = step.grads(scan, ready["jax.grad of a level scan"][1]), []
    for name, (compiled, batch) in ready.items():
        difference = difference_of(step.grads(compiled, batch), want)
        ms = round(statistics.median(step.times(compiled, batch, steps)) * 1e3, 3)
        temp = compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
        found.append({"name": name, "temp": temp, "ms": ms, "difference": difference})
    return {"program": program, "engine": engine, "graphs": graphs, "vertices": vertices, "hidden": hidden, "plans": found}


class Vertex:
    """What F sees: the states of its children, and its input."""

    def __init__(self, children: Any, x: jax.Array, leaf: bool):
        self._children, self._x, self._leaf, self.state, self.out = children, x, leaf, None, None

    def is_leaf(self) -> bool:
        return self._leaf

    def gather(self, k: int) -> Any:
        return jax.tree.map(lambda s: s[k], self._children)

    def gather_all(self, fn: Callable[[Any], Any]) -> Any:
        return jax.tree.map(lambda s: s.sum(0), jax.vmap(fn)(self._children))

    def pull(self) -> jax.Array:
        return self._x

    def scatter(self, state: Any) -> None:
        self.state = state

    def push(self, out: Any) -> None:
        self.out = out


def tasks(graphs: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tasks of the leaves, and those of the other vertices, level after level.

    Returns:
        For both, the vertices of each task, (T, TASK) ints, and their children, (T, TASK, arity): V if there is none, and
        numbers from V + 1 on for rows that are padding.
    """
    count, number = graphs.num_vertices, np.diff(graphs.child_offsets)
    starts = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    children = np.full((count + 1, int(number.max())), count)
    for k in range(children.shape[1]):
        has = np.flatnonzero(number > k)
        children[has, k] = graphs.children[graphs.child_offsets[:-1][has] + k] + starts[has]
    found = []
    for height in range(int(graphs.height.max()) + 1):
        level = np.flatnonzero(graphs.height == height)
        more = -len(level) % TASK
        found.append(np.concatenate([level, count + 1 + np.arange(more)]).reshape(-1, TASK))
    each = [found[0], np.concatenate(found[1:])]
    return [(v.astype(np.int32), children[np.minimum(v, count)].astype(np.int32)) for v in each]


def level_scan(fn: Callable[[Any, Any], None], shapes: Any, params: Any, tasks: Any, x: jax.Array) -> jax.Array:
    """Returns the pushes of all vertices, (V + 1, ...): the last row is of none.

    Args:
        fn: the vertex function.
        shapes: the shapes of its state.
        params: its parameters.
        tasks: what `tasks` returns.
        x: (V + 1, ...), the inputs.
    """
    rows = x.shape[0]

    def one(leaf: bool, children: Any, x: jax.Array) -> tuple[Any, Any]:
        v = Vertex(children, x, leaf)
        fn(params, v)
        return v.state, v.out

    def step(leaf: bool, carry: Any, task: Any) -> tuple[Any, None]:
        (states, pushes), (vertex, child) = carry, task
        children = jax.tree.map(lambda s: s.at[child].get(mode="clip"), states)
        new, out = jax.vmap(functools.partial(one, leaf))(children, x.at[vertex].get(mode="clip"))
        put = lambda b, r: b.at[vertex].set(r, mode="drop", unique_indices=True)  # noqa: E731
        return (jax.tree.map(put, states, new), put(pushes, out)), None

    states = jax.tree.map(lambda shape: jnp.zeros((rows, *shape)), shapes, is_leaf=lambda s: isinstance(s, tuple))
    children = jax.tree.map(lambda s: s[: tasks[0][1].shape[-1]], states)
    carry = states, jnp.zeros((rows, *jax.eval_shape(functools.partial(one, True), children, x[0])[1].shape))
    for leaf, some in zip((True, False), tasks, strict=True):
        carry, _ = lax.scan(functools.partial(step, leaf), carry, some)
    return carry[1]
