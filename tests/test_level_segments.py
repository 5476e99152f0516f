"""Levels in segments, of which only the frontiers are kept: the results are those of whole levels, in less memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._schedule.level_segments import GIVEN
from cavs.kernels import native_unavailable
from tests.odd_graphs import BATCHES, GRAPHS, chain, joined, random_dag
from tests.programs import PROGRAMS
from tests.random_cases import random_case, script
from tests.random_check import check
from tests.slow import few, only
from tests.truth import assert_close, batch_inputs, divided, jitted, padded, truth

H = 8
CHAIN = chain(2000)
NATIVE = (0, 3, 16)  # seeds of random functions that fit engine `native`, two of them with two kinds
LSTM = vp.LSTM(H, H)
HERE = "scan" if native_unavailable() else "native"  # the engine of an LSTM
# Trees, several parents across a cut, kinds, float32 beside float64, edges, pushes that are no states, no inputs.
CASES = {
    "DAGNN": 1e-12,
    "LatticeLSTM": 1e-12,
    "mixed dtypes": 1e-6,
    "edge attention": 1e-12,
    "lazy push": 1e-12,
    "three kinds": 1e-12,
    "no inputs": 1e-12,
}


@pytest.mark.parametrize("name", only(["edge attention", "three kinds"], CASES))
def test_pushes_and_gradients_are_those_of_the_loop_over_vertices(name: str) -> None:
    program = PROGRAMS[name]
    graphs = BATCHES[batch := program.batches[0]]
    sched, rows = cavs.schedule(graphs, segments=3), graphs.num_vertices
    found = jitted(name)(program.params, sched, padded(sched, batch_inputs(name, batch)), rows)
    (by_params, by_inputs), pushes = jax.tree.map(np.asarray, found)
    got = jax.tree.map(lambda x: x[:rows], pushes), (by_params, divided(sched, by_inputs)[0])
    assert_close(got, truth(name, batch), CASES[name])


@pytest.mark.parametrize("seed", few([3, 1], 1))
def test_random_functions_in_segments_are_the_loop_over_vertices(seed: int) -> None:
    case = random_case(200 + seed, "scan")
    case.options.schedule = {k: v for k, v in case.options.schedule.items() if k != "shapes"} | {"segments": 2 + seed % 4}
    found = check(case)
    assert not found.failed, f"{found.what}\n{found.text}\n{script(case)}"


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
@pytest.mark.parametrize("seed", few(NATIVE, 2))
def test_random_functions_in_segments_on_engine_native(seed: int) -> None:
    case = random_case(seed, "native", float32=True)
    case.options.schedule = {"segments": 2 + seed % 4}
    found = check(case)
    assert found.status == "ok", f"{found.what}\n{found.text}\n{script(case)}"


@pytest.mark.parametrize("count", [2, 5, 40])
@pytest.mark.parametrize("name", ["trees", "wide DAG", "one vertex", "star of 40", "random"])
def test_every_vertex_is_in_one_segment_and_its_children_are_there_or_before(name: str, count: int) -> None:
    graphs = random_dag(120, (0, 1, 2, 4), seed=5) if name == "random" else GRAPHS[name]
    sched = cavs.schedule(graphs, segments=count)
    given, shape = sched.segment_shape
    vertex, segment, place = sched.segments.vertex, sched.segments.segment, sched.segments.place
    assert vertex.shape == (count, shape.vertices) and shape.kinds[-1] == GIVEN
    real = np.arange(graphs.num_vertices)
    assert (vertex[segment[real], place[real]] == real).all() and (segment[graphs.num_vertices :] == -1).all()
    starts = graphs.vertex_offsets[:-1].repeat(np.diff(graphs.vertex_offsets))
    parents = real.repeat(np.diff(graphs.child_offsets))
    children = graphs.children + starts[parents]
    assert (segment[children] <= segment[parents]).all()
    below: list[int] = []
    for k in range(count):
        inside = [*below, *(-1,) * (given - len(below)), *vertex[k, given:].tolist()]
        above = {int(c) for c, p in zip(children, parents, strict=True) if segment[c] <= k < segment[p]}
        below = [inside[i] for i in sched.segments.frontier[k, : len(above)]]
        assert {*below} == above


def test_a_chain_in_segments_takes_a_tenth_of_the_memory() -> None:
    params = LSTM.init(jax.random.key(0))
    F = LSTM.vertex_function()

    def loss(params: Any, x: Any, sched: Any) -> Any:
        return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine="scan") ** 2)

    found = []
    for sched in (cavs.schedule(CHAIN), cavs.schedule(CHAIN, segments=32)):
        x = sched.pad(np.sin(np.arange(2000 * H, dtype=np.float32)).reshape(-1, H))
        step = jax.jit(jax.grad(loss)).lower(params, x, sched).compile()
        analysis = step.memory_analysis()
        assert analysis is not None
        found.append((analysis.temp_size_in_bytes, step(params, x, sched)))
    (whole, want), (parts, got) = found
    assert_close(got, want, 1e-5)
    assert whole > 10 * parts


def test_random_masks_are_the_same_when_a_segment_runs_again() -> None:
    """Keys as inputs: the gradient is that of the same masks."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        key, x = v.pull()
        mask = jax.random.bernoulli(key, 0.5, (H,))
        h = jnp.tanh(jnp.where(mask, v.gather(0) @ params, 0) + x)
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(fn, state=(H,), arity=1), chain(60)

    def gradient(sched: Any) -> Any:
        inputs = sched.pad(jax.random.split(jax.random.key(1), 60)), sched.pad(np.sin(np.arange(60.0 * H)).reshape(-1, H))
        run = lambda w: cavs.run(F, w, sched, inputs, select=sched.roots, engine="scan")  # noqa: E731
        return jax.jit(jax.value_and_grad(lambda w: jnp.sum(run(w) ** 2)))(jnp.eye(H, dtype=jnp.float64))

    assert_close(gradient(cavs.schedule(graphs, segments=5)), gradient(cavs.schedule(graphs)), 1e-12)


