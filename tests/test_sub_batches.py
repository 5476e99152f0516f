"""`cavs.memory.sub_batched`: the loss and gradients of a batch in parts, in the memory of a part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from bench import graphs as generators
from bench.ours import graphs_of
from cavs import vertex_programs as vp
from cavs._memory import sub_batches
from tests.odd_graphs import joined, random_binary_tree
from tests.schedule_checks import schedules

H = 8
PROGRAM = vp.BinaryTreeLSTM(H, H)
F = PROGRAM.vertex_function()


def random_trees(count):
    return joined([random_binary_tree(2 + i % 7, seed=i) for i in range(count)])


def loss(params, batch):
    sched, x = batch
    h = cavs.run(F, params["cell"], sched, params["scale"] * x, select=sched.roots)
    return jnp.sum(jnp.tanh(h @ params["out"]) ** 2)


def with_count(params, batch):
    return loss(params, batch), {"graphs": jnp.float32(batch[0].shape.graphs)}


@pytest.fixture(scope="module")
def case():
    graphs = random_trees(12)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(graphs.num_vertices, H)).astype(np.float32)
    params = {"cell": PROGRAM.init(jax.random.key(0)), "out": jnp.asarray(rng.normal(size=(H, 3)), jnp.float32), "scale": 1.1}
    return graphs, x, params


def stacks_of(graphs, x, count):
    offsets = graphs.vertex_offsets
    parts, batches = cavs.memory.deal(graphs, count), []
    for part, (_, sched) in zip(parts, schedules(graphs, parts, shapes=[]), strict=True):
        rows = np.concatenate([x[offsets[i] : offsets[i + 1]] for i in part])
        batches.append((sched, sched.pad(rows)))
    return [jax.tree.map(lambda *xs: np.stack(xs), *batches)]  # the parts have one shape


@pytest.mark.parametrize("count", [4])
def test_the_loss_and_the_gradients_are_those_of_the_whole_batch(case, count):
    graphs, x, params = case
    sched = cavs.schedule(graphs)
    value, grads = jax.value_and_grad(loss)(params, (sched, sched.pad(x)))
    total = cavs.memory.sub_batched(loss)
    got, got_grads = jax.jit(jax.value_and_grad(total))(params, stacks_of(graphs, x, count))
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(total(params, stacks_of(graphs, x, count)), value, rtol=1e-5)


def test_the_gradients_of_the_batches_and_the_aux(case):
    graphs, x, params = case
    stacks = stacks_of(graphs, x, 3)
    total = cavs.memory.sub_batched(with_count, has_aux=True)
    rows = [stack[1] for stack in stacks]

    def of_rows(rows):
        return total(params, [(stack[0], r) for stack, r in zip(stacks, rows, strict=True)])

    (_, aux), got = jax.value_and_grad(of_rows, has_aux=True)(rows)
    assert aux["graphs"] == len(graphs)
    for stack, by_rows in zip(stacks, got, strict=True):
        for i in range(by_rows.shape[0]):
            sched = jax.tree.map(lambda a, i=i: a[i], stack[0])
            expected = jax.grad(lambda r, sched=sched: loss(params, (sched, r)))(jnp.asarray(stack[1][i]))
            np.testing.assert_allclose(by_rows[i], expected, rtol=2e-4, atol=1e-5)


def test_a_batch_in_parts_takes_less_memory():
    graphs = random_trees(256)
    x = np.ones((graphs.num_vertices, H), np.float32)
    params = {"cell": PROGRAM.init(jax.random.key(0)), "out": jnp.ones((H, 3)), "scale": 1.0}

    def temporary(count):
        step = jax.jit(jax.value_and_grad(cavs.memory.sub_batched(loss)))
        return step.lower(params, stacks_of(graphs, x, count)).compile().memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]

    assert temporary(8) < temporary(1) / 2


def test_deal_gives_each_part_as_many_graphs_and_about_as_many_vertices(case):
    graphs, _, _ = case
    parts = cavs.memory.deal(graphs, 4)
    assert sorted(parts.ravel()) == list(range(len(graphs))) and parts.shape == (4, 3)
    sizes = np.diff(graphs.vertex_offsets)
    assert np.ptp(sizes[parts].sum(1)) <= sizes.max()
    with pytest.raises(ValueError, match=r"deal: count: got 5 for 12 graphs"):
        cavs.memory.deal(graphs, 5)


def test_deals_by_height_have_fewer_levels_and_about_as_many_rows():
    graphs = graphs_of(generators.sst_like(np.random.default_rng(0), 512))
    sizes, levels = np.diff(graphs.vertex_offsets), graphs._facts.levels
    parts, plain = cavs.memory.deal(graphs, 4), sub_batches._in_turn(sizes, 4)
    assert sorted(parts.ravel()) == list(range(512)) and parts.shape == plain.shape
    assert levels[parts].max(1).sum() < 0.85 * levels[plain].max(1).sum()
    assert sizes[parts].sum(1).max() < 1.01 * sizes[plain].sum(1).max()


def test_misuse_says_what_to_write(case):
    graphs, x, params = case
    stacks = stacks_of(graphs, x, 3)
    with pytest.raises(TypeError, match=r"sub_batched: loss: got 3"):
        cavs.memory.sub_batched(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"sub_batched: stacks: got a tuple|expected a list of stacked"):
        cavs.memory.sub_batched(loss)(params, ())
    for wrong, got in ((lambda params, batch: jnp.ones(2), "float64[2]"), (with_count, "tuple")):
        with pytest.raises(TypeError, match=re.escape(f"sub_batched: loss: got {got}; expected a float scalar")):
            cavs.memory.sub_batched(wrong)(params, stacks)


def test_batches_may_hold_keys():
    def noisy(params, batch):
        return jnp.sum(params * jax.random.normal(batch, (2,), jnp.float32))

    keys = jax.random.split(jax.random.key(0), 3)
    grads = jax.grad(cavs.memory.sub_batched(noisy))(jnp.ones(2, jnp.float32), [keys])
    np.testing.assert_allclose(grads, sum(jax.random.normal(key, (2,), jnp.float32) for key in keys), rtol=1e-6)
