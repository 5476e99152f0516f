"""Gradients with respect to parameters and inputs are those of `interpret` under `jax.grad`."""

import jax
import pytest

from tests.helpers import BATCHES, CASES, PROGRAMS, assert_close, batch_inputs, jitted, sched, truth


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_gradients_are_those_of_interpret(name: str, batch: str) -> None:
    program, rows = PROGRAMS[name], BATCHES[batch].num_vertices
    padded = jax.tree.map(sched(batch).pad, batch_inputs(name, batch))
    (params, inputs), pushes = jitted(name)(program.params, sched(batch), padded, rows)
    want_pushes, want = truth(name, batch)
    assert_close(jax.tree.map(lambda x: x[:rows], pushes), want_pushes, 1e-12 * program.tolerance)
    assert_close((params, jax.tree.map(lambda x: x[:rows], inputs)), want, 1e-10 * program.tolerance)
