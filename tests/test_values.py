"""What `run` computes is what `interpret` computes, vertex by vertex."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import BATCHES, GRAPHS
from tests.programs import CASES, PROGRAMS, READY, E, H
from tests.truth import assert_close, batch_inputs, sched, truth


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_run_is_interpret(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, sched(batch), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12 * program.tolerance)


@pytest.mark.parametrize(("name", "batch"), READY)
def test_run_is_interpret_in_float32(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    params, inputs = jax.tree.map(lambda x: x.astype(np.float32), (program.params, batch_inputs(name, batch)))
    got = cavs.run(program.function, params, sched(batch), inputs)
    assert got.dtype == np.float32
    assert_close(got.astype(np.float64), truth(name, batch)[0], 1e-5)


@pytest.mark.parametrize("how", [{"policy": "serial"}, {"exact": True}])
@pytest.mark.parametrize(
    ("name", "batch"), [("BinaryTreeLSTM", "binary"), ("no inputs", "very wide"), ("three kinds", "three kinds")]
)
def test_every_way_to_schedule_gives_the_same_values(name: str, batch: str, how: dict[str, Any]) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, cavs.schedule(BATCHES[batch], **how), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12)


@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "ChildSumTreeLSTM", "named"])
def test_an_empty_batch_gives_no_rows(name: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, cavs.schedule(GRAPHS["trees"][:0]), program.inputs(0))
    want = truth(name, program.batches[0])[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: ((0, *x.shape[1:]), x.dtype), want)


def test_padded_inputs_give_padded_values() -> None:
    program, schedule, rows = PROGRAMS["named"], sched("binary"), BATCHES["binary"].num_vertices
    padded = jax.tree.map(schedule.pad, batch_inputs("named", "binary"))
    got = cavs.run(program.function, program.params, schedule, padded)
    assert {x.shape[0] for x in jax.tree.leaves(got)} == {schedule.shape.vertices}
    assert_close(jax.tree.map(lambda x: x[:rows], got), truth("named", "binary")[0], 1e-12)
    assert not any(x[rows:].any() for x in jax.tree.leaves(got))


def test_kinds_may_be_ignored() -> None:
    graphs, program = BATCHES["leaf and inner"], PROGRAMS["RvNN"]
    function = cavs.VertexFunction(vp.RvNN(H, E, jnp.float64), state=(H,), arity=2)
    got = cavs.run(function, program.params, cavs.schedule(graphs, kinds=False), batch_inputs("RvNN", "leaf and inner"))
    assert_close(got, truth("RvNN", "leaf and inner")[0], 1e-12)
