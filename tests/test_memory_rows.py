"""`recompute` computes the loss of a vocabulary by blocks of rows, where the equations treat all rows alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import cavs
from cavs._jaxpr.inline import inlined
from cavs._memory.fit import compiled_step
from cavs._remat.rows import in_blocks_of_rows, largest_loss
from cavs.memory import recompute
from tests.slow import few
from tests.truth import assert_close

N, T, D, V = 16, 65, 8, 130  # logits of 1.08 MB
RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=of)) for name, of in {"e": (V, D), "w": (D, V), "b": (V,), "u": (D, D)}.items()}
WORDS = jnp.asarray(RNG.integers(0, V, (N, T)))


def body(p, words):
    return jnp.tanh(p["e"][words] @ p["u"])


def logits_of(p, words):
    return body(p, words) @ p["w"]


def losses_of(logits, words):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)[..., 0]


def shifted_with_a_bias(p, words):
    return losses_of((logits_of(p, words) + p["b"])[:, :-1], words[:, 1:]).mean()


def masked(p, words):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(p, words) + p["b"], words)
    return (losses * (words > 5)).sum() / (words > 5).sum()


def smoothed(p, words):
    labels = optax.smooth_labels(jax.nn.one_hot(words, V, dtype=p["w"].dtype), 0.1)
    return optax.softmax_cross_entropy(logits_of(p, words), labels).mean()


def flat(p, words):
    return losses_of(logits_of(p, words).reshape(-1, V), words.reshape(-1)).mean()


def flat_before(p, words):
    return losses_of(body(p, words).reshape(-1, D) @ p["w"], words.reshape(-1)).mean()


def tied(p, words):
    return losses_of(jnp.einsum("btd,vd->btv", body(p, words), p["e"]), words).mean()


def with_other_terms(p, words):
    logits = logits_of(p, words)
    losses = losses_of(logits, words) + 1e-3 * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.exp((losses.sum(1) / (words > 3).sum(1)).mean() / 9) + (p["u"] ** 2).sum()


def by_comparison(p, words):
    logits = logits_of(p, words)
    at = jnp.where(words[..., None] == jnp.arange(V), logits, 0).sum(-1)
    return (jax.nn.logsumexp(logits, -1) - at).mean()


def transposed(p, words):
    logits = jnp.swapaxes(logits_of(p, words), 0, 1)
    return (jax.nn.logsumexp(logits, -1) * words.T).sum()


DIVIDED = [
    shifted_with_a_bias, masked, smoothed, flat, flat_before, tied, with_other_terms, by_comparison, transposed,
]  # fmt: skip


def over_rows(f):
    def loss(p, words):
        return losses_of(f(logits_of(p, words)), words).mean()

    return loss


MIXED = {
    "normalised over rows": over_rows(lambda x: x - x.mean((0, 1))),
    "softmax over rows": over_rows(lambda x: jax.nn.softmax(x, 0)),
    "running sums": over_rows(lambda x: jnp.cumsum(x, 0) / N),
    "sorted": over_rows(lambda x: jnp.sort(x, 0)),
    "turned around": over_rows(lambda x: x[::-1]),
    "moved by one row": over_rows(lambda x: jnp.roll(x, 1, 0)),
    "rows of another order": over_rows(lambda x: x[jnp.arange(N) ** 2 % N]),
    "a product over rows": over_rows(lambda x: jnp.einsum("btv,cb->ctv", x, jnp.ones((N, N)))),
    "numbers of rows": over_rows(lambda x: x * lax.broadcasted_iota(x.dtype, x.shape, 0)),
    "sequences of other rows": lambda p, words: losses_of(logits_of(p, words).reshape(T, N, V), words.T).mean(),
    "the largest of all": lambda p, words: logits_of(p, words).max(),
    "two sums": lambda p, words: (x := logits_of(p, words)).sum() * (x**2).mean(),
    "its own sum": lambda p, words: ((x := logits_of(p, words)) / (x**2).sum()).sum(),
    "a named value": over_rows(lambda x: checkpoint_name(x, "logits")),
}


def is_divided(loss):
    closed = jax.make_jaxpr(loss)(PARAMS, WORDS)
    return in_blocks_of_rows(closed) is not closed


@pytest.mark.parametrize("loss", few(DIVIDED, 2))
def test_the_loss_of_a_vocabulary_is_the_same_by_blocks(loss):
    assert is_divided(loss)
    want = jax.jit(jax.value_and_grad(loss))(PARAMS, WORDS)
    for budget in (None, "min"):
        assert_close(jax.jit(jax.value_and_grad(recompute(loss, budget)))(PARAMS, WORDS), want, 1e-12)
    direction = jax.tree.map(jnp.cos, PARAMS)

    def second(f):
        return jax.jit(lambda p: jax.jvp(lambda p: jax.grad(f)(p, WORDS), (p,), (direction,)))(PARAMS)

    assert_close(second(recompute(loss)), second(loss), 1e-11)
    several = jnp.stack([WORDS, WORDS[::-1]])
    batched = [jax.jit(jax.vmap(jax.grad(f), (None, 0)))(PARAMS, several) for f in (recompute(loss), loss)]
    assert_close(*batched, 1e-12)


@pytest.mark.parametrize("name", few(MIXED, 7))
def test_equations_that_mix_rows_stay_as_they_are(name):
    loss = MIXED[name]
    if name != "numbers of rows":  # which are a value outside, of which a block reads its rows
        assert not is_divided(loss)
    want = jax.jit(jax.value_and_grad(loss))(PARAMS, WORDS)
    assert_close(jax.jit(jax.value_and_grad(recompute(loss)))(PARAMS, WORDS), want, 1e-11)


def test_integers_may_be_counted_with_the_loss_and_logits_may_not_be_returned():
    def counting(p, words):
        logits = logits_of(p, words)
        return losses_of(logits, words).mean(), {"right": (logits.argmax(-1) == words).sum(), "more": 2 * words}

    def returning(p, words):
        logits = logits_of(p, words)
        return losses_of(logits, words).mean(), logits

    for loss, divided in ((counting, True), (returning, False)):
        assert is_divided(loss) == divided
        found, want = (jax.jit(jax.value_and_grad(f, has_aux=True))(PARAMS, WORDS) for f in (recompute(loss), loss))
        assert_close(found, want, 1e-12)


def test_logits_are_neither_kept_nor_computed_twice(tmp_path):
    plan = recompute(tied).plan(PARAMS, WORDS)
    logits = N * T * V * 8
    assert plan.plain_bytes > logits > 4 * plan.bytes and plan.flops == 0
    ours, plain = (compiled_step(jax.jit(jax.value_and_grad(f)), (PARAMS, WORDS), {})[1] for f in (recompute(tied), tied))
    assert ours < 0.7 * plain and plan.peak == ours
    plan.save(tmp_path / "plan.json")
    assert recompute(tied, plan=tmp_path / "plan.json").plan(PARAMS, WORDS).rows() == plan.rows()


def test_a_block_has_rows_from_everywhere():
    """If devices have consecutive rows each, none moves between them."""
    closed = jax.make_jaxpr(flat)(PARAMS, WORDS)
    head = largest_loss(*inlined(closed.jaxpr, ("jit", "pjit")))
    assert sorted(v.aval.size // T // N for v in head.rows) == [1, D] and head.count == 2
    for v in head.rows:  # words are flat: a row is T of them
        numbers = np.arange(v.aval.size).reshape(v.aval.shape)
        blocks = head.block(v, numbers)
        for k in range(2):
            np.testing.assert_array_equal(np.ravel(blocks[k]), np.ravel(numbers.reshape(N, -1)[k::2]))


def test_blocks_are_for_large_logits_alone():
    few = WORDS[:4]
    closed = jax.make_jaxpr(flat)(PARAMS, few)
    assert in_blocks_of_rows(closed) is closed


def test_parts_of_a_batch_have_blocks_of_rows_of_their_own():
    def total(p, words):
        return losses_of(logits_of(p, words), words).sum()

    words = jnp.concatenate([WORDS, WORDS[::-1]])
    plan = cavs.memory.plan(recompute(total), PARAMS, words, parts=2)
    assert_close(
        jax.jit(jax.value_and_grad(plan.loss))(PARAMS, words), jax.jit(jax.value_and_grad(total))(PARAMS, words), 1e-12
    )
