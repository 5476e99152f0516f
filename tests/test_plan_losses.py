"""`cavs.memory.plan` changes no loss: what it returns is that of the whole batch, or the loss is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import joined, random_binary_tree
from tests.slow import few
from tests.truth import assert_close

H = 4
PROGRAM = cavs.vertex_programs.TreeFC(H, jnp.float64)
F = PROGRAM.vertex_function()
GRAPHS = joined([random_binary_tree(2 + i % 7, seed=i) for i in range(32)])
LABELS = np.random.default_rng(0).integers(-1, 4, len(GRAPHS))
ROWS = np.sin(np.arange(GRAPHS.num_vertices * H)).reshape(-1, H)
PARAMS = {"cell": PROGRAM.init(jax.random.key(0)), "out": jnp.cos(jnp.arange(H * 4.0)).reshape(H, 4)}


def collate(sample):
    """Each graph has a label, which is -1 for some, and each vertex has a row of its own."""
    starts = GRAPHS.vertex_offsets
    rows = np.concatenate([ROWS[starts[i] : starts[i + 1]] for i in sample.numbers])
    return {"sched": sample.sched, "x": sample.sched.pad(rows), "label": LABELS[sample.numbers]}


def hidden(p, b):
    return cavs.run(F, p["cell"], b["sched"], b["x"], select=b["sched"].roots)


def losses(h, p, b):
    """(graphs,) cross entropies."""
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ p["out"]), jnp.maximum(b["label"], 0)[:, None], 1)[:, 0]


def normalised(p, b):
    h = hidden(p, b)
    return losses((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3), p, b).sum()


def twice(p, b):
    h = cavs.run(F, p["cell"], b["sched"], b["x"])
    return losses(cavs.run(F, p["cell"], b["sched"], jnp.tanh(h), select=b["sched"].roots), p, b).sum()


# More totals and means are in `tests/test_sub_batches.py`.
SAME = {"mean of labelled": lambda p, b: cavs.data.mean(losses(hidden(p, b), p, b), where=b["label"] >= 0), "two runs": twice}
CHANGED = {
    "mean of jnp": lambda p, b: losses(hidden(p, b), p, b).mean(),
    "batch norm": normalised,
    "square": lambda p, b: losses(hidden(p, b), p, b).sum() ** 2,
    "maximum": lambda p, b: hidden(p, b).max(),
}


@pytest.mark.parametrize("name", few(SAME, 1))
def test_the_value_and_the_gradients_are_those_of_the_whole_batch(name):
    plans = [cavs.memory.plan(SAME[name], PARAMS, GRAPHS, parts=n, collate=collate) for n in (1, 4)]
    want, got = (jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(GRAPHS)) for plan in plans)
    assert_close(got, want, 1e-12)


@pytest.mark.parametrize("name", few(CHANGED, 2))
def test_a_loss_that_parts_would_change_is_refused(name):
    whole = cavs.memory.plan(CHANGED[name], PARAMS, GRAPHS, parts=1, collate=collate)
    assert whole.parts == 1
    with pytest.raises(
        ValueError, match=r"plan: loss: got .* for 16 graphs at once, and .* in two parts; .*cavs.data.mean\(losses"
    ):
        cavs.memory.plan(CHANGED[name], PARAMS, GRAPHS, parts=4, collate=collate)


@pytest.mark.parametrize("dtype", few([jnp.float32, jnp.bfloat16], 1))
def test_rounding_is_no_difference(dtype):
    """Also with shapes in place of parameters, and with parts of one graph."""
    program = cavs.vertex_programs.TreeFC(H, dtype)
    shapes = jax.eval_shape(lambda: {"cell": program.init(jax.random.key(0)), "out": jnp.zeros((H, 4), dtype)})

    def loss(p, b):
        h = cavs.run(program.vertex_function(), p["cell"], b["sched"], b["x"].astype(dtype), select=b["sched"].roots)
        return losses(h, p, b).astype(jnp.float32).sum()

    assert cavs.memory.plan(loss, shapes, GRAPHS, parts=32, collate=collate).parts == 32
    with pytest.raises(ValueError, match="plan: loss: got"):
        cavs.memory.plan(lambda p, b: loss(p, b) / len(b["label"]), shapes, GRAPHS, parts=32, collate=collate)


def test_totals_that_parts_cannot_add_up_are_refused():
    def mixed(p, b):
        found = losses(hidden(p, b), p, b)
        return found.sum() + cavs.data.mean(found)

    with pytest.raises(TypeError, match="plan: loss: got values of one part of a batch together with cavs.data.total"):
        cavs.memory.plan(mixed, PARAMS, GRAPHS, parts=2, collate=collate)
