"""What `run` computes is what `interpret` computes, vertex by vertex; and `interpret` is what the equations say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.helpers import (
    BATCHES,
    CASES,
    GRAPHS,
    PROGRAMS,
    H,
    assert_close,
    batch_inputs,
    chain,
    from_children,
    sched,
    truth,
)

READY = {
    name: program
    for name, program in PROGRAMS.items()
    if isinstance(
        next(iter(program.function.fns.values())), vp.BinaryTreeLSTM | vp.LSTM | vp.ChildSumTreeLSTM | vp.TreeFC | vp.GRU
    )
}


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_run_is_interpret(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, sched(batch), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12 * program.tolerance)
