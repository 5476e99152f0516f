"""A graph does not see its neighbours in a batch, nor labels its schedule; `test_run` fills padding with NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import GRAPHS
from tests.programs import PROGRAMS
from tests.truth import assert_close


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
