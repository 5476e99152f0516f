"""`cavs.memory.plan` of arrays: any network, in parts along its axis of samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs.memory import BudgetError
from tests.slow import few
from tests.truth import assert_close

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(16, 64)) / 4), "u": jnp.asarray(RNG.normal(size=(64, 64)) / 8)}


def net(params, x):
    return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["u"])


def regression(params, batch):
    x, y = batch
    return cavs.data.mean((net(params, x).sum(1) - y) ** 2)


def sequences(params, batch):
    """Samples along the second axis of one array, labels along the first, and a table that all samples share."""
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ params["w"]), h), jnp.zeros((batch["x"].shape[1], 64)), batch["x"])
    rows = (h @ params["u"] + batch["table"][batch["y"]]) ** 2
    return cavs.data.total(rows) + 0.1 * (params["w"] ** 2).sum()


def masked(params, batch):
    """A key for each sample, and a mean over labels that exist."""
    x, y, keys = batch
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (64,)))(keys)
    return cavs.data.mean((net(params, x) * keep).sum(1) ** 2, where=y >= 0)


X, Y = RNG.normal(size=(48, 16)), RNG.integers(-1, 3, 48)
CASES = {
    "a pair": (regression, (X, Y.astype(float)), 0),
    "axes and what is shared": (
        sequences,
        {"x": RNG.normal(size=(5, 48, 16)), "y": Y % 3, "table": RNG.normal(size=(3, 64))},
        {"x": 1, "y": 0, "table": None},
    ),
    "keys and labels": (masked, (X, Y, jax.random.split(jax.random.key(1), 48)), 0),
    "from the end": (lambda p, x: cavs.data.total(net(p, x.T) ** 3), X.T.copy(), -1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", few([4, 1, 48], 1))
def test_parts_of_arrays_have_the_loss_and_gradient_of_all(name, parts):
    loss, batch, axis = CASES[name]
    plan = cavs.memory.plan(loss, PARAMS, batch, axis=axis, parts=parts)
    assert plan.parts == parts
    assert_close(
        jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(batch)), jax.value_and_grad(loss)(PARAMS, batch), 1e-10
    )


@pytest.mark.parametrize("name", few(CASES, 2))
def test_a_budget_for_arrays_is_kept_by_the_compiled_step(name):
    loss, batch, axis = CASES[name]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, batch))
    whole = cavs.memory.plan(loss, *shapes, axis=axis).peak
    plan = cavs.memory.plan(loss, PARAMS, batch, whole // 2, axis=axis)
    compiled = jax.jit(jax.value_and_grad(plan.loss)).lower(PARAMS, batch).compile(plan.compiler_options)
    assert plan.parts > 1 and compiled.memory_analysis().temp_size_in_bytes == plan.peak <= whole // 2
    with pytest.raises(BudgetError, match="for 48 parts. The parameters"):
        cavs.memory.plan(loss, PARAMS, batch, 8, axis=axis)


def test_a_plan_of_arrays_is_saved_and_prints(tmp_path):
    plan = cavs.memory.plan(regression, PARAMS, CASES["a pair"][1], parts=4)
    assert str(plan).startswith("48 samples, 4 parts, engine none: ")
    plan.save(tmp_path / "plan.json")
    assert cavs.memory.load(tmp_path / "plan.json", regression, PARAMS, CASES["a pair"][1]).parts == 4


MISUSE = {
    "got a str": ("abc", {}),
    "got no graphs; expected": (cavs.from_lengths([3])[:0], {}),
    "got graphs among other things; .* collate=": ((cavs.from_lengths([3]), X), {}),
    r"arrays of \[3, 48\] samples along axis 0; expected one number": ((X, Y[:3]), {}),
    "expected the axis of samples of each array. Write None": (X, {"axis": 2}),
    r"arrays of \[0\] samples": (X[:0], {}),
    r"axis: got \(0, 0, 0\); expected an int": ((X, Y), {"axis": (0, 0, 0)}),
    "parts: got 5 for 48 samples; expected one of": ((X, Y), {"parts": 5}),
    "segments: got 4 for arrays": ((X, Y), {"segments": 4}),
    "at once, and .* in two parts; expected a sum over samples": ((X, Y), {"parts": 2}),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_says_what_to_write(message):
    batch, how = MISUSE[message]
    with pytest.raises((TypeError, ValueError), match=f"plan: .*{message}"):
        cavs.memory.plan(lambda p, b: net(p, b[0]).mean(), PARAMS, batch, **how)


def test_a_batch_that_parts_do_not_divide_is_refused():
    plan = cavs.memory.plan(regression, PARAMS, CASES["a pair"][1], parts=4)
    with pytest.raises(ValueError, match="batch: got 6 samples; expected a multiple of 4"):
        plan.batch((X[:6], Y[:6]))


def test_a_loss_that_is_no_scalar_is_refused_in_one_part_too():
    with pytest.raises(TypeError, match=r"plan: loss: got float\d+\[48\]; expected a float scalar"):
        cavs.memory.plan(lambda p, b: net(p, b).sum(1), PARAMS, X, parts=1)


def test_arrays_of_64_bits_are_planned_in_the_32_bits_that_jax_computes_with():
    """JAX warns about shapes of 64 bits, which are an error here."""
    with jax.enable_x64(False):
        assert cavs.memory.plan(lambda w, x: (x @ w).sum(), np.ones(3), np.ones((4, 3)), 4096).parts == 1