def test_gradients_without_jit() -> None:
    """Users read values of their own functions under `jax.disable_jit`, around `run`."""
    F, params, graphs = LSTM.vertex_function(), LSTM.init(jax.random.key(0)), chain(5)
    x = np.sin(np.arange(5.0 * H, dtype=np.float32)).reshape(5, H)
    gradient = [jax.grad(lambda p, n=n: cavs.run(F, p, cavs.schedule(graphs, segments=n), x).sum()) for n in (1, 2)]
    want = gradient[0](params)
    with jax.disable_jit():
        assert_close(gradient[1](params), want, 1e-5)


@pytest.mark.parametrize("pushes_bits", [False, True])
def test_keys_in_the_state(pushes_bits: bool) -> None:
    """A push is one of the scattered states, which are stored as the integers of the keys."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        key = jax.random.fold_in(v.gather(0), v.pull())
        v.scatter(key)
        v.push(jax.random.key_data(key) if pushes_bits else key)

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), jax.random.key(0).dtype), arity=1)
    graphs = chain(6)
    parts, whole = (cavs.run(F, {}, cavs.schedule(graphs, segments=n), np.arange(6)) for n in (3, 1))
    bits = [x if pushes_bits else jax.random.key_data(x) for x in (parts, whole)]
    np.testing.assert_array_equal(*bits)


def collate(sample: Any) -> Any:
    sched, sizes = sample.sched, np.diff(sample.graphs.vertex_offsets)
    rows = [np.sin(np.arange(n * H, dtype=np.float32)).reshape(-1, H) for n in sizes]  # whatever the part of a graph
    return sched, sched.pad(np.concatenate(rows))


def plan_of(engine: str | None = None, budget: Any = None, graphs: cavs.Graphs = CHAIN, **how: Any) -> Any:
    F, params = LSTM.vertex_function(), LSTM.init(jax.random.key(0))

    def loss(params: Any, batch: Any) -> Any:
        sched, x = batch
        return jnp.sum(cavs.run(F, params, sched, x, select=sched.roots, engine=engine) ** 2)

    return params, cavs.memory.plan(loss, params, graphs, budget, collate=collate, **how), loss


def test_a_plan_divides_a_deep_graph_into_segments(tmp_path: Any) -> None:
    params, whole, loss = plan_of()
    _, least, _ = plan_of(budget="min")
    assert whole.segments == 1 and least.segments > 4 and least.peak < whole.peak / 6 and least.engines == [HERE]
    assert f"1 part in {least.segments} segments of levels, engine {HERE}" in str(least)
    points = least.frontier()
    assert [c.segments for *_, c in points] == sorted(c.segments for *_, c in points)
    budget = (whole.peak + least.peak) // 3
    _, middle, _ = plan_of(budget=budget)
    assert 1 < middle.segments < least.segments and middle.peak <= budget
    want = jax.jit(jax.value_and_grad(whole.loss))(params, whole.batch(CHAIN))
    assert_close(jax.jit(jax.value_and_grad(least.loss))(params, least.batch(CHAIN)), want, 1e-5)
    least.save(tmp_path / "plan.json")
    again = cavs.memory.load(tmp_path / "plan.json", loss, params, CHAIN, collate=collate)
    assert (again.parts, again.segments, again.peak) == (least.parts, least.segments, least.peak)


def test_later_batches_have_the_shape_of_the_plan() -> None:
    graphs = joined([chain(1500), chain(1300)])
    params, plan, _ = plan_of(graphs=graphs, parts=2, segments=8)
    first, second = plan.batch(graphs), plan.batch(joined([chain(1490), chain(1310)]))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert [x.shape for x in jax.tree.leaves(first)] == [x.shape for x in jax.tree.leaves(second)]
    _, whole, _ = plan_of(graphs=graphs, parts=2, segments=1)
    want = jax.jit(jax.grad(whole.loss))(params, whole.batch(graphs))
    assert_close(jax.jit(jax.grad(plan.loss))(params, first), want, 1e-5)


def test_misuse_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"schedule: segments: got 0; expected an int >= 1.*Write segments=16"):
        cavs.schedule(CHAIN, segments=0)
    with pytest.raises(ValueError, match=r"schedule: segments: got True; expected an int >= 1.*Write segments=16"):
        cavs.schedule(CHAIN, segments=True)
    with pytest.raises(ValueError, match=r"schedule: segments: got 2; expected 1 together with shapes="):
        cavs.schedule(CHAIN, segments=2, shapes=[])
    with pytest.raises(ValueError, match=r"plan: segments: got -1"):
        plan_of(segments=-1)
    with pytest.raises(ValueError, match=r"got 'persistent', but a schedule in segments runs on engine 'scan', or 'native'"):
        plan_of("persistent", segments=4)
