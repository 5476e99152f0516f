"""What is not differentiated, such as fixed inputs or frozen weights, changes no gradient and costs nothing in the backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import cavs
from cavs import vertex_programs as vp
from cavs._function.plan import FunctionPlan
from cavs._jaxpr.memo import results
from cavs._run.compiled import _compiled
from cavs._run.plans import latest_plan
from tests.programs import PROGRAMS
from tests.slow import few
from tests.truth import assert_close, batch_inputs, call, loss, sched, truth

H = 8
NAMES = ["ChildSumTreeLSTM", "mixed dtypes", "edge attention", "three kinds", "eager state"]


@pytest.mark.parametrize("name", few(NAMES, 1))
def test_gradients_of_some_arguments_are_those_of_the_loop_over_vertices(name: str) -> None:
    program = PROGRAMS[name]
    batch = program.batches[0]
    schedule, by_all = sched(batch), truth(name, batch)[1]
    leaves, treedef = jax.tree.flatten((program.params, batch_inputs(name, batch)))
    of_all, rows = jax.tree.leaves(by_all), int(schedule.num_vertices)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    count = len(jax.tree.leaves(program.params))
    some = {"params": [i for i in floats if i < count], "inputs": [i for i in floats if i >= count]}
    some |= {"one": floats[:1], "half": floats[1::2]}

    def gradient(chosen: list[jax.Array], which: list[int]) -> Any:
        def of(chosen: list[jax.Array]) -> Any:
            full = list(leaves)
            for i, x in zip(which, chosen, strict=True):
                full[i] = x
            params, inputs = treedef.unflatten(full)
            return loss(call(cavs.run, program.function, params, schedule, inputs), rows)

        return jax.grad(of)(chosen)

    for which in filter(None, some.values()):
        got = jax.jit(gradient, static_argnums=1)([leaves[i] for i in which], tuple(which))
        assert_close(got, [of_all[i] for i in which], 1e-10 * program.tolerance)


def test_integers_are_not_split_again() -> None:
    """They have no cotangents in any case, so a function that reads integers alone is traced once."""
    function = cavs.VertexFunction(
        lambda p, v: (v.scatter(h := p[v.pull()] + v.gather_all(lambda s: s)), v.push(h)), state=(H,)
    )
    params, x = jnp.ones((3, H)), jnp.zeros(GRAPHS.num_vertices, jnp.int32)
    jax.grad(lambda p: cavs.run(function, p, cavs.schedule(GRAPHS), x).sum())(params)
    plan = latest_plan(function)
    assert plan is not None and results(_compiled, plan) and not results(FunctionPlan._fixing, plan)


GRAPHS = cavs.from_parents([[2, 2, 4, 4, -1], [1, 2, -1], [4, 4, 4, 4, -1], [-1]] * 16)


def attention(p: Any, v: cavs.Vertex) -> None:
    keys, below = v.pull(), v.gather_all(lambda s: s)
    weights = jax.nn.softmax(jnp.tanh(keys + below @ p["query"]) @ p["score"])
    h = jnp.tanh(below + weights @ keys)
    v.scatter(h)
    v.push(h)


def case(program: str) -> tuple[cavs.VertexFunction, Any, np.ndarray]:
    """F, its parameters, and the rows of the vertices, in float32."""
    rng, n = np.random.default_rng(0), GRAPHS.num_vertices
    if program == "attention":
        params = {"query": rng.normal(size=(H, H)) / H, "score": rng.normal(size=H)}
        x = rng.normal(size=(n, 32, H)).astype(np.float32)
        return cavs.VertexFunction(attention, state=(H,)), jax.tree.map(jnp.float32, params), x
    ready = vp.ChildSumTreeLSTM(H, H) if program == "ChildSumTreeLSTM" else vp.TreeFC(H)
    return ready.vertex_function(), ready.init(jax.random.key(0)), rng.normal(size=(n, H)).astype(np.float32)


# Engine `persistent` is in `tests/test_compositions.py`, and on the card in `tests/test_differentiated_arguments.py`.
@pytest.mark.parametrize(("program", "engine"), [("attention", "scan"), ("ChildSumTreeLSTM", None)])
def test_every_engine(program: str, engine: Any) -> None:
    F, params, x = case(program)
    schedule = cavs.schedule(GRAPHS)

    def of(params: Any, x: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(cavs.run(F, params, schedule, x, select=schedule.roots, engine=engine)) ** 2)

    by_params, by_x = jax.jit(jax.grad(of, argnums=(0, 1)))(params, x)
    assert_close(jax.jit(jax.grad(of))(params, x), by_params, 1e-5)
    assert_close(jax.jit(jax.grad(of, argnums=1))(params, x), by_x, 1e-5)
    one = next(iter(params))
    frozen = jax.jit(jax.grad(lambda w, x: of(params | {one: w}, x)))(params[one], x)
    assert_close(frozen, by_params[one], 1e-5)


def temporary(fn: Any, *args: Any) -> int:
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def sums(how: str, F: cavs.VertexFunction) -> tuple[Any, Any]:
    """(loss of params, a batch and rows, the batch), computed in some way."""

    def of(params: Any, schedule: cavs.Schedule, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(cavs.run(F, params, schedule, x, select=schedule.roots)) ** 2)

    schedule = cavs.schedule(GRAPHS, **({"segments": 2} if how == "segments" else {}))
    if how == "parts":
        twice = jax.tree.map(lambda x: jnp.stack([x, x]), schedule)
        total = cavs.memory.sub_batched(lambda params, batch: of(params, *batch))
        return lambda params, schedule, x: total(params, [(schedule, jnp.stack([x, x]))]) / 2, twice
    if how == "shard_map":
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

        def divided(params: Any, schedule: cavs.Schedule, x: jax.Array) -> jax.Array:
            one = lambda *args: jax.lax.psum(of(*args), "data")  # noqa: E731
            return jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)(params, schedule, x)

        return divided, schedule
    return of, schedule


@pytest.mark.parametrize("how", ["whole", "parts", "segments", "shard_map"])
def test_inputs_that_are_not_differentiated_have_no_cotangents(how: str) -> None:
    """On every way to `run`: the gradients are the same, and the memory of the rows' cotangents is not there."""
    F, params, x = case("attention")
    of, batch = sums(how, F)
    rows = jnp.asarray((batch if how != "parts" else cavs.schedule(GRAPHS)).pad(x))
    both = jax.grad(of, argnums=(0, 2))
    assert_close(jax.jit(jax.grad(of))(params, batch, rows), jax.jit(both)(params, batch, rows)[0], 1e-5)
    by_params = temporary(jax.grad(of), params, batch, rows)
    assert by_params + 0.7 * rows.nbytes < temporary(lambda *args: jax.tree.map(jnp.sum, both(*args)), params, batch, rows)


