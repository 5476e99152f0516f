"""`cavs.data.step(memory=...)`: a training step within a budget, of graphs or of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs.memory import BudgetError
from tests.truth import assert_close

RNG = np.random.default_rng(0)
H = 8
GRAPHS = cavs.from_lengths([9, 5] * 16)
PROGRAM = cavs.vertex_programs.ElmanRNN(H, H, jnp.float64)
F = PROGRAM.vertex_function()


def collate(sample):
    return sample.sched, np.ones((sample.sched.shape.vertices, H))


def of_graphs(params, batch):
    sched, x = batch
    return cavs.data.mean(cavs.run(F, params, sched, x, select=sched.roots).sum(1) ** 2)


def of_arrays(params, batch):
    x, y = batch
    h = jnp.tanh(jnp.tanh(x @ params["w"]) @ params["u"])
    return cavs.data.mean((h.sum(1) - y) ** 2) + 0.1 * (params["w"] ** 2).sum()


ARRAYS = RNG.normal(size=(64, 16)), RNG.normal(size=64)
WEIGHTS = {"w": jnp.asarray(RNG.normal(size=(16, 32)) / 4), "u": jnp.asarray(RNG.normal(size=(32, 32)) / 8)}
CASES = {
    "graphs": (of_graphs, PROGRAM.init(jax.random.key(0)), GRAPHS, {"collate": collate}),
    "arrays": (of_arrays, WEIGHTS, ARRAYS, {}),
}


def momentum(state, batch, loss):
    params, moments, count = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return (jax.tree.map(lambda p, m: p - 0.01 * m, params, moments), moments, count + 1), {"loss": value}


def stepping(name, memory, fun=momentum):
    loss, params, batch, how = CASES[name]
    state = params, jax.tree.map(jnp.zeros_like, params), 0
    return cavs.data.step(fun, memory=memory, loss=loss, **how), state, batch


@pytest.mark.parametrize("name", CASES)
def test_a_step_within_a_budget_is_the_step(name):
    """The budget is one for the whole step, as compiled: fewer parts would need more. What was measured is what runs."""
    step, state, batch = stepping(name, "1GiB")
    whole = step.plan(state, batch)
    assert whole.parts == 1
    for memory in (int(0.6 * whole.peak), "min"):
        small = stepping(name, memory)[0]
        found, want = state, state
        for _ in range(3):
            found, metrics = small(found, batch)
            want, known = step(want, batch)
            assert_close((found, metrics), (want, known), 1e-10)
        plan = small.plan(state, batch)
        assert plan.parts > 1 and plan.peak < whole.peak and str(plan.parts) in str(plan)
        if memory != "min":
            sizes = {choice.divisor: size for choice, size in plan._batch.sizes.items()}
            assert plan.peak <= memory and all(size > memory for parts, size in sizes.items() if parts < plan.parts)
            (_, runs), *others = small._known.values()
            measured = runs.lower(state, plan.batch(batch)).compile().memory_analysis().temp_size_in_bytes
            assert not others and measured == plan.peak


def test_other_batches_have_their_own_plans():
    step, state, (x, y) = stepping("arrays", "min")
    state, _ = step(state, (x, y))
    step(state, (x[:6], y[:6]))
    assert [step.plan(state, (x[:n], y[:n])).parts > 1 for n in (64, 6)] == [True, True]


def not_separable(params, batch):
    x, y = batch
    h = x @ params["w"]
    return cavs.data.mean((((h - h.mean(0)) / h.std(0)).sum(1) - y) ** 2)


def test_misuse_says_what_to_write():
    _, state, batch = stepping("arrays", "min")
    with pytest.raises(ValueError, match="loss: got .* in two parts; .*batch statistics .* a step without memory"):
        cavs.data.step(momentum, memory="min", loss=not_separable)(state, batch)
    with pytest.raises(BudgetError, match=r"step: memory: got 8 B; expected at least .* Write memory=\d+"):
        stepping("arrays", 8)[0](state, batch)
    with pytest.raises(TypeError, match="step: memory: got it alone; expected memory and loss together. Write loss=loss, too"):
        cavs.data.step(momentum, memory="min")
    with pytest.raises(TypeError, match="step: loss: got it alone; .* Write memory='2GiB', too"):
        cavs.data.step(loss=of_arrays)(momentum)
    with pytest.raises(ValueError, match="step: memory: got 'much'"):
        cavs.data.step(momentum, memory="much", loss=of_arrays)
    step, state, _ = stepping("graphs", "min")
    with pytest.raises(TypeError, match="step: batch: got batches of a Loader"):
        step(state, next(iter(cavs.data.Loader(GRAPHS, 4, collate=collate))))
