"""Cells of Equinox, Flax and plain JAX as F: what they compute along a sequence, over DAGs, and under optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import GRAPHS
from tests.programs import E, H
from tests.truth import assert_close

CHAINS = cavs.from_lengths([4, 1, 2])

SCHED = cavs.schedule(CHAINS)

X = np.random.default_rng(0).standard_normal((24, E))


def recurrence(step: Any, start: Any, x: Any) -> Any:
    """y of every position of CHAINS, by `step(carry, x) -> (carry, y)` alone."""
    first = np.isin(np.arange(CHAINS.num_vertices), CHAINS.vertex_offsets)

    def one(carry: Any, position: Any) -> Any:
        x, is_first = position
        return step(jax.tree.map(lambda a, b: jnp.where(is_first, a, b), start, carry), x)

    return jax.lax.scan(one, start, (x, first))[1]


def check(function: cavs.VertexFunction, params: Any, step: Any, start: Any) -> None:
    """`run` and its gradients are those of the cell on its own, `step(params, carry, x)`."""

    def both(params: Any, x: Any, run: Any) -> Any:
        pushes = run(params, x)
        return sum((y**2).sum() for y in jax.tree.leaves(pushes)), pushes

    grad, x = jax.jit(jax.grad(both, argnums=(0, 1), has_aux=True), static_argnums=2), jnp.asarray(X[:7])
    got = grad(params, x, lambda p, x: cavs.run(function, p, SCHED, x))
    want = grad(params, x, lambda p, x: recurrence(lambda carry, x: step(p, carry, x), start, x))
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


def test_equinox_cells() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    cell = eqx.nn.LSTMCell(E, H, dtype=jnp.float64, key=jax.random.key(0))
    start = (jnp.zeros(H), jnp.zeros(H))
    step = lambda cell, carry, x: 2 * (cell(x, carry),)  # noqa: E731
    check(cavs.interop.from_cell(step, start), cell, step, start)


def test_equinox_modules_with_functions_among_their_leaves() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    module = eqx.nn.MLP(E + H, H, 4, 1, dtype=jnp.float64, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_array)

    def mlp_rnn(params: Any, v: cavs.Vertex) -> None:
        h = eqx.combine(params, static)(jnp.concatenate([v.gather(0), v.pull()]))
        v.scatter(h)
        v.push(h)

    got = cavs.run(cavs.VertexFunction(mlp_rnn, state=(H,), arity=1), params, SCHED, X[:7])
    want = recurrence(lambda h, x: 2 * (module(jnp.concatenate([h, x])),), jnp.zeros(H), X[:7])
    assert_close(got, want, 1e-12)


def test_nnx_cells() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    cell = nnx.LSTMCell(E, H, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    start = cell.initialize_carry((E,), nnx.Rngs(0))
    # The module itself is the params, and the state.
    step = lambda cell, carry, x: cell(carry, x)  # noqa: E731
    check(cavs.interop.from_cell(step, start), cell, step, start)
    graph, state = nnx.split(cell)
    function = cavs.interop.from_cell(lambda state, carry, x: nnx.merge(graph, state)(carry, x), start)
    got = cavs.run(function, state, SCHED, X[:7])
    assert_close(got, recurrence(lambda carry, x: cell(carry, x), start, X[:7]), 1e-12)


def test_nnx_modules_that_change_are_refused_and_take_keys() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def dropping(module: Any, v: cavs.Vertex) -> None:
        h = module(v.pull("x"), rngs=v.pull("key"))
        v.scatter(h)
        v.push(h)

    def counting(module: Any, v: cavs.Vertex) -> None:
        v.scatter(module(v.pull("x")))
        v.push(v.pull("x"))

    rows = {"x": np.ones((7, E)), "key": jax.random.split(jax.random.key(0), 7)}
    module, function = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), cavs.VertexFunction(counting, state=(E,))
    with pytest.raises(TypeError, match=r"F changes params at \.rngs\.count.*rngs=v.pull\('key'\)"):
        cavs.run(function, module, SCHED, rows)
    with pytest.raises(TypeError, match=r"F changes params at \.rngs\.count"):
        cavs.interpret(function, module, CHAINS, rows)
    masked = np.asarray(cavs.run(cavs.VertexFunction(dropping, state=(E,)), module, SCHED, rows))
    assert len(np.unique(masked, axis=0)) > 1  # not one mask for all vertices
    assert_close(masked, cavs.interpret(cavs.VertexFunction(dropping, state=(E,)), module, CHAINS, rows), 1e-12)


def test_linen_cells() -> None:
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    cell = linen.GRUCell(H, dtype=jnp.float64, param_dtype=jnp.float64)
    start = cell.initialize_carry(jax.random.key(0), (E,))
    params = cell.init(jax.random.key(1), start, jnp.asarray(X[0]))
    check(cavs.interop.from_cell(cell.apply, start), params, cell.apply, start)


def plain(params: Any, carry: Any, x: Any) -> Any:
    """A cell as Haiku's transformed ones: functions of params."""
    h = jnp.tanh(carry["h"] @ params["u"] + x @ params["w"])
    return {"h": h, "n": carry["n"] + 1}, (h, carry["n"] * h[:2])


