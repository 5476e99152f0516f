"""What `run` computes is what `interpret` computes, vertex by vertex; and `interpret` is what the equations say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.helpers import (
    BATCHES,
    CASES,
    GRAPHS,
    PROGRAMS,
    READY,
    E,
    H,
    assert_close,
    batch_inputs,
    sched,
    truth,
)


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_run_is_interpret(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, sched(batch), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12 * program.tolerance)


@pytest.mark.parametrize(("name", "batch"), READY)
def test_run_is_interpret_in_float32(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    params, inputs = jax.tree.map(lambda x: x.astype(np.float32), (program.params, batch_inputs(name, batch)))
    got = cavs.run(program.function, params, sched(batch), inputs)
    assert got.dtype == np.float32
    assert_close(got.astype(np.float64), truth(name, batch)[0], 1e-5)


@pytest.mark.parametrize("how", [{"policy": "serial"}, {"exact": True}])
@pytest.mark.parametrize(
    ("name", "batch"), [("BinaryTreeLSTM", "binary"), ("no inputs", "very wide"), ("three kinds", "three kinds")]
)
def test_every_way_to_schedule_gives_the_same_values(name: str, batch: str, how: dict[str, Any]) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, cavs.schedule(BATCHES[batch], **how), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12)


@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "ChildSumTreeLSTM", "named"])
def test_an_empty_batch_gives_no_rows(name: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, cavs.schedule(GRAPHS["trees"][:0]), program.inputs(0))
    want = truth(name, program.batches[0])[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: ((0, *x.shape[1:]), x.dtype), want)


def test_padded_inputs_give_padded_values() -> None:
    program, schedule, rows = PROGRAMS["named"], sched("binary"), BATCHES["binary"].num_vertices
    padded = jax.tree.map(schedule.pad, batch_inputs("named", "binary"))
    got = cavs.run(program.function, program.params, schedule, padded)
    assert {x.shape[0] for x in jax.tree.leaves(got)} == {schedule.shape.vertices}
    assert_close(jax.tree.map(lambda x: x[:rows], got), truth("named", "binary")[0], 1e-12)
    assert not any(x[rows:].any() for x in jax.tree.leaves(got))


def test_kinds_may_be_ignored() -> None:
    graphs, program = BATCHES["leaf and inner"], PROGRAMS["RvNN"]
    function = cavs.VertexFunction(vp.RvNN(H, E, jnp.float64), state=(H,), arity=2)
    got = cavs.run(function, program.params, cavs.schedule(graphs, kinds=False), batch_inputs("RvNN", "leaf and inner"))
    assert_close(got, truth("RvNN", "leaf and inner")[0], 1e-12)


def test_layers_pull_what_layers_push() -> None:
    program, graphs = vp.MultiLayerLSTM(H, E, layers=3, dtype=jnp.float64), BATCHES["chains"]
    params, want = program.init(jax.random.key(0)), batch_inputs("LSTM", "chains")
    got = program.run(params, sched("chains"), want)
    for i, layer in enumerate(params):
        want = cavs.interpret(program.layer(i).vertex_function(), layer, graphs, want)
    assert_close(got, want, 1e-12)
    ends = program.run(params, sched("chains"), batch_inputs("LSTM", "chains"), at=sched("chains").roots)
    assert_close(ends, want[sched("chains").roots], 1e-12)


def test_equal_programs_share_their_vertex_function() -> None:
    assert vp.LSTM(H, E).vertex_function() is vp.LSTM(H, E).vertex_function()
    assert vp.LSTM(H, E).vertex_function() is not vp.LSTM(H, H).vertex_function()


# ---- `interpret` against the equations, written again in NumPy ----


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def test_interpret_of_binary_tree_lstm_is_its_equations() -> None:
    name, graphs = "BinaryTreeLSTM, inputs everywhere", BATCHES["binary"]
    p, x = jax.tree.map(np.asarray, (PROGRAMS[name].params, batch_inputs(name, "binary")))
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))

    def state(r: int) -> tuple[Any, Any]:
        kids = [state(k + base[r]) for k in graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]]]
        z = x[r] @ p["w_iou"] + sum((h for _, h in kids), np.zeros(H)) @ p["u_iou"] + p["b_iou"]
        c = _sigmoid(z[:H]) * np.tanh(z[2 * H :])
        for child_c, child_h in kids:
            c = c + _sigmoid(x[r] @ p["w_f"] + child_h @ p["u_f"] + p["b_f"]) * child_c
        return c, _sigmoid(z[H : 2 * H]) * np.tanh(c)

    want = np.stack([state(r)[1] for r in range(graphs.num_vertices)])
    np.testing.assert_allclose(truth(name, "binary")[0], want, rtol=1e-13, atol=1e-13)


def test_interpret_of_chains_is_their_equations() -> None:
    graphs = BATCHES["chains"]
    p, x = jax.tree.map(np.asarray, (PROGRAMS["LSTM"].params, batch_inputs("LSTM", "chains")))
    q = jax.tree.map(np.asarray, vp.GRU(H, E, jnp.float64).init(jax.random.key(2)))
    want_lstm, want_gru = [], []
    for r in range(graphs.num_vertices):
        if r in graphs.vertex_offsets:
            h, c, s = np.zeros(H), np.zeros(H), np.zeros(H)
        i, f, o, g = np.split(x[r] @ p["w"] + h @ p["u"] + p["b"], 4)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        h = _sigmoid(o) * np.tanh(c)
        want_lstm.append(h)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x[r] @ q["w"] + q["b"], 3), np.split(s @ q["u"], 3)
        z = _sigmoid(x_z + h_z)
        s = (1 - z) * np.tanh(x_n + _sigmoid(x_r + h_r) * (h_n + q["d"])) + z * s
        want_gru.append(s)
    np.testing.assert_allclose(truth("LSTM", "chains")[0], want_lstm, rtol=1e-13, atol=1e-13)
    got = cavs.interpret(vp.GRU(H, E, jnp.float64).vertex_function(), q, graphs, x)
    np.testing.assert_allclose(got, want_gru, rtol=1e-13, atol=1e-13)
