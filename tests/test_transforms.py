"""`run` is a pure function that composes with transformations (see `tests/test_compositions.py`), or they refuse it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, jet
from jax.sharding import NamedSharding, PartitionSpec

import cavs
from tests.odd_graphs import BATCHES, GRAPHS, random_binary_tree
from tests.programs import PROGRAMS
from tests.slow import few
from tests.truth import assert_close, batch_inputs, call, gradients, sched, truth

PROGRAM, BATCH, ROWS = PROGRAMS["BinaryTreeLSTM"], sched("binary"), BATCHES["binary"].num_vertices
PARAMS = jax.tree.map(jnp.asarray, PROGRAM.params)
INPUTS = jnp.asarray(batch_inputs("BinaryTreeLSTM", "binary"))


def run(params: Any, inputs: Any = INPUTS, schedule: cavs.Schedule = BATCH, **kwargs: Any) -> Any:
    """h at every vertex."""
    return cavs.run(PROGRAM.function, params, schedule, inputs, **kwargs)


def loss(params: Any, inputs: Any = INPUTS) -> Any:
    """A scalar of all h."""
    return (run(params, inputs) ** 2).sum()


@pytest.mark.parametrize(("name", "batch"), few([("control flow", "chains"), ("edge attention", "one vertex")], 1))
def test_disable_jit(name: str, batch: str) -> None:
    program, rows = PROGRAMS[name], BATCHES[batch].num_vertices
    with jax.disable_jit():
        grads, pushes = gradients(
            lambda p, x: call(cavs.run, program.function, p, sched(batch), x), program.params, batch_inputs(name, batch), rows
        )
    assert_close((pushes, grads), truth(name, batch), 1e-10)


def test_at_is_indexing() -> None:
    roots = cavs.schedule(GRAPHS["trees"]).roots
    rows, h = np.array([4, 4, ROWS - 1, 0]), run(PARAMS)
    assert_close(run(PARAMS, select=rows), h[rows], 0)
    assert_close(jax.jit(lambda p, at: run(p, select=at))(PARAMS, rows), h[rows], 1e-13)
    assert roots.shape == (len(GRAPHS["trees"]),)
    assert run(PARAMS, select=rows[:0]).shape == (0, h.shape[1])


def test_f_reads_the_size_of_an_axis_anew() -> None:
    def scaled(p: Any, v: cavs.Vertex) -> None:
        h = v.pull() * jax.lax.axis_size("many") + v.gather(0)
        v.scatter(h)
        v.push(h)

    F, schedule = cavs.VertexFunction(scaled, state=(2,), arity=1), cavs.schedule(cavs.from_lengths([3]))
    for size in (2, 3, 2):
        x = np.ones((size, 3, 2))
        got = jax.vmap(lambda x: cavs.run(F, {}, schedule, x), axis_name="many")(x)
        assert got[0, :, 0].tolist() == [size, 2 * size, 3 * size]


def test_checkify_of_floats_and_of_the_user_finds_nothing() -> None:
    """And changes nothing. `index_checks` may take rows of padding, which are dropped, for an error: see the page of limits."""
    grads = jax.grad(lambda p: (run(p, engine="scan") ** 2).sum())
    error, got = checkify.checkify(grads, errors=checkify.user_checks | checkify.float_checks)(PARAMS)
    assert error.get() is None
    assert_close(got, grads(PARAMS), 1e-12)


def test_nets_of_nets_under_grad() -> None:
    program, schedule = PROGRAMS["no inputs"], sched("binary")
    params = {"words": PARAMS, "graph": program.params}

    def nested(params: Any, first: Any, second: Any) -> Any:
        h = first(PROGRAM.function, params["words"], INPUTS)
        top = {"u": program.params["u"], "b": h.mean(0)}  # a parameter of one net that another net computes
        return (second(program.function, top | {"u": params["graph"]["u"]}, None) * jnp.sin(h)).sum()

    def batched(function: Any, params: Any, inputs: Any) -> Any:
        return cavs.run(function, params, schedule, inputs)

    def plain(function: Any, params: Any, inputs: Any) -> Any:
        return cavs.interpret(function, params, BATCHES["binary"], inputs)

    got = jax.jit(jax.grad(lambda p: nested(p, batched, batched)))(params)
    want = jax.grad(nested)(params, plain, plain)
    assert_close(got, want, 1e-10)


def tangents(tree: Any) -> Any:
    return jax.tree.map(jnp.cos, tree)


def differences(fn: Any, x: Any, step: float = 1e-5) -> Any:
    """The derivative of `fn` at `x` in the direction `tangents(x)`, by central differences."""
    ahead, behind = (fn(jax.tree.map(lambda a, t, s=s: a + s * step * t, x, tangents(x))) for s in (1, -1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)


def eager_and_lazy(p: Any, v: cavs.Vertex) -> None:
    h = jnp.tanh(v.pull() * p["w"] + v.gather(0) @ p["u"])
    v.scatter(h)
    v.push(h**2 * p["w"])


@pytest.mark.parametrize("how", [{}, {"segments": 2}], ids=str)
def test_mixed_second_derivatives(how: dict[str, Any]) -> None:
    """Those in forward mode with respect to what the first derivative did not differentiate."""
    F, schedule = cavs.VertexFunction(eager_and_lazy, state=(3,), arity=1), cavs.schedule(cavs.from_lengths([4, 1]), **how)
    params, x = {"w": jnp.array([0.3, 0.5, -0.4]), "u": jnp.eye(3) + 0.2}, jnp.cos(jnp.arange(15.0).reshape(5, 3))

    def out(params: Any, x: Any) -> Any:
        return cavs.run(F, params, schedule, x)

    loss = lambda *args: (out(*args) ** 2).sum()  # noqa: E731
    derivatives = [
        (lambda x: jax.value_and_grad(loss)(params, x), x),
        (lambda p: jax.value_and_grad(loss, 1)(p, x), params),
        (lambda w: jax.grad(lambda u: loss({"w": w, "u": u}, x))(params["u"]), params["w"]),
        (lambda p: jax.jvp(lambda x: out(p, x), (x,), (tangents(x),)), params),
    ]
    for fn, at in ((jax.jit(fn), at) for fn, at in derivatives):
        assert_close(jax.jvp(fn, (at,), (tangents(at),))[1], differences(fn, at), 1e-7)


def test_what_linearize_returns_is_only_transposed() -> None:
    out, push = jax.linearize(loss, PARAMS)
    assert_close(jax.linear_transpose(push, PARAMS)(jnp.ones_like(out))[0], jax.grad(loss)(PARAMS), 1e-12)
    with pytest.raises(TypeError, match=r"^run: got tangents for a function that jax.linearize returned.*Write jax.jvp"):
        push(PARAMS)


def test_arguments_whose_types_say_how_they_are_divided() -> None:
    """Arrays over a mesh of `jax.make_mesh`, whose axes are explicit: errors inside of JAX. Gradients are divided alike."""
    mesh = jax.make_mesh((1,), ("d",))
    divided = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    params = jax.tree.map(lambda x: divided(x, *[None] * (x.ndim - 1), "d"), PARAMS)
    table, ids = jnp.asarray(np.random.default_rng(0).standard_normal((5, INPUTS.shape[1]))), jnp.arange(ROWS) % 6 - 1

    def of_words(params: Any, table: Any) -> Any:
        x = cavs.data.rows(table, ids)
        return loss(params, x) + cavs.data.softmax_loss(x, table.T, jnp.zeros(5), ids)[0]

    want, want_of_words = (jax.grad(fn, (0, 1))(PARAMS, x) for fn, x in ((loss, INPUTS), (of_words, table)))
    with jax.set_mesh(mesh):
        for place in ("d",), (None, "d"):
            inputs, words = divided(INPUTS, *place), divided(table, *place)
            got = jax.jit(jax.grad(loss, (0, 1)))(params, inputs)
            assert_close(got, want, 1e-12)
            assert_close(jax.grad(loss, (0, 1))(params, inputs), want, 1e-12)
            assert all(map(lambda x, y: jax.typeof(x) == jax.typeof(y), *map(jax.tree.leaves, (got, (params, inputs)))))
            assert_close(jax.jit(jax.grad(of_words, (0, 1)))(params, words), want_of_words, 1e-12)
            assert_close(cavs.interpret(PROGRAM.function, params, BATCHES["binary"], inputs), run(PARAMS), 1e-12)


def test_what_has_no_rule_for_run_is_refused_by_name() -> None:
    with pytest.raises(
        NotImplementedError, match=r"^jax.linear_transpose: got a function that calls cavs.run .* Write jax.vjp"
    ):
        jax.linear_transpose(run, PARAMS)(run(PARAMS))
    with pytest.raises(
        NotImplementedError, match=r"^jax.experimental.jet: got a function that calls cavs.run .* Write a jax.jvp"
    ):
        jet.jet(lambda x: loss(PARAMS, x), (INPUTS,), ((INPUTS, INPUTS),))


def test_reverse_over_what_is_differentiated_is_refused() -> None:
    def total(params: Any) -> Any:
        return sum(x.sum() for x in jax.tree.leaves(jax.grad(loss)(params)))

    with pytest.raises(TypeError, match=r"^run: got a second derivative in reverse mode.*Write jax.jvp\(jax.grad\(loss\)"):
        jax.grad(total)(PARAMS)


def test_one_compilation_for_all_batches_of_a_shape() -> None:
    traced = []

    @jax.jit
    def step(params: Any, schedule: cavs.Schedule, inputs: Any) -> Any:
        traced.append(schedule.shape)
        return jax.grad(lambda p: (run(p, inputs, schedule, select=schedule.roots) ** 2).sum())(params)

    batches = [random_binary_tree(n, seed) + random_binary_tree(40 - n, seed) for n, seed in ((11, 0), (17, 1), (20, 2))]
    schedules = [cavs.schedule(graphs) for graphs in batches]
    assert len({s.shape for s in schedules}) == 1
    for graphs, schedule in zip(batches, schedules, strict=True):
        inputs = PROGRAM.inputs(graphs.num_vertices)
        got = step(PARAMS, schedule, schedule.pad(inputs))
        want = jax.grad(lambda p, g=graphs, x=inputs, s=schedule: (cavs.run(PROGRAM.function, p, s, x)[s.roots] ** 2).sum())(
            PARAMS
        )
        assert_close(got, want, 1e-12)
    assert len(traced) == 1


def test_a_schedule_is_a_pytree() -> None:
    (leaf,), tree = jax.tree.flatten(BATCH)
    assert leaf.dtype == np.int32 and tree.unflatten([leaf]).shape == BATCH.shape
    assert jax.jit(lambda s: s)(BATCH).num_vertices == ROWS
