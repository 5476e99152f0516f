"""The reference of the table of programs: values and gradients of a case by the loop of `tests/per_vertex.py`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from tests.odd_graphs import BATCHES, children_of
from tests.per_vertex import PerVertex, Steps, with_edges
from tests.programs import PROGRAMS


class WithEdges(NamedTuple):
    """The inputs of a program that reads edges, and the edges."""

    rows: Any
    edges: Any


@functools.cache
def batch_inputs(name: str, batch: str) -> Any:
    """Returns the inputs of a case, exactly one row per vertex; `WithEdges` if the program reads edges."""
    program, graphs = PROGRAMS[name], BATCHES[batch]
    rows = program.inputs(graphs.num_vertices)
    return rows if program.edges is None else WithEdges(rows, program.edges_of(graphs.num_edges))


def call(run: Any, function: Any, params: Any, batch: Any, inputs: Any) -> Any:
    """`run` (or `interpret`) with inputs as `batch_inputs` returns them."""
    if isinstance(inputs, WithEdges):
        return run(function, params, batch, inputs.rows, edges=inputs.edges)
    return run(function, params, batch, inputs)


def padded(schedule: cavs.Schedule, inputs: Any, fill: Any = lambda x: 0) -> Any:
    """Pads the rows of `batch_inputs`, with `fill` of each leaf."""
    if isinstance(inputs, WithEdges):
        edges = jax.tree.map(lambda x: schedule.pad_edges(x, fill(x)), inputs.edges)
        return WithEdges(padded(schedule, inputs.rows, fill), edges)
    return jax.tree.map(lambda x: schedule.pad(x, fill(x)), inputs)


def divided(schedule: cavs.Schedule, inputs: Any) -> tuple[Any, Any]:
    """Divides the result of `padded` into real rows and padding."""
    if isinstance(inputs, WithEdges):
        (rows, rest), count = divided(schedule, inputs.rows), schedule.num_edges
        edges = (jax.tree.map(lambda x, s=s: x[s], inputs.edges) for s in (slice(count), slice(count, None)))
        return tuple(WithEdges(*both) for both in zip((rows, rest), edges, strict=True))
    count = int(schedule.num_vertices)
    return jax.tree.map(lambda x: x[:count], inputs), jax.tree.map(lambda x: x[count:], inputs)


@functools.cache
def sched(batch: str) -> cavs.Schedule:
    """Returns the schedule of a batch."""
    return cavs.schedule(BATCHES[batch])


def weights(pushes: Any, rows: int) -> Any:
    """Returns random weights for the first `rows` rows of every float push, and zeros beyond: the loss' cotangents."""

    def like(x: Any) -> Any:
        w = np.random.default_rng(x.size // x.shape[0]).standard_normal((rows, *x.shape[1:]))
        return np.concatenate([w, np.zeros((x.shape[0] - rows, *x.shape[1:]))])

    return jax.tree.map(lambda x: like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None, pushes)


@functools.partial(jax.jit, static_argnums=1)
def loss(pushes: Any, rows: int) -> Any:
    """Returns a scalar that depends on every float push, with its own weights."""
    leaves = zip(jax.tree.leaves(pushes), jax.tree.leaves(weights(pushes, rows), is_leaf=lambda w: w is None), strict=True)
    return sum((x * w).sum() for x, w in leaves if w is not None)


def gradients(run: Any, params: Any, inputs: Any, rows: int) -> tuple[Any, Any]:
    """The gradients of `loss` with respect to (params, inputs), and what `run(params, inputs)` pushes."""

    def f(params: Any, inputs: Any) -> Any:
        pushes = run(params, inputs)
        return loss(pushes, rows), pushes

    return jax.grad(f, argnums=(0, 1), has_aux=True, allow_int=True)(params, inputs)


def with_gradients(fn: Any, *args: Any) -> tuple[Any, Any]:
    """The value of `fn`, and the gradients of a random linear function of it."""
    out, vjp = jax.vjp(fn, *jax.tree.map(jnp.asarray, args))
    return out, vjp(jnp.asarray(np.random.default_rng(0).standard_normal(out.shape)))


@functools.cache
def _steps(name: str) -> Steps:
    """The steps of a program, compiled once for all of its batches."""
    function = PROGRAMS[name].function
    avals = function.state_avals(PROGRAMS[name].params, PROGRAMS[name].rows)
    return Steps(function.fns, function.state_tree.unflatten([np.zeros(a.shape, a.dtype) for a in avals]))


@functools.cache
def truth(name: str, batch: str) -> tuple[Any, Any]:
    """The pushes of a case and its `gradients`, vertex by vertex."""
    program, graphs = PROGRAMS[name], BATCHES[batch]
    function, lists = program.function, [children_of(graphs, g) for g in range(len(graphs))]
    named = graphs.kind is not None and None not in function.fns
    kinds = [graphs.kind_names[kind] for kind in graphs.kind] if named else [None] * graphs.num_vertices
    params, inputs = program.params, batch_inputs(name, batch)
    net = PerVertex(_steps(name), lists, kinds)

    def run(params: Any, inputs: Any) -> Any:
        return net(params, with_edges(*inputs, lists) if isinstance(inputs, WithEdges) else inputs)

    grads, pushes = gradients(run, params, inputs, graphs.num_vertices)
    return pushes, grads


def assert_is_truth(run: Any, given: Any, name: str, batch: str) -> None:
    """`run` of a program over `given`, the schedule or the graphs of a batch, returns its `truth`."""
    program = PROGRAMS[name]
    params, inputs = jax.tree.map(jnp.asarray, (program.params, batch_inputs(name, batch)))
    of = functools.partial(call, run, program.function)
    both = functools.partial(gradients, lambda p, x: of(p, given, x), rows=BATCHES[batch].num_vertices)
    grads, pushes = (both if run is cavs.interpret else jax.jit(both))(params, inputs)
    assert_close(pushes, truth(name, batch)[0], 1e-12 * program.tolerance)
    assert_close(grads, truth(name, batch)[1], 1e-10 * program.tolerance)


@functools.cache
def jitted(name: str) -> Any:
    """(params, sched, padded inputs, vertices) -> (gradients, pushes) of a program, compiled; for all its batches."""
    function = PROGRAMS[name].function

    def f(params: Any, sched: cavs.Schedule, inputs: Any, rows: int) -> Any:
        return gradients(lambda p, x: call(cavs.run, function, p, sched, x), params, inputs, rows)

    return jax.jit(f, static_argnums=3)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Asserts that all leaves are equal to `tolerance`, absolute or relative. Skips float0 gradients of integers."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{jax.tree_util.keystr(path)}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        )
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))
