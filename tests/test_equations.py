"""Ready programs are their papers' equations, written again in NumPy, and keep the promises of their docstrings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import BATCHES, children_of
from tests.programs import PROGRAMS, E, H
from tests.truth import assert_close, batch_inputs, sched, truth, with_gradients


def sigmoid(x: Any) -> Any:
    """Of arrays of NumPy."""
    return 1 / (1 + np.exp(-x))


def test_interpret_of_binary_tree_lstm_is_its_equations() -> None:
    name, graphs = "BinaryTreeLSTM, inputs everywhere", BATCHES["binary"]
    p, x = jax.tree.map(np.asarray, (PROGRAMS[name].params, batch_inputs(name, "binary")))
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))

    def state(r: int) -> tuple[Any, Any]:
        kids = [state(k + base[r]) for k in graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]]]
        z = x[r] @ p["w_iou"] + sum((h for _, h in kids), np.zeros(H)) @ p["u_iou"] + p["b_iou"]
        c = sigmoid(z[:H]) * np.tanh(z[2 * H :])
        for child_c, child_h in kids:
            c = c + sigmoid(x[r] @ p["w_f"] + child_h @ p["u_f"] + p["b_f"]) * child_c
        return c, sigmoid(z[H : 2 * H]) * np.tanh(c)

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
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        want_lstm.append(h)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x[r] @ q["w"] + q["b"], 3), np.split(s @ q["u"], 3)
        z = sigmoid(x_z + h_z)
        s = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * (h_n + q["d"])) + z * s
        want_gru.append(s)
    np.testing.assert_allclose(truth("LSTM", "chains")[0], want_lstm, rtol=1e-13, atol=1e-13)
    got = cavs.interpret(vp.GRU(H, E, jnp.float64).vertex_function(), q, graphs, x)
    np.testing.assert_allclose(got, want_gru, rtol=1e-13, atol=1e-13)


def test_td_lstm_is_its_equations() -> None:
    p, x = jax.tree.map(np.asarray, (PROGRAMS["TDLSTM"].params, batch_inputs("TDLSTM", "pyramids")))
    graphs, want = BATCHES["pyramids"], []
    for g in range(len(graphs)):
        first, states = int(graphs.vertex_offsets[g]), []
        for v, kids in enumerate(children_of(graphs, g)):
            h, c = x[first + v], np.zeros(H)
            if kids:
                (h_l, c_l), (h_r, c_r) = (states[k] for k in kids)
                i, o, f_l, f_r, u = np.split(h_l @ p["u"][:H] + h_r @ p["u"][H:] + p["b"], 5)
                c = sigmoid(i) * np.tanh(u) + sigmoid(f_l) * c_l + sigmoid(f_r) * c_r
                h = sigmoid(o) * np.tanh(c)
            states.append((h, c))
        want += [h for h, _ in states]
    np.testing.assert_allclose(truth("TDLSTM", "pyramids")[0], want, rtol=1e-13, atol=1e-13)


def test_td_rnn_over_trees_is_tree_fc() -> None:
    rnn, fc, batch = vp.TDRNN(H, jnp.float64), vp.TreeFC(H, jnp.float64), BATCHES["pyramids"]
    params, x = fc.init(jax.random.key(1)), batch_inputs("TDRNN", "pyramids")
    assert_close(rnn.init(jax.random.key(1)), params, 0)
    ours, theirs = (cavs.run(p.vertex_function(), params, cavs.schedule(batch), x) for p in (rnn, fc))
    assert_close(ours, theirs, 1e-14)


def test_lattice_lstm_is_its_equations() -> None:
    p, x = jax.tree.map(np.asarray, (PROGRAMS["LatticeLSTM"].params, batch_inputs("LatticeLSTM", "lattices")))
    want = []
    for n, words in ((1, []), (7, [(0, 2), (0, 3), (2, 3), (1, 6), (3, 6), (3, 6)]), (3, [])):
        xs, x = x[: n + len(words)], x[n + len(words) :]
        h, c, hs, cs = np.zeros(H), np.zeros(H), [], []
        for e in range(n):
            i, f, o, g = np.split(xs[e] @ p["w"] + h @ p["u"] + p["b"], 4)
            i, g, total, weights = sigmoid(i), np.tanh(g), 0.0, 0.0
            for k, (b, last) in enumerate(words):
                if last == e:
                    i_w, f_w, g_w = np.split(xs[n + k] @ p["w_word"] + hs[b] @ p["u_word"] + p["b_word"], 3)
                    c_w = sigmoid(f_w) * cs[b] + sigmoid(i_w) * np.tanh(g_w)
                    link = sigmoid(xs[e] @ p["w_link"] + c_w @ p["u_link"] + p["b_link"])
                    total, weights = total + np.exp(link) * c_w, weights + np.exp(link)
            some = any(last == e for _, last in words)
            c = (total + np.exp(i) * g) / (weights + np.exp(i)) if some else sigmoid(f) * c + i * g
            h = sigmoid(o) * np.tanh(c)
            hs.append(h)
            cs.append(c)
        want += [*hs, *np.zeros((len(words), H))]
    np.testing.assert_allclose(truth("LatticeLSTM", "lattices")[0], np.array(want), rtol=1e-13, atol=1e-13)


def test_dagnn_is_its_equations() -> None:
    p, x = jax.tree.map(np.asarray, (PROGRAMS["DAGNN"].params, batch_inputs("DAGNN", "wide")))
    graphs, want = BATCHES["wide"], np.zeros((BATCHES["wide"].num_vertices, H))
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    for r in np.argsort(graphs.height, kind="stable"):
        kids = want[graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]] + base[r]]
        weight = np.exp(kids @ p["s"])
        m = weight @ kids / weight.sum() if len(kids) else np.zeros(H)
        (x_r, x_z, x_n), (m_r, m_z, m_n) = np.split(x[r] @ p["w"] + p["b"], 3), np.split(m @ p["u"], 3)
        z = sigmoid(x_z + m_z)
        want[r] = (1 - z) * np.tanh(x_n + sigmoid(x_r + m_r) * (m_n + p["d"])) + z * m
    np.testing.assert_allclose(truth("DAGNN", "wide")[0], want, rtol=1e-12, atol=1e-12)


def test_dagnn_stays_bounded_through_hundreds_of_levels() -> None:
    program = vp.DAGNN(H, E, jnp.float64)
    x = 100 * np.random.default_rng(0).standard_normal((500, E))
    h = cavs.run(program.vertex_function(), program.init(jax.random.key(0)), sched("very long chain"), x)
    assert np.abs(h).max() <= 1


def test_resets_cut_chains() -> None:
    program, plain = vp.ResetLSTM(H, E, jnp.float64), vp.LSTM(H, E, jnp.float64)
    params, reset = program.init(jax.random.key(0)), np.zeros(25, bool)
    reset[[0, 4, 5, 17, 24]] = True
    x = np.random.default_rng(1).standard_normal((25, E))
    whole, pieces = cavs.schedule(cavs.from_lengths([12, 13])), cavs.schedule(cavs.from_lengths([4, 1, 7, 5, 7, 1]))

    def whole_run(p: Any, x: Any) -> Any:
        return cavs.run(program.vertex_function(), p, whole, {"x": x, "reset": reset})

    got = with_gradients(jax.jit(whole_run), params, x)
    want = with_gradients(jax.jit(lambda p, x: cavs.run(plain.vertex_function(), p, pieces, x)), params, x)
    assert_close(got, want, 1e-12)


def test_equal_programs_share_their_vertex_function() -> None:
    assert vp.LSTM(H, E).vertex_function() is vp.LSTM(H, E).vertex_function()
    assert vp.LSTM(H, E).vertex_function() is not vp.LSTM(H, H).vertex_function()
    # A program that inherits is no equal of the one it inherits from.
    assert vp.LSTM(H, E).vertex_function() is not vp.ResetLSTM(H, E).vertex_function()
    assert vp.TreeFC(H).vertex_function() is not vp.TDRNN(H).vertex_function()
