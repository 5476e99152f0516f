"""Nets of nets, layers and directions: each `cavs.run` pulls what the one below pushed, as interpreted vertex by vertex."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import BATCHES, GRAPHS, star
from tests.programs import E, H
from tests.truth import assert_close, batch_inputs, sched, with_gradients


def test_layers_pull_what_layers_push() -> None:
    program, graphs = vp.MultiLayerLSTM(H, E, layers=3, dtype=jnp.float64), BATCHES["chains"]
    params, want = program.init(jax.random.key(0)), batch_inputs("LSTM", "chains")
    got = program.run(params, sched("chains"), want)
    for i, layer in enumerate(params):
        want = cavs.interpret(program.layer(i).vertex_function(), layer, graphs, want)
    assert_close(got, want, 1e-12)
    ends = program.run(params, sched("chains"), batch_inputs("LSTM", "chains"), select=sched("chains").roots)
    assert_close(ends, want[sched("chains").roots], 1e-12)


def test_up_and_down_is_two_interpreted_nets() -> None:
    program = vp.BidirectionalTreeLSTM(H, E, jnp.float64)
    graphs = GRAPHS["trees"][2:4] + star(3)
    params, x = program.init(jax.random.key(0)), np.random.default_rng(1).standard_normal((graphs.num_vertices, E))
    scheds = cavs.schedule(graphs), cavs.schedule(graphs.reversed())

    def naive(params: Any, x: Any) -> Any:
        up = cavs.interpret(program.up.vertex_function(), params["up"], graphs, x)
        down = cavs.interpret(program.down.vertex_function(), params["down"], graphs.reversed(), jnp.concatenate([x, up], 1))
        return jnp.concatenate([up, down], 1)

    want, want_gradients = with_gradients(naive, params, x)
    got, got_gradients = with_gradients(jax.jit(lambda p, x: program.run(p, *scheds, x)), params, x)
    assert_close(got, want, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-10)
    assert_close(program.run(params, *scheds, x, select=np.array([10, 0])), want[np.array([10, 0])], 1e-12)


def test_layers_and_directions_of_dagnn() -> None:
    """A layer each way over a DAG with several roots, read out: as interpreted, vertex by vertex."""
    graphs = GRAPHS["shared children"] + GRAPHS["two of one vertex"]
    up, down = vp.DAGNN(H, E, jnp.float64), vp.DAGNN(H, H, jnp.float64)
    params = [p.init(jax.random.key(i)) for i, p in enumerate((up, down))]
    x = np.random.default_rng(1).standard_normal((graphs.num_vertices, E))

    def net(run: Any, way_up: Any, way_down: Any) -> Any:
        return run(down.vertex_function(), params[1], way_down, run(up.vertex_function(), params[0], way_up, x))

    want, scheds = net(cavs.interpret, graphs, graphs.reversed()), [cavs.schedule(g) for g in (graphs, graphs.reversed())]
    assert_close(cavs.readout(net(cavs.run, *scheds), scheds[0], "max"), jnp.stack([want[:9].max(0), *want[9:]]), 1e-12)
