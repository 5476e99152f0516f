"""`cavs.readout` equals a loop over graphs, for any content of the padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import BATCHES
from tests.truth import assert_close, sched, with_gradients


def readout_truth(values: Any, offsets: Any, reduce: str, score: Any) -> Any:
    pieces = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if reduce == "softmax":
        return jnp.stack([jnp.tensordot(jax.nn.softmax(score[p]), values[p], 1) for p in pieces])
    return jnp.stack([getattr(values[p], reduce)(0) for p in pieces])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "softmax"])
def test_readouts_are_loops_over_graphs(reduce: str) -> None:
    graphs, schedule = BATCHES["chains"], sched("chains")
    rng = np.random.default_rng(0)
    values, score = rng.standard_normal((graphs.num_vertices, 4, 2)), 20 * rng.standard_normal(graphs.num_vertices)
    wanted, want_gradients = with_gradients(lambda v, s: readout_truth(v, graphs.vertex_offsets, reduce, s), values, score)

    def ours(values: Any, score: Any) -> Any:
        return cavs.readout(values, schedule, reduce, score=score if reduce == "softmax" else None)

    got, got_gradients = with_gradients(ours, values, score)
    assert_close(got, wanted, 1e-12)
    assert_close(got_gradients, want_gradients, 1e-12)
    # Padded, poisoned, under jit, and of a pytree: the same.
    padded = [schedule.pad(a, np.nan) for a in (values, score)]
    inside = jax.jit(lambda s, v, w: cavs.readout({"a": v}, s, reduce, score=w if reduce == "softmax" else None)["a"])
    poisoned, (d_values, d_score) = with_gradients(lambda v, w: inside(schedule, v, w), *padded)
    assert_close(poisoned, wanted, 1e-12)
    rows = graphs.num_vertices
    assert_close((d_values[:rows], d_score[:rows]), want_gradients, 1e-12)


def test_attention_with_low_scores_has_a_gradient() -> None:
    schedule, rows = sched("chains"), BATCHES["chains"].num_vertices
    assert schedule.shape.vertices > rows
    h = schedule.pad(np.random.default_rng(0).standard_normal((rows, 2)).astype(np.float32))
    score = np.full(rows, -1e4, np.float32)

    def attended(w: Any) -> Any:  # the product also reads padding
        return cavs.readout(h @ w, schedule, "softmax", score=schedule.pad(score)).sum()

    mean = jax.grad(lambda w: cavs.readout(h @ w, schedule, "mean").sum())(np.ones((2, 2), np.float32))
    np.testing.assert_allclose(jax.grad(attended)(np.ones((2, 2), np.float32)), mean, rtol=1e-5)


def test_scores_may_be_unsigned() -> None:
    schedule, rows = sched("chains"), BATCHES["chains"].num_vertices
    h, score = np.random.default_rng(0).standard_normal((rows, 2)), np.arange(rows) % 5
    want = cavs.readout(h, schedule, "softmax", score=score.astype(np.float64))
    for dtype in (np.uint8, np.uint32, np.int8):
        np.testing.assert_allclose(cavs.readout(h, schedule, "softmax", score=score.astype(dtype)), want, rtol=1e-6)


def test_sums_of_narrow_numbers_are_wide() -> None:
    schedule, hundreds = cavs.schedule(cavs.from_lengths([1000, 3])), np.full((1003, 1), 100)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int8):
        mean = cavs.readout(jnp.asarray(hundreds, dtype), schedule, "mean")
        attended = cavs.readout(jnp.asarray(hundreds, dtype), schedule, "softmax", score=np.zeros(1003, np.float32))
        assert mean.ravel().tolist() == [100, 100] and (mean.dtype == dtype) == (dtype != jnp.int8)
        np.testing.assert_allclose(attended.ravel().astype(np.float32), 100, rtol=1e-6)
    assert cavs.readout(jnp.asarray(hundreds, jnp.int8), schedule).ravel().tolist() == [100_000, 300]
    assert cavs.readout(jnp.full((1003, 1), 2**62), schedule, "mean").ravel().tolist() == [2**62, 2**62]
    ones = jnp.asarray(hundreds // 100, jnp.bfloat16)
    assert cavs.readout(ones, schedule).ravel().tolist() == [1000, 3]
    shared = jax.grad(lambda x: cavs.readout(x, schedule, "max").astype(jnp.float32).sum())(ones)
    np.testing.assert_allclose(np.float32(shared[0]), 1 / 1000, rtol=0.01)
    assert cavs.readout(hundreds > 0, schedule).ravel().tolist() == [1000, 3]


def test_readout_refuses_what_does_not_fit() -> None:
    schedule, rows = sched("chains"), BATCHES["chains"].num_vertices
    h = np.zeros((rows, 2))
    with pytest.raises(TypeError, match=r"sched: got a Graphs; expected a cavs\.Schedule"):
        cavs.readout(h, BATCHES["chains"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"readout: reduce: got array\(.*; expected one of 'sum'"):
        cavs.readout(h, schedule, np.array(["sum", "max"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce: got 'median'; expected one of 'sum', 'mean', 'max', 'softmax'"):
        cavs.readout(h, schedule, "median")
    with pytest.raises(ValueError, match="got no score with reduce='softmax'"):
        cavs.readout(h, schedule, "softmax")
    with pytest.raises(ValueError, match="got a score with reduce='sum'"):
        cavs.readout(h, schedule, score=h[:, 0])
    with pytest.raises(ValueError, match=f"expected a first axis of {rows} or"):
        cavs.readout(h[1:], schedule)
    with pytest.raises(ValueError, match=r"got leaves of shapes \[\(\), .*Write np.asarray\(rows\) for nested lists"):
        cavs.readout([[1.0]] * rows, schedule)
    with pytest.raises(ValueError, match="and a 1-d score"):
        cavs.readout(h, schedule, "softmax", score=h)