PLAIN = {"u": 0.3 * np.random.default_rng(1).standard_normal((H, H)), "w": np.random.default_rng(2).standard_normal((E, H))}


def test_plain_cells_start_from_their_carry() -> None:
    start = {"h": jnp.linspace(-1, 1, H), "n": jnp.float64(2)}
    check(cavs.interop.from_cell(plain, start), PLAIN, plain, start)


def test_cells_over_dags() -> None:
    start = {"h": jax.ShapeDtypeStruct((H,), jnp.float64), "n": jax.ShapeDtypeStruct((), jnp.float64)}
    graphs = GRAPHS["shared children"]
    function, x = cavs.interop.from_cell(plain, start, reduce="mean"), X[: graphs.num_vertices]
    got = cavs.run(function, PLAIN, cavs.schedule(graphs), x)
    assert_close(got, cavs.interpret(function, PLAIN, graphs, x), 1e-12)


def test_a_carry_of_numpy_has_the_dtype_that_it_has_in_jax() -> None:
    with jax.enable_x64(False):
        for start in (np.zeros(H), np.ones(H)):
            function = cavs.interop.from_cell(lambda p, carry, x: (jnp.tanh(carry + x @ p), carry), start)
            got = cavs.run(function, np.ones((E, H)), SCHED, X[:7])
            assert got.dtype == jnp.float32
            assert_close(got, cavs.interpret(function, np.ones((E, H)), CHAINS, X[:7]), 1e-6)


def test_invalid_cells_are_refused() -> None:
    start = jnp.zeros(H)
    with pytest.raises(TypeError, match="cell: got a int; expected a function of 3 arguments, .params, carry, x."):
        cavs.interop.from_cell(3, start)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce: got 'softmax'; expected 'sum', 'mean', 'max', or None for sequences"):
        cavs.interop.from_cell(plain, start, reduce="softmax")
    with pytest.raises(TypeError, match=f"carry: got a leaf {H}; expected arrays"):
        cavs.interop.from_cell(plain, H)
    with pytest.raises(ValueError, match="carry: got no leaves"):
        cavs.interop.from_cell(plain, ())
    function = cavs.interop.from_cell(lambda cell, carry, x: carry, start)
    with pytest.raises(TypeError, match="expected \\(carry, y\\). For a cell that returns only the carry"):
        cavs.run(function, PLAIN, SCHED, X[:7])


def test_a_chain_of_optax_trains_any_params() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    cell = nnx.GRUCell(E, H, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    function = cavs.interop.from_cell(lambda cell, carry, x: cell(carry, x), cell.initialize_carry((E,), nnx.Rngs(0)))
    schedule, x = SCHED, SCHED.pad(X[:7])
    chain_ = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-4), optax.adam(0.05))
    optimiser = optax.apply_if_finite(chain_, 3)

    @jax.jit
    def step(cell: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(lambda c: (cavs.run(function, c, schedule, x, select=schedule.roots) - 1).var())(cell)
        updates, state = optimiser.update(grads, state, cell)
        return optax.apply_updates(cell, updates), state, value

    state, losses = optimiser.init(cell), []
    for _ in range(12):
        cell, state, value = step(cell, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
