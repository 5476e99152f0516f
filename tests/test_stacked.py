"""`_feed.stacked`: several training steps in one dispatch, equal to as many steps one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._feed.packed import pack
from cavs._feed.stacked import stacked
from cavs.vertex_programs import BinaryTreeLSTM
from tests.odd_graphs import joined, random_binary_tree


def test_stacked_steps_are_the_steps_one_by_one() -> None:
    program = BinaryTreeLSTM(hidden=4, inputs=4)
    F = program.vertex_function()
    graphs = joined([random_binary_tree(n, seed=n) for n in (5, 9, 3, 8, 4, 6, 7, 9, 30, 31)])
    table = jax.random.normal(jax.random.key(1), (7, 4), jnp.float32)

    def step(params, batch):
        sched, words = batch.unpack()

        def loss(params):
            return (cavs.run(F, params, sched, table[words], select=sched.roots) ** 2).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def prepared():
        shapes = []
        for i in range(0, 10, 2):
            sched = cavs.schedule(graphs[i : i + 2], shapes=shapes)
            words = np.arange(graphs[i : i + 2].num_vertices, dtype=np.int32) % 7
            yield pack((sched, sched.pad(words)))

    one, many = jax.jit(step), jax.jit(lambda params, batches: jax.lax.scan(step, params, batches))
    params = other = jax.tree.map(lambda x: x.astype(jnp.float32), program.init(jax.random.key(0)))
    alone, together, sizes = [], [], []
    for batch in prepared():
        params, value = one(params, batch)
        alone.append(float(value))
    for batches in stacked(prepared(), 3):
        other, values = many(other, batches)
        together += np.asarray(values).tolist()
        sizes.append(len(values))
    assert sizes == [3, 1, 1]
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), other, params)


def test_batches_of_a_shape_keep_their_order_and_none_is_lost() -> None:
    rng = np.random.default_rng(0)
    batches = [{"x": np.full(rng.integers(1, 4), i, np.int32)} for i in range(50)]
    seen = []
    for stack in stacked(iter(batches), 4):
        assert stack["x"].ndim == 2 and stack["x"].shape[0] in (1, 4)
        seen += [(x.size, x[0]) for x in stack["x"]]
    assert sorted(i for _, i in seen) == list(range(50))
    for size in (1, 2, 3):
        assert [i for n, i in seen if n == size] == [b["x"][0] for b in batches if b["x"].size == size]
    endless = stacked(({"x": np.zeros(2)} for _ in itertools.count()), 4)
    assert next(endless)["x"].shape == (4, 2)
    assert list(stacked([], 4)) == []


def test_stacked_refuses() -> None:
    with pytest.raises(ValueError, match="stacked: count: got 0; expected an int >= 1"):
        stacked([], 0)
    with pytest.raises(TypeError, match="stacked: batches: got a leaf of type .*Array.*; expected NumPy arrays.*device_put"):
        next(stacked([jnp.zeros(3)], 2))