def steps_to(limit: Any, x: jax.Array) -> jax.Array:
    """A loop of which JAX has no reverse derivative."""
    return jax.lax.while_loop(lambda y: y.sum() < limit, lambda y: 2 * y + 1, jnp.abs(x))


@pytest.mark.parametrize("of", ["inputs", "params"])
def test_loops_over_what_is_not_differentiated_have_gradients(of: str) -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        fixed = v.pull() if of == "inputs" else p["fixed"]
        h = jnp.tanh(v.pull() * p["w"] + v.gather_all(lambda s: s) + steps_to(9.0, fixed))
        v.scatter(h)
        v.push(h * steps_to(20.0, fixed))

    function, graphs = cavs.VertexFunction(fn, state=(H,)), GRAPHS[:4]
    rng = np.random.default_rng(0)
    x, fixed, w = rng.normal(size=(graphs.num_vertices, H)), rng.normal(size=H), rng.normal(size=H)
    schedule = cavs.schedule(graphs)
    got = jax.grad(lambda w: cavs.run(function, {"w": w, "fixed": fixed}, schedule, x).sum())(w)
    assert_close(got, jax.grad(lambda w: cavs.interpret(function, {"w": w, "fixed": fixed}, graphs, x).sum())(w), 1e-10)
    with pytest.raises(TypeError, match="number of iterations depends on values"):
        jax.grad(lambda p: cavs.run(function, p, schedule, x).sum() + cavs.run(function, p, schedule, p["x"]).sum())(
            {"w": w, "fixed": fixed, "x": x}
        )
