"""Padding is inert: nothing that stands in it reaches a value or a gradient; and a graph does not see its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import BATCHES, GRAPHS
from tests.programs import CASES, PROGRAMS
from tests.truth import assert_close, batch_inputs, jitted, padded, sched


def _poison(x: np.ndarray) -> np.ndarray:
    """What padding rows are filled with: NaN, and for integers a number out of any range."""
    fill = np.nan if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min if x.dtype != bool else True
    return np.asarray(fill, x.dtype)


@pytest.mark.parametrize(("name", "batch"), [c for c in CASES if PROGRAMS[c[0]].rows is not None and c[1] != "very long chain"])
def test_poisoned_padding_changes_no_bit(name: str, batch: str) -> None:
    inputs, rows = batch_inputs(name, batch), BATCHES[batch].num_vertices
    clean, poisoned = padded(sched(batch), inputs), padded(sched(batch), inputs, _poison)
    assert sched(batch).shape.vertices > rows
    a, b = (jitted(name)(PROGRAMS[name].params, sched(batch), x, rows) for x in (clean, poisoned))
    for want, got in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if got.dtype != jax.dtypes.float0:
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
            assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "ChildSumTreeLSTM", "lazy push"])
def test_a_graph_alone_and_in_a_batch(name: str) -> None:
    program = PROGRAMS[name]
    batch = GRAPHS["trees"] + GRAPHS["shared children"]
    inputs = program.inputs(batch.num_vertices)

    def gradient(graphs: cavs.Graphs, x: np.ndarray, ct: np.ndarray) -> tuple[jax.Array, jax.Array]:
        schedule = cavs.schedule(graphs)
        y, vjp = jax.vjp(lambda x: cavs.run(program.function, program.params, schedule, x), jnp.asarray(x))
        return y, vjp(jnp.asarray(ct))[0]

    ct = np.random.default_rng(5).standard_normal((batch.num_vertices, 5))
    together = gradient(batch, inputs, ct)
    for g in (1, 5):
        rows = slice(*batch.vertex_offsets[g : g + 2])
        alone = gradient(batch[g], inputs[rows], ct[rows])
        assert_close(alone, tuple(x[rows] for x in together), 1e-12)


def test_labels_in_a_small_schedule_reach_no_gradient() -> None:
    """Zeros that XLA does not know are made from the integers of the schedule, whatever these are."""
    graphs, program = cavs.from_lengths([5], label=np.full(5, -1)), PROGRAMS["LSTM"]
    with_labels, without = cavs.schedule(graphs, fields=("label",)), cavs.schedule(graphs)
    assert np.asarray(with_labels.data).min() == -1 and np.asarray(without.data).min() == 0
    x = without.pad(program.inputs(5))
    gradient = jax.jit(jax.grad(lambda p, s: cavs.run(program.function, p, s, x).sum()))
    assert_close(gradient(program.params, with_labels), gradient(program.params, without), 1e-12)
