"""What a type checker sees of the public functions: `pyright` checks this file, and `test_typed` runs it."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs.data import Batches, Loader, Sample, Step

Pair = dict[str, jax.Array]
Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]


def sums(params: dict[str, jax.Array], v: cavs.Vertex) -> None:
    """The sum of this vertex's input and of the states of its children."""
    h = v.pull() * params["gain"] + v.gather_all(lambda h: h)
    v.scatter(h)
    v.push(h)


def named(params: dict[str, jax.Array], v: cavs.Vertex) -> None:
    """The same, with two pushes."""
    h = v.pull() * params["gain"] + v.gather_all(lambda h: h)
    v.scatter(h)
    v.push(h, "h")
    v.push(v.num_children(), "children")


def program() -> None:
    """A program of each public function whose type depends on its arguments."""
    graphs = cavs.from_lengths([2, 3, 1], label=np.zeros(6, int), graph_label=np.zeros(3))
    F = cavs.VertexFunction(sums, state=(2,))
    G = cavs.VertexFunction[Pair](named, state=(2,))
    params, sched = {"gain": jnp.ones(2)}, cavs.schedule(graphs)
    assert_type(F, cavs.VertexFunction[jax.Array])
    assert_type(cavs.run(F, params, sched, np.ones((6, 2))), jax.Array)
    assert_type(cavs.run(G, params, sched, np.ones((6, 2)), select=sched.roots), Pair)
    assert_type(cavs.interpret(G, params, graphs, np.ones((6, 2))), Pair)
    assert_type(cavs.vertex_programs.GRU(2, 2).vertex_function(), cavs.VertexFunction[jax.Array])

    def collate(sample: Sample[cavs.Graphs, cavs.Schedule]) -> tuple[cavs.Schedule, np.ndarray]:
        return sample.sched, sample.sched.pad(sample.graphs.label)

    assert_type(Loader(graphs, 2), Loader[Batches[cavs.Schedule]])
    for batch in Loader(graphs, 2, steps=1):
        assert_type(batch, cavs.Schedule)
    for pair in Loader((graphs, graphs.reversed()), 2, steps=1, shuffle=False):
        assert_type(pair, tuple[cavs.Schedule, ...])
    for batches in Loader(graphs, 2, collate=collate, seed=1):
        assert_type(batches, Batches[tuple[cavs.Schedule, Array]])
    for one in Loader(graphs, 2, collate=lambda sample: sample.numbers, steps=1):
        assert_type(one, Array)
    featured = Loader[tuple[cavs.Schedule, Any]](graphs.replace(x=np.ones(6)), 2, steps=1)
    for sched, x in featured:
        assert_type(sched, cavs.Schedule)
        assert x.shape == (sched.shape.vertices,)

    @cavs.data.step
    def step(state: Pair, sched: cavs.Schedule) -> tuple[Pair, jax.Array]:
        return state, cavs.data.total(sched.label)

    assert_type(step, Step[Pair, jax.Array])
    assert_type(step(params, next(iter(Loader(graphs, 2)))), tuple[Pair, jax.Array])

    def rows(params: Pair, sched: cavs.Schedule) -> jax.Array:
        return sched.label * params["gain"][0]

    loader = Loader(graphs, 2, shuffle=False)
    assert_type(cavs.data.predict(rows, params, loader), Array)
    assert_type(
        cavs.data.evaluate(lambda p, sched: {"labels": cavs.data.total(rows(p, sched))}, params, loader), dict[str, float]
    )
    assert_type(cavs.concurrent_jit(rows)(params, Loader(graphs, 3, steps=1).largest()), jax.Array)
    assert_type(cavs.io.restore_checkpoint("no such file", params), Pair)
