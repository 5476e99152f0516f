"""The encoder-decoder equals two interpreted nets and PyTorch's modules; a translator is trained and translates."""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli, vertex_programs as vp
from tests.programs import E, H
from tests.small_run import best_of
from tests.truth import assert_close, with_gradients

PAIRS = ([1, 5, 3], [3, 4, 1])


def pair_inputs() -> tuple[vp.EncoderDecoder, Any, Any, Any, Any, Any]:
    """The program, its parameters, chains, pairs, and word vectors of both."""
    program = vp.EncoderDecoder(H, E, jnp.float64)
    chains, pairs = program.graphs(*PAIRS)
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((g.num_vertices, E)) for g in (chains, pairs))
    return program, program.init(jax.random.key(3)), chains, pairs, x, y


@functools.cache
def pair_outputs() -> Any:
    """The pushes of the compiled program and their gradients, for inputs with NaN in the padding."""
    program, params, chains, pairs, x, y = pair_inputs()
    source, both = cavs.schedule(chains), cavs.schedule(pairs)
    run = jax.jit(lambda p, x, y: program.run(p, source, both, x, y))
    got, (d, d_x, d_y) = with_gradients(
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

    want, want_gradients = with_gradients(naive, params, x, y)
    got, got_gradients = pair_outputs()
    assert_close(got, want, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-10)


def test_encoder_decoder_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    _, params, _, _, x, y = pair_inputs()

    def weight(w: Any, gates: bool = False) -> Any:  # from (in, out) and gates i, f, o, g to torch's (out, in) and i, f, g, o
        w = np.asarray(w)
        i, f, o, g = np.split(w, 4, -1) if gates else (w, *[w[..., :0]] * 3)
        return torch.nn.Parameter(torch.tensor(np.concatenate([i, f, g, o], -1).T.copy()))

    def fill(module: Any, p: Any, names: tuple[str, ...]) -> Any:
        for name, w in zip(names, (p["w"], p["u"], p["b"], np.zeros(4 * H)), strict=True):
            setattr(module, name, weight(w, gates=True))
        return module

    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    encoder = fill(torch.nn.LSTM(E, H).double(), params["encoder"], tuple(k + "_l0" for k in kinds))
    # The input of torch's cell is [x, a]: the lower half of `u` belongs there.
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
    for got_gradient, want_gradient in pairs_of_gradients:
        np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-10, atol=1e-10)


def test_a_translator_is_trained_and_translates(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    words, said = ["eins", "zwei", "drei", "vier"], ["one", "two", "three", "four"]
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 4, n) for n in (1, 3, 2, 3, 2, 1, 3, 2, 1, 3, 2, 3)]
    lines = [" ".join(words[i] for i in s) + "\t" + " ".join(said[i] for i in s) for s in numbers]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines * 4) + "\n")
    known = [line.split("\t") for line in lines[:3]]
    (tmp_path / "new.txt").write_text("\n".join(source for source, _ in known) + "\n\nfremd\n")
    path, out = str(tmp_path / "pairs.tsv"), str(tmp_path / "run")
    given = ["--hidden", "24", "--batch", "8", "--epochs", "60", "--lr", "0.01", "--dropout", "0", "--dev", path]
    (tmp_path / "pairs.txt").write_text("one cell\n")
    assert cli.main(["train", "--task", "nmt", str(tmp_path / "pairs.txt")]) == 2
    assert "line 1: got 'one cell'; expected `source TAB target`" in capsys.readouterr().err
    assert cli.main(["train", "--task", "nmt", path, "--out", out, *given]) == 0
    capsys.readouterr()
    assert cli.main(["predict", out, str(tmp_path / "new.txt")]) == 0
    got = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in got] == ["0", "1", "2", "3", "4"]
    assert [line[1] for line in got[:4]] == [*(target for _, target in known), ""]

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sacrebleu", None)
        assert cli.main(["evaluate", out, path, "--json"]) == 2
    assert "sacrebleu is not installed" in capsys.readouterr().err
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    assert cli.main(["evaluate", out, path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = best_of(out)
    assert values["nll"] == pytest.approx(best["loss"] / best["count"], rel=1e-5)
    assert values["words"] == best["count"] and values["chrf"] > 90 and "tok:none" in values["bleu_signature"]
