"""The encoder-decoder equals two interpreted nets (PyTorch's: `test_bench_peers`); a translator is trained and translates."""

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


@pytest.mark.slow
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


def test_no_pairs_and_lengths_that_are_none() -> None:
    """No pairs raised errors from inside of NumPy."""
    for none in ([], np.zeros(0, int)):
        assert [len(graphs) for graphs in vp.EncoderDecoder.graphs(none, none)] == [0, 0]
    assert vp.greedy(lambda *_: np.zeros(0, int), cavs.from_lengths([]), np.arange(3), 0) == []
    for source, target in ((3, 4), ([1.5], [2.0]), (["a"], [2]), ([1, 2], [1]), ([0], [1])):
        with pytest.raises(ValueError, match="source, target: got .*; expected two 1-d arrays of integers, of equal size"):
            vp.EncoderDecoder.graphs(source, target)  # type: ignore


def test_a_translator_is_trained_and_translates(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    words, said = ["eins", "zwei", "drei", "vier"], ["one", "two", "three", "four"]
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 4, n) for n in (1, 3, 2, 3, 2, 1, 3, 2, 1, 3, 2, 3)]
    lines = [" ".join(words[i] for i in s) + "\t" + " ".join(said[i] for i in s) for s in numbers]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines * 4) + "\n")
    known = [line.split("\t") for line in lines[:3]]
    (tmp_path / "new.txt").write_text("\n".join(source for source, _ in known) + "\n\nfremd\n")
    path, out = str(tmp_path / "pairs.tsv"), str(tmp_path / "run")
    given = ["--hidden", "24", "--batch", "8", "--epochs", "25", "--lr", "0.02", "--dropout", "0", "--dev", path]
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
        patch.setitem(sys.modules, "sacrebleu.metrics", None)  # another test may have imported it
        assert cli.main(["evaluate", out, path, "--json"]) == 2
    assert "sacrebleu is not installed" in capsys.readouterr().err
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    assert cli.main(["evaluate", out, path, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = best_of(out)
    assert values["nll"] == pytest.approx(best["loss"] / best["count"], rel=1e-5)
    assert values["words"] == best["count"] and values["chrf"] > 90 and "tok:none" in values["bleu_signature"]
