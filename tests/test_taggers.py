"""The taggers equal the per-vertex interpreter in value and every gradient; `test_bench_peers` compares them with PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.truth import assert_close

F64 = jnp.float64

TAGGER = vp.BiLSTMTagger(labels=4, hidden=5, inputs=6, mlp=3, layers=2, dtype=F64)

SPELLER = vp.CharBiLSTMTagger(labels=4, hidden=5, inputs=6, characters=9, char_inputs=3, mlp=7, dtype=F64)

LENGTHS = [3, 1, 4]

SPELLINGS = [3, 1, 2]


def chains(lengths: list[int]) -> tuple[cavs.Graphs, cavs.Graphs]:
    """Chains, and the reversed chains."""
    graphs = cavs.from_lengths(np.array(lengths, int))
    return graphs, graphs.reversed()


def loss(logits):
    """A weighted sum of the logits, with a different weight for each."""
    return jnp.vdot(logits, jnp.sin(1.0 + jnp.arange(logits.size)).reshape(logits.shape))


def gradients(run, params, x):
    """The gradients of `loss` with respect to (params, x), and the logits."""

    def f(params, x):
        y = run(params, x)
        return loss(y), y

    return jax.grad(f, argnums=(0, 1), has_aux=True)(params, jnp.asarray(x))


# ---- what the programs compute ----


def tagger():
    """Parameters, inputs, and the gradients and logits of the tagger."""
    graphs, back = chains(LENGTHS)
    params = TAGGER.init(jax.random.key(0))
    x = np.array(jax.random.normal(jax.random.key(1), (graphs.num_vertices, 6), F64))
    run = jax.jit(lambda params, x: TAGGER.run(params, cavs.schedule(graphs), cavs.schedule(back), x))
    return params, x, gradients(run, params, x)


def speller():
    """Parameters, inputs, spellings, characters, and the gradients and logits of the tagger that spells."""
    scheds = [cavs.schedule(g) for g in (*chains(LENGTHS), *chains(SPELLINGS))]
    params = SPELLER.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(LENGTHS), 6))
    spelled = rng.integers(-1, len(SPELLINGS) - 1, len(x))  # no vertex reads the last spelling
    spelled[0] = 2
    characters = rng.integers(0, 9, sum(SPELLINGS))

    @jax.jit
    def run(params, x):
        return SPELLER.run(params, *scheds[:2], x, SPELLER.vectors(params, *scheds[2:], characters), spelled)

    return params, x, spelled, characters, gradients(run, params, x)


# ---- the interpreter ----


def by_vertex(program: vp.BiLSTM, params: list, graphs: cavs.Graphs, back: cavs.Graphs, x, ends: bool = False):
    """`BiLSTM.run` by the per-vertex interpreter, without a schedule."""
    for i, layer in enumerate(params):
        F = program.layer(i).vertex_function()
        h, g = cavs.interpret(F, layer["forward"], graphs, x), cavs.interpret(F, layer["backward"], back, x)
        last = ends and i == len(params) - 1
        firsts, lasts = graphs.vertex_offsets[:-1], graphs.vertex_offsets[1:] - 1
        x = jnp.concatenate([h[lasts], g[firsts]] if last else [h, g], -1)
    return x


def test_the_tagger_equals_the_interpreter():
    graphs, back = chains(LENGTHS)
    params, x, got = tagger()

    def naive(params, x):
        h = by_vertex(TAGGER.bilstm, params["bilstm"], graphs, back, x)
        return jnp.tanh(h @ params["w"] + params["b"]) @ params["v"] + params["c"]

    want = gradients(naive, params, x)
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


def test_the_tagger_that_spells_equals_the_interpreter():
    (graphs, back), (words, words_back) = chains(LENGTHS), chains(SPELLINGS)
    params, x, spelled, characters, got = speller()

    def naive(params, x):
        letters = params["characters"][characters]
        vectors = by_vertex(SPELLER.spell, params["spell"], words, words_back, letters, ends=True)
        p = params["tagger"]
        rows = jnp.concatenate([x, vectors])[np.where(spelled >= 0, len(x) + spelled, np.arange(len(x)))]
        h = by_vertex(SPELLER.tagger.bilstm, p["bilstm"], graphs, back, rows)
        return jnp.tanh(h @ p["w"] + p["b"]) @ p["v"] + p["c"]

    want = gradients(naive, params, x)
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


# ---- dropout ----


@pytest.mark.parametrize("rate", [-0.1, 20, np.nan])
def test_rates_that_are_no_probabilities(rate):
    with pytest.raises(ValueError, match=f"dropout: rate: got {rate}; expected a probability, 0 to 1. Write 0.2 for 20 %"):
        vp.dropout(jnp.ones(3), rate, jax.random.key(0))


def test_the_key_determines_dropout():
    graphs, back = chains([4, 2])
    program = vp.BiLSTMTagger(labels=3, hidden=4, inputs=4, dropout=0.5)
    params, x = program.init(jax.random.key(0)), jnp.ones((6, 4), jnp.float32)
    scheds = cavs.schedule(graphs), cavs.schedule(back)
    first, again, other = (program.run(params, *scheds, x, key=jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert abs(np.asarray(first - other)).max() > 1e-3
    assert abs(np.asarray(first - program.run(params, *scheds, x))).max() > 1e-3
    value, gradient = jax.value_and_grad(lambda x: vp.dropout(x, 1.0, jax.random.key(0)).sum())(jnp.ones(3))
    assert value == 0 and gradient.tolist() == [0, 0, 0]  # a rate of 1 keeps nothing


def test_gradients_of_a_letter_that_is_read_often_add_up_in_32_bits():
    """bfloat16 cannot count to 257."""
    graphs, back = map(cavs.schedule, chains([1] * 1200))
    letters = np.zeros(graphs.shape.vertices, np.int32)

    def gradient(dtype):
        program = vp.CharBiLSTMTagger(labels=2, hidden=2, inputs=2, characters=2, char_inputs=1, mlp=2)
        params = jax.tree.map(lambda x: x.astype(dtype), program.init(jax.random.key(0)))
        of = lambda table: program.vectors(params | {"characters": table}, graphs, back, letters).astype(jnp.float32).sum()  # noqa: E731
        return np.float32(jax.jit(jax.grad(of))(params["characters"]))

    np.testing.assert_allclose(gradient(jnp.bfloat16), gradient(jnp.float32), rtol=0.1)
