"""Predicted bytes of `cavs.memory` against those that XLA for CPUs allocates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs.kernels import native_unavailable

ENGINES = ["scan", *([] if native_unavailable() else ["native"])]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_long_chain(engine):
    """Its single root, and cut cotangents that the eager part reads, need no copies of tensors."""
    chain, lstm = cavs.from_lengths([500]), vp.LSTM(64, 64)
    F, params, x = lstm.vertex_function(), lstm.init(jax.random.key(0)), np.ones((500, 64), np.float32)

    def loss(params, batch):
        sched, x = batch
        return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine=engine) ** 2)

    found = cavs.memory.plan(loss, params, chain, collate=lambda sample: (sample.sched, sample.sched.pad(x))).verify()
    assert 0.99 < found.predicted / found.compiled < 1.06
