"""Models that are more than one vertex function over one batch, and the graphs they run over, against equations and torch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli, vertex_programs as vp
from tests.helpers import BATCHES, GRAPHS, PROGRAMS, E, H, assert_close, batch_inputs, sched, star, truth


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def children_of(graphs: cavs.Graphs, g: int) -> list[list[int]]:
    rows = range(*graphs.vertex_offsets[g : g + 2])
    return [graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]].tolist() for r in rows]


def gradients(fn: Any, *args: Any, seed: int = 0) -> tuple[Any, Any]:
    """The value of `fn`, and the gradients of a random linear function of it."""
    out, vjp = jax.vjp(fn, *jax.tree.map(jnp.asarray, args))
    return out, vjp(jnp.asarray(np.random.default_rng(seed).standard_normal(out.shape)))


# ---- graphs ----


def test_pyramids_combine_neighbours() -> None:
    graphs = vp.TDRNN.graphs([3, 1], words=[7, 8, 9, 5])
    assert children_of(graphs, 0) == [[], [], [], [0, 1], [1, 2], [3, 4]]
    assert children_of(graphs, 1) == [[]]
    assert graphs.input_id is not None and graphs.input_id.tolist() == [7, 8, 9, -1, -1, -1, 5]
    assert cavs.schedule(graphs).roots.tolist() == [5, 6]
    assert np.diff(vp.TDLSTM.graphs(np.arange(1, 30)).vertex_offsets).tolist() == [n * (n + 1) // 2 for n in range(1, 30)]


def test_lattices_put_words_between_characters() -> None:
    graphs = vp.LatticeLSTM.graphs([4, 2], [[(0, 2), (1, 2), (0, 3)], np.zeros((0, 2), int)])
    assert children_of(graphs, 0) == [[], [0], [1, 4, 5], [2, 6], [0], [1], [0]]
    assert children_of(graphs, 1) == [[], [0]]
    assert graphs.kind is not None and graphs.kind.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0]


def test_target_words_read_all_source_words() -> None:
    chains, pairs = vp.EncoderDecoder.graphs([3, 1], [2, 2])
    assert children_of(chains, 0) == [[], [0], [1]]
    assert children_of(pairs, 0) == [[], [], [], [2, 0, 1], [3, 0, 1, 2]]
    assert children_of(pairs, 1) == [[], [0], [1, 0]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: vp.TDRNN.graphs([2, 0]), r"lengths is \[2, 0\], wanted a 1-d array of integers >= 1"),
        (lambda: vp.TDRNN.graphs([2], words=[1]), "words has 1 entries, wanted 2"),
        (lambda: vp.LatticeLSTM.graphs([3], [[(0, 1), (2, 3)]]), r"words\[0\] is .* wanted pairs 0 <= first < last < 3"),
        (lambda: vp.LatticeLSTM.graphs([3], []), "words has 0 entries, wanted 1"),
        (lambda: vp.EncoderDecoder.graphs([3], [1, 2]), r"got lengths \[3\] and \[1, 2\]"),
        (lambda: vp.EncoderDecoder.graphs([0], [1]), "all >= 1"),
    ],
)
def test_bad_lengths_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# ---- the programs are their equations, written again in NumPy ----


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
    assert_close(PROGRAMS["TDRNN"].params, params, 0)
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


# ---- encoder-decoder ----

PAIRS = ([1, 5, 3], [3, 4, 1])


def pair_inputs() -> tuple[vp.EncoderDecoder, Any, Any, Any, Any, Any]:
    """Program, parameters, chains, pairs, and word vectors of both."""
    program = vp.EncoderDecoder(H, E, jnp.float64)
    chains, pairs = program.graphs(*PAIRS)
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((g.num_vertices, E)) for g in (chains, pairs))
    return program, program.init(jax.random.key(3)), chains, pairs, x, y


@functools.cache
def pair_outputs() -> Any:
    """What the program pushes and its gradients, compiled, from padded inputs with NaN in the padding."""
    program, params, chains, pairs, x, y = pair_inputs()
    source, both = cavs.schedule(chains), cavs.schedule(pairs)
    run = jax.jit(lambda p, x, y: program.run(p, source, both, x, y))
    got, (d, d_x, d_y) = gradients(
        lambda p, x, y: run(p, x, y)[: pairs.num_vertices], params, source.pad(x, np.nan), both.pad(y, np.nan)
    )
    return got, (d, d_x[: len(x)], d_y[: len(y)])


def test_encoder_decoder_runs_as_two_interpreted_nets() -> None:
    program, params, chains, pairs, x, y = pair_inputs()

    def naive(params: Any, x: Any, y: Any) -> Any:
        states = cavs.interpret(program.encoder_function(), params["encoder"], chains, x)
        leaves = np.flatnonzero(pairs.height == 0)
        rows = {name: jnp.zeros((len(y), H)).at[leaves].set(s) for name, s in states.items()}
        return cavs.interpret(program.vertex_function(), params, pairs, {"x": y, **rows})

    want, want_gradients = gradients(naive, params, x, y)
    got, got_gradients = pair_outputs()
    assert_close(got, want, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-10)


def test_encoder_decoder_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    _, params, _, _, x, y = pair_inputs()

    def weight(w: Any, gates: bool = False) -> Any:  # ours are (in, out) and i, f, o, g; torch's (out, in) and i, f, g, o
        w = np.asarray(w)
        i, f, o, g = np.split(w, 4, -1) if gates else (w, *[w[..., :0]] * 3)
        return torch.nn.Parameter(torch.tensor(np.concatenate([i, f, g, o], -1).T.copy()))

    def fill(module: Any, p: Any, names: tuple[str, ...]) -> Any:
        for name, w in zip(names, (p["w"], p["u"], p["b"], np.zeros(4 * H)), strict=True):
            setattr(module, name, weight(w, gates=True))
        return module

    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    encoder = fill(torch.nn.LSTM(E, H).double(), params["encoder"], tuple(k + "_l0" for k in kinds))
    # torch's cell has [x, a] at its input: the lower half of our u belongs there.
    u = params["u"]
    cell = {"w": jnp.concatenate([params["w"], u[H:]]), "u": u[:H], "b": params["b"]}
    decoder = fill(torch.nn.LSTMCell(E + H, H).double(), cell, kinds)
    key, query, out, score = (torch.nn.Linear(1, 1, bias=False) for _ in range(4))
    for layer, name in ((key, "key"), (query, "query"), (out, "out")):
        layer.weight = weight(params[name])
    score.weight = weight(params["score"][:, None])

    xs, ys = (torch.tensor(rows, requires_grad=True) for rows in (x, y))
    outs, s_at, y_at = [], 0, 0
    for n, m in zip(*PAIRS, strict=True):
        states, (h, c) = encoder(xs[s_at : s_at + n, None])
        states, h, c, a = states[:, 0], h[0], c[0], torch.zeros(1, H, dtype=torch.float64)
        outs.append(torch.zeros(n, H, dtype=torch.float64))
        for t in range(m):
            h, c = decoder(torch.cat([ys[None, y_at + n + t], a], 1), (h, c))
            p = score(torch.tanh(query(h) + key(states))).softmax(0)
            a = torch.tanh(out(torch.cat([h, (p * states).sum(0, keepdim=True)], 1)))
            outs.append(a)
        s_at, y_at = s_at + n, y_at + n + m
    want = torch.cat(outs)
    ct = np.random.default_rng(0).standard_normal(want.shape)
    want.backward(torch.tensor(ct))

    got, (d, d_x, d_y) = pair_outputs()
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    pairs_of_gradients = [
        (d_x, xs.grad),
        (d_y, ys.grad),
        *((weight(d[name]).detach(), layer.weight.grad) for layer, name in ((key, "key"), (query, "query"), (out, "out"))),
        (d["score"][None], score.weight.grad),
        (weight(d["encoder"]["w"], gates=True).detach(), encoder.weight_ih_l0.grad),
        (weight(d["encoder"]["u"], gates=True).detach(), encoder.weight_hh_l0.grad),
        (weight(d["encoder"]["b"], gates=True).detach(), encoder.bias_ih_l0.grad),
        (weight(jnp.concatenate([d["w"], d["u"][H:]]), gates=True).detach(), decoder.weight_ih.grad),
        (weight(d["u"][:H], gates=True).detach(), decoder.weight_hh.grad),
        (weight(d["b"], gates=True).detach(), decoder.bias_ih.grad),
    ]
    for ours, theirs in pairs_of_gradients:
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


# ---- top-down, resets, layers and directions ----


def test_up_and_down_is_two_interpreted_nets() -> None:
    program = vp.BidirectionalTreeLSTM(H, E, jnp.float64)
    graphs = GRAPHS["trees"][2:4] + star(3)
    params, x = program.init(jax.random.key(0)), np.random.default_rng(1).standard_normal((graphs.num_vertices, E))
    scheds = cavs.schedule(graphs), cavs.schedule(graphs.reversed())

    def naive(params: Any, x: Any) -> Any:
        up = cavs.interpret(program.up.vertex_function(), params["up"], graphs, x)
        down = cavs.interpret(program.down.vertex_function(), params["down"], graphs.reversed(), jnp.concatenate([x, up], 1))
        return jnp.concatenate([up, down], 1)

    want, want_gradients = gradients(naive, params, x)
    got, got_gradients = gradients(jax.jit(lambda p, x: program.run(p, *scheds, x)), params, x)
    assert_close(got, want, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-10)
    assert_close(program.run(params, *scheds, x, at=np.array([10, 0])), want[np.array([10, 0])], 1e-12)


def test_resets_cut_chains() -> None:
    program, plain = vp.ResetLSTM(H, E, jnp.float64), vp.LSTM(H, E, jnp.float64)
    params, reset = program.init(jax.random.key(0)), np.zeros(25, bool)
    reset[[0, 4, 5, 17, 24]] = True
    x = np.random.default_rng(1).standard_normal((25, E))
    whole, pieces = cavs.schedule(cavs.from_lengths([12, 13])), cavs.schedule(cavs.from_lengths([4, 1, 7, 5, 7, 1]))

    def whole_run(p: Any, x: Any) -> Any:
        return cavs.run(program.vertex_function(), p, whole, {"x": x, "reset": reset})

    got = gradients(jax.jit(whole_run), params, x)
    want = gradients(jax.jit(lambda p, x: cavs.run(plain.vertex_function(), p, pieces, x)), params, x)
    assert_close(got, want, 1e-12)


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


def test_dagnn_stays_bounded_through_hundreds_of_levels() -> None:
    program = vp.DAGNN(H, E, jnp.float64)
    x = 100 * np.random.default_rng(0).standard_normal((500, E))
    h = cavs.run(program.vertex_function(), program.init(jax.random.key(0)), sched("very long chain"), x)
    assert np.abs(h).max() <= 1


# ---- readouts ----


def readout_truth(values: Any, offsets: Any, reduce: str, score: Any) -> Any:
    pieces = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if reduce == "softmax":
        return jnp.stack([jnp.tensordot(jax.nn.softmax(score[p]), values[p], 1) for p in pieces])
    return jnp.stack([getattr(values[p], reduce)(0) for p in pieces])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "softmax"])
def test_readouts_are_loops_over_graphs(reduce: str) -> None:
    graphs, schedule = BATCHES["chains"], sched("chains")
    rng = np.random.default_rng(0)
    values, score = rng.standard_normal((graphs.num_vertices, 4, 2)), 20 * rng.standard_normal(graphs.num_vertices)
    wanted, want_gradients = gradients(lambda v, s: readout_truth(v, graphs.vertex_offsets, reduce, s), values, score)

    def ours(values: Any, score: Any) -> Any:
        return cavs.readout(values, schedule, reduce, score=score if reduce == "softmax" else None)

    got, got_gradients = gradients(ours, values, score)
    assert_close(got, wanted, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-12)
    # Padded, poisoned, under jit, and of a pytree: the same.
    padded = [schedule.pad(a, np.nan) for a in (values, score)]
    inside = jax.jit(lambda s, v, w: cavs.readout({"a": v}, s, reduce, score=w if reduce == "softmax" else None)["a"])
    poisoned, (d_values, d_score) = gradients(lambda v, w: inside(schedule, v, w), *padded)
    assert_close(poisoned, wanted, 1e-12)
    rows = graphs.num_vertices
    assert_close((d_values[:rows], d_score[:rows]), want_gradients, 1e-12)


def test_readout_refuses_what_does_not_fit() -> None:
    schedule, rows = sched("chains"), BATCHES["chains"].num_vertices
    h = np.zeros((rows, 2))
    with pytest.raises(TypeError, match=r"sched is a Graphs, wanted a cavs\.Schedule"):
        cavs.readout(h, BATCHES["chains"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce is 'median', wanted one of 'sum', 'mean', 'max', 'softmax'"):
        cavs.readout(h, schedule, "median")
    with pytest.raises(ValueError, match="'softmax' with no score"):
        cavs.readout(h, schedule, "softmax")
    with pytest.raises(ValueError, match="'sum' with a score"):
        cavs.readout(h, schedule, score=h[:, 0])
    with pytest.raises(ValueError, match=f"wanted a first axis of {rows} or"):
        cavs.readout(h[1:], schedule)
    with pytest.raises(ValueError, match="a score is 1-d"):
        cavs.readout(h, schedule, "softmax", score=h)


# ---- the command line ----


def test_a_translator_is_trained_and_translates(tmp_path: Any, capsys: Any) -> None:
    words, said = ["eins", "zwei", "drei", "vier"], ["one", "two", "three", "four"]
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 4, n) for n in (1, 3, 2, 3, 2, 1, 3, 2, 1, 3, 2, 3)]
    lines = [" ".join(words[i] for i in s) + "\t" + " ".join(said[i] for i in s) for s in numbers]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines * 4) + "\n")
    known = [line.split("\t") for line in lines[:3]]
    (tmp_path / "new.txt").write_text("\n".join(source for source, _ in known) + "\n\nfremd\n")
    out = str(tmp_path / "run")
    given = ["--hidden", "24", "--batch", "8", "--epochs", "60", "--lr", "0.01", "--dropout", "0", "--dev", lines[0]]
    (tmp_path / "pairs.txt").write_text("one cell\n")
    assert cli.main(["train", "--task", "nmt", str(tmp_path / "pairs.txt")]) == 2
    assert "line 1 has 1 cells, wanted `source TAB target`" in capsys.readouterr().err
    given[-1] = str(tmp_path / "pairs.tsv")
    assert cli.main(["train", "--task", "nmt", str(tmp_path / "pairs.tsv"), "--out", out, *given]) == 0
    capsys.readouterr()
    assert cli.main(["predict", out, str(tmp_path / "new.txt")]) == 0
    got = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in got] == ["0", "1", "2", "3"]
    assert [line[1] for line in got[:3]] == [target for _, target in known]
