"""What `run` computes, and its gradients with respect to parameters and inputs, are those of a loop over vertices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import BATCHES, GRAPHS
from tests.programs import CASES, IN_FORESTS, PROGRAMS, READY, E, H
from tests.slow import few, only, slow
from tests.truth import assert_close, assert_is_truth, batch_inputs, call, divided, jitted, padded, sched, truth

# Every program, and half of those in forests; `test_native` runs the others.
TABLE = [case for case in CASES if case not in IN_FORESTS[1::2]]
GRADIENTS = only({name: (name, batch) for name, batch in reversed(TABLE)}.values(), TABLE)  # a batch of each program
# In forests, programs compile again: those alone whose gradients are compared, too.
POISONED = [c for c in TABLE if PROGRAMS[c[0]].rows is not None and c[1] != "very long chain"]
POISONED = only([c for c in POISONED if c in GRADIENTS or c not in IN_FORESTS], POISONED)
# Programs that differ in their forward pass, run without a derivative and without `jax.jit`. The pushes of all cases are
# compared in `test_gradients_are_those_of_the_loop_over_vertices`.
FORWARD = [
    *(("RvNN", "leaf and inner"), ("mixed dtypes", "binary"), ("no inputs", "very wide"), ("control flow", "chains")),
    *(("EncoderDecoder", "sentence pairs"), ("without lazy", "chains")),
]


@pytest.mark.parametrize(("name", "batch"), few(FORWARD, 3))
def test_run_is_the_loop_over_vertices(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    got = call(cavs.run, program.function, program.params, sched(batch), batch_inputs(name, batch))
    assert_close(got, truth(name, batch)[0], 1e-12 * program.tolerance)


@pytest.mark.parametrize(
    ("name", "batch"),
    [slow(("attention", "few")), ("mixed dtypes", "few"), ("edge messages", "few"), ("three kinds", "few of three kinds")],
)
def test_interpret_is_the_loop_over_vertices(name: str, batch: str) -> None:
    assert_is_truth(cavs.interpret, BATCHES[batch], name, batch)


@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "ChildSumTreeLSTM", "named"])
def test_an_empty_batch_gives_no_rows(name: str) -> None:
    program = PROGRAMS[name]
    got = cavs.run(program.function, program.params, cavs.schedule(GRAPHS["trees"][:0]), program.inputs(0))
    want = truth(name, program.batches[0])[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: ((0, *x.shape[1:]), x.dtype), want)


def test_padded_inputs_give_padded_values() -> None:
    program, schedule, rows = PROGRAMS["named"], sched("binary"), BATCHES["binary"].num_vertices
    rows_padded = jax.tree.map(schedule.pad, batch_inputs("named", "binary"))
    got = cavs.run(program.function, program.params, schedule, rows_padded)
    assert {x.shape[0] for x in jax.tree.leaves(got)} == {schedule.shape.vertices}
    assert_close(jax.tree.map(lambda x: x[:rows], got), truth("named", "binary")[0], 1e-12)
    assert not any(x[rows:].any() for x in jax.tree.leaves(got))


def test_kinds_may_be_ignored() -> None:
    graphs, program = BATCHES["leaf and inner"], PROGRAMS["RvNN"]
    function = cavs.VertexFunction(vp.RvNN(H, E, jnp.float64), state=(H,), arity=2)
    got = cavs.run(function, program.params, cavs.schedule(graphs, kinds=False), batch_inputs("RvNN", "leaf and inner"))
    assert_close(got, truth("RvNN", "leaf and inner")[0], 1e-12)


def gradients(name: str, batch: str, schedule: cavs.Schedule, params: Any, inputs: Any) -> Any:
    """Gradients and pushes under jit from padded inputs, without padding."""
    rows = BATCHES[batch].num_vertices
    found = jitted(name)(params, schedule, padded(schedule, inputs), rows)
    (params, inputs), pushes = jax.tree.map(np.asarray, found)  # NumPy slices without compiling
    inputs, padding = divided(schedule, inputs)
    assert not any(np.any(x) for x in jax.tree.leaves(padding) if x.dtype != jax.dtypes.float0)
    return (params, inputs), jax.tree.map(lambda x: x[:rows], pushes)


@pytest.mark.parametrize(("name", "batch"), GRADIENTS)
def test_gradients_are_those_of_the_loop_over_vertices(name: str, batch: str) -> None:
    program = PROGRAMS[name]
    grads, pushes = gradients(name, batch, sched(batch), program.params, batch_inputs(name, batch))
    want_pushes, want = truth(name, batch)
    assert_close(pushes, want_pushes, 1e-12 * program.tolerance)
    assert_close(grads, want, 1e-10 * program.tolerance)


def _poison(x: np.ndarray) -> np.ndarray:
    """What padding rows are filled with: NaN, and for integers a number out of any range."""
    fill = np.nan if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min if x.dtype != bool else True
    return np.asarray(fill, x.dtype)


@pytest.mark.parametrize(("name", "batch"), POISONED)
def test_poisoned_padding_changes_no_bit(name: str, batch: str) -> None:
    inputs, rows = batch_inputs(name, batch), BATCHES[batch].num_vertices
    clean, poisoned = padded(sched(batch), inputs), padded(sched(batch), inputs, _poison)
    assert sched(batch).shape.vertices > rows
    a, b = (jitted(name)(PROGRAMS[name].params, sched(batch), x, rows) for x in (clean, poisoned))
    for want, got in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if got.dtype != jax.dtypes.float0:
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
            assert np.isfinite(got).all()


@pytest.mark.parametrize(("name", "batch"), READY[:1])
def test_values_and_gradients_in_float32(name: str, batch: str) -> None:
    params, inputs = jax.tree.map(lambda x: x.astype(np.float32), (PROGRAMS[name].params, batch_inputs(name, batch)))
    grads, pushes = gradients(name, batch, sched(batch), params, inputs)
    assert pushes.dtype == np.float32
    assert_close(pushes.astype(np.float64), truth(name, batch)[0], 1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(truth(name, batch)[1]), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(
    ("name", "batch", "how"),
    [
        ("BinaryTreeLSTM", "binary", {"policy": "serial"}),
        ("no inputs", "very wide", {"exact": True}),
        slow(("edge messages", "three kinds", {"policy": "serial", "exact": True})),
    ],
)
def test_every_way_to_schedule_gives_the_same_values_and_gradients(name: str, batch: str, how: dict[str, Any]) -> None:
    schedule = cavs.schedule(BATCHES[batch], **how)
    grads, pushes = gradients(name, batch, schedule, PROGRAMS[name].params, batch_inputs(name, batch))
    assert_close(pushes, truth(name, batch)[0], 1e-12)
    assert_close(grads, truth(name, batch)[1], 1e-10)


@pytest.mark.parametrize("name", few(["LSTM", "lazy push"], 1))
def test_gradients_of_chosen_vertices(name: str) -> None:
    program = PROGRAMS[name]
    batch, at = program.batches[0], np.array([3, 0, 3, 11])
    inputs = jax.tree.map(np.asarray, batch_inputs(name, batch))

    def loss(params: Any, inputs: Any, pick: Any) -> Any:
        return (pick(params, inputs) ** 2).sum()

    def chosen(params: Any, inputs: Any) -> Any:
        return cavs.run(program.function, params, sched(batch), inputs, select=at)

    def indexed(params: Any, inputs: Any) -> Any:
        return cavs.run(program.function, params, sched(batch), inputs)[at]

    both = jax.jit(lambda p, x: [jax.grad(loss, argnums=(0, 1))(p, x, pick) for pick in (chosen, indexed)])
    assert_close(*both(program.params, inputs), 1e-12)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_chosen_vertices_may_be_integers_of_any_width(dtype: Any) -> None:
    def scaled(p: Any, v: cavs.Vertex) -> None:
        v.scatter(v.pull() * p)
        v.push(v.pull() * p)

    F, batch = cavs.VertexFunction(scaled, state=()), cavs.schedule(cavs.from_lengths([200]))
    at, x = np.array([3, 100, 3], dtype), np.arange(200.0)
    assert cavs.run(F, 2.0, batch, x, select=at).tolist() == [6, 200, 6]
    assert jax.grad(lambda p: cavs.run(F, p, batch, x, select=at).sum())(2.0) == 106


def test_gradients_of_an_empty_batch_are_zero() -> None:
    program = PROGRAMS["BinaryTreeLSTM"]
    schedule = cavs.schedule(GRAPHS["trees"][:0])
    grads = jax.jit(jax.grad(lambda p, x: cavs.run(program.function, p, schedule, x).sum(), argnums=(0, 1)))(
        program.params, program.inputs(0)
    )
    assert_close(grads, jax.tree.map(np.zeros_like, (program.params, program.inputs(0))), 0)


# The last one, as it clears JAX's caches, which the tests above share.
@pytest.mark.parametrize(
    "name", few(["edge attention", "custom derivatives", "control flow", "three kinds", "without fusion"], 1)
)
def test_no_tracer_is_left(name: str) -> None:
    batch = PROGRAMS[name].batches[0]
    arguments = PROGRAMS[name].params, sched(batch), padded(sched(batch), batch_inputs(name, batch))
    jax.clear_caches()
    with jax.checking_leaks():
        jitted(name).trace(*arguments, BATCHES[batch].num_vertices)


def test_no_tracer_is_left_by_derivatives() -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        branch = jax.lax.cond(v.num_children() > 1, lambda: p[0], lambda: v.gather(0))
        h = jnp.tanh(v.pull() + branch + v.gather_all(lambda s: s @ p, reduce="max"))
        v.scatter(h)
        v.push(h)

    def loss(p: Any, batch: Any) -> jax.Array:
        return cavs.run(F, p, *batch, engine="scan").sum()

    F, p = cavs.VertexFunction(fn, state=(H,), arity=5), jnp.eye(H)
    schedule = cavs.schedule(GRAPHS["trees"])
    batch = schedule, schedule.pad(np.ones((GRAPHS["trees"].num_vertices, H)))
    parts = [jax.tree.map(lambda x: jnp.stack([x, x]), batch)]
    jax.clear_caches()
    with jax.checking_leaks():
        jax.jit(lambda p: jax.jvp(lambda p: loss(p, batch), (p,), (p,)))(p)
        jax.jit(jax.grad(cavs.memory.sub_batched(loss))).trace(p, parts)


def test_ranks_are_never_promoted_silently() -> None:
    """As projects demand that set `jax_numpy_rank_promotion`, which holds inside of `run`, too."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() + v.gather(0) @ p + v.gather_all(lambda s: (s @ p[0], s), reduce="softmax"))
        v.scatter(h)
        v.push(h)

    F, p = cavs.VertexFunction(fn, state=(H,), arity=5), jnp.eye(H)
    for graphs in (GRAPHS["trees"], GRAPHS["shared children"]):
        sched, x = cavs.schedule(graphs), np.ones((graphs.num_vertices, H))
        with jax.numpy_rank_promotion("raise"):
            for reduce in ("mean", "max"):
                loss = lambda p: (cavs.readout(cavs.run(F, p, sched, x), sched, reduce) ** 2).sum()  # noqa: B023, E731
                assert jnp.isfinite(jax.grad(loss)(p)).all()
    tagger, chains = cavs.vertex_programs.BiLSTMTagger(labels=3, hidden=4, inputs=H, dropout=0.5), cavs.from_lengths([2, 3])
    sched, back = cavs.schedule(chains), cavs.schedule(chains.reversed())
    with jax.numpy_rank_promotion("raise"):
        keys = cavs.vertex_programs.vertex_keys(jax.random.key(0), sched, np.arange(2))
        logits = tagger.run(tagger.init(jax.random.key(0)), sched, back, sched.pad(np.ones((5, H), np.float32)), key=keys)
        assert jnp.isfinite(cavs.data.softmax_loss(logits, jnp.eye(3), jnp.ones(3), jnp.zeros(len(logits), int))[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_dtypes_are_promoted_inside_of_cavs_alone(dtype: Any) -> None:
    """As in projects that set `jax_numpy_dtype_promotion` to `"strict"`, with `jax_enable_x64`."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        h = v.gather_all(lambda s: ((s @ p[0]).astype(jnp.float32), s), reduce="softmax").astype(dtype)
        h = h + v.gather_all(lambda s: s, reduce="mean") + v.gather_all(lambda s: v.gather_all(lambda t: s * t))
        h = jnp.tanh(v.pull() + (v.gather(0) + h) @ p)
        v.scatter(h)
        v.push(h)

    F, p = cavs.VertexFunction(fn, state=(H,), arity=5), jnp.eye(H, dtype=dtype)
    graphs = GRAPHS["trees"]
    sched, x = cavs.schedule(graphs), np.ones((graphs.num_vertices, H), dtype)

    def loss(p: Any, reduce: str) -> Any:
        h = cavs.run(F, p, sched, x)
        score = jnp.ones(len(h), jnp.float32) if reduce == "softmax" else None
        found = jnp.tanh(cavs.readout(h, sched, reduce, score=score))
        total = cavs.data.softmax_loss(found, p, p[0], jnp.zeros(len(found), jnp.int32))[0]
        return total + cavs.data.mean(found, where=found > 0)

    for reduce in ("mean", "max", "sum", "softmax"):
        with jax.numpy_dtype_promotion("strict"):
            got = jax.value_and_grad(loss)(p, reduce)
            jax.jvp(jax.grad(lambda p: loss(p, reduce)), (p,), (p,))  # noqa: B023
        assert_close(got, jax.value_and_grad(loss)(p, reduce), 0)
    several = {"w": p.astype(jnp.float16), "u": p.astype(jnp.bfloat16)}
    casting = cavs.VertexFunction(
        lambda p, v: fn(p["w"].astype(dtype) + p["u"].astype(dtype), v), state=jax.ShapeDtypeStruct((H,), dtype), arity=5
    )
    with jax.numpy_dtype_promotion("strict"):
        assert_close(cavs.run(casting, several, sched, x), cavs.run(F, 2 * p, sched, x), 1e-12)
    mixing = cavs.VertexFunction(lambda p, v: v.push(p[0] * np.ones(H, np.float16)), state=(H,))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="strict"):
        cavs.run(mixing, p, sched, x)


def test_numbers_of_python_promote_no_dtype() -> None:
    """As in JAX, also among the parameters, and in arrays that JAX makes of such numbers."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() * p["scale"] + v.gather_all(lambda s: s @ p["u"]))
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(fn, state=(H,)), GRAPHS["trees"]
    params = {"scale": 0.5, "u": jnp.eye(H, dtype=jnp.bfloat16)}
    for x in (jnp.ones((graphs.num_vertices, H), jnp.bfloat16), jnp.full((graphs.num_vertices, H), 1.0)):
        got = cavs.run(F, params, cavs.schedule(graphs), x)
        assert got.dtype == jnp.bfloat16
        assert_close(got, cavs.interpret(F, params, graphs, x), 1e-2)
        assert "Leaves" in cavs.explain(F, params, x[0])
