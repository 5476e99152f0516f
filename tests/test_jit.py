"""`cavs.concurrent_jit`: as `jax.jit`, with launches of engine `persistent` in turn wherever they are."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import cavs
from cavs._step import concurrent_jit
from cavs.kernels import H200, Target, persistent
from cavs.kernels.turns import begin_p, end_p
from tests.persistent_programs import CASES, CHAINS, INTERPRETED, INTERPRETER, inputs_of

NEVER = np.iinfo(np.int32).min


@jax.jit
def launch(x: jax.Array) -> jax.Array:
    """Stands for a launch; it leaves the flag that none leaves, at which the next one's counters begin with 1 in place of 0:
    that shows what depends on what."""
    counters = begin_p.bind(jnp.zeros(1, jnp.int32))
    end_p.bind(jnp.minimum(NEVER, x)[None])
    return counters[0]


def chain(x: Any) -> Any:
    return launch(x) + launch(x)


def in_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (c + launch(x), launch(x)), 0, length=3)


def first_in_scan(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + y, launch(x)), 0, jnp.arange(3))


def unrolled(x: Any) -> Any:
    return lax.scan(lambda c, _: (c, launch(x)), None, length=3, unroll=True)[1]


def in_while(x: Any) -> Any:
    return lax.while_loop(lambda n: n < 3, lambda n: n + 1 + 0 * launch(x) + launch(x), x)


PLACES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "one": (launch, 0),
    "two": (lambda x: (launch(x), launch(x)), (0, 1)),
    "none": (lambda x: x + 1, 1),
    "checkpoint": (lambda x: (launch(x), jax.checkpoint(chain)(x), launch(x)), (0, 2, 1)),
    "scan": (lambda x: (launch(x), in_scan(x), launch(x)), (0, (3, [1] * 3), 1)),
    "a scan before all": (lambda x: (first_in_scan(x), launch(x)), ((3, [0, 1, 1]), 1)),
    "unrolled": (unrolled, [0, 1, 1]),
    "cond": (lambda x: (launch(x), lax.cond(x == 0, chain, lambda x: x, x), launch(x)), (0, 2, 1)),
    "while": (lambda x: (in_while(x), launch(x)), (4, 1)),
    "shard_map": (lambda x: (launch(x), divided(x), divided(x), launch(x)), (0, 2, 2, 1)),
    "custom derivatives": (lambda x: (launch(x), custom(x), launch(x)), (0, 1, 1)),
}


def divided(x: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    return jax.shard_map(chain, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


@jax.custom_vjp
def custom(x: Any) -> Any:
    return launch(x)


custom.defvjp(lambda x: (custom(x), None), lambda _, ct: (ct,))


@pytest.mark.parametrize("place", PLACES)
def test_launches_are_in_turn(place: str) -> None:
    fun, want = PLACES[place]
    got = cavs.concurrent_jit(fun)(jnp.int32(0))
    jax.tree.map(np.testing.assert_array_equal, got, want, is_leaf=lambda x: isinstance(x, list))
    marks = re.findall("cavs_(?:begin|end)", str(jax.make_jaxpr(fun)(jnp.int32(0))))
    assert bool(marks) == (place != "none")


@pytest.mark.parametrize("place", PLACES)
def test_loops_join_cuda_graphs_unless_launches_are_inside(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", lambda: H200)
    fun, traced = PLACES[place][0], []
    jitted = cavs.concurrent_jit(lambda x, y: (traced.append(x), fun(x) if y.shape else x)[1])
    for y in (np.ones(()), np.ones(1), np.zeros(1)):  # the first call has no launches
        jitted(jnp.int32(0), y)
    without, with_launches = jitted._chosen.values()
    assert without is jitted._looping and with_launches is (jitted._looping if place == "none" else jitted._launching)
    assert jitted._cache_size() == len(traced) == 2


def test_it_is_jit() -> None:
    """Static and keyword arguments, trees, donation, options, and what is compiled once is not again."""

    @cavs.concurrent_jit(static_argnames=("how",), donate_argnums=0)
    def step(state: Any, *, by: Any = 2.0, how: Any = None) -> Any:
        return {k: x * by if how == "times" else x + by for k, x in state.items()}, None, 3

    state = {"a": jnp.ones(2), "b": jnp.ones(())}
    out, none, three = step(state, how="times")
    assert state["a"].is_deleted() and none is None and three == 3
    assert step(out, by=1.0)[0]["b"] == 3
    assert step._cache_size() == 2
    assert step({"a": jnp.ones(2), "b": jnp.ones(())}, how="times")[0]["a"][0] == 2
    assert step._cache_size() == 2
    named = cavs.concurrent_jit(lambda x: jax.named_scope("mine")(jnp.sin)(x))
    assert "mine/sin" in named.lower(0.0).as_text(debug_info=True)
    assert cavs.concurrent_jit(jnp.sin, compiler_options={"xla_gpu_autotune_level": 0})(0.0) == 0


@INTERPRETER
def test_values_and_gradients() -> None:
    """Of two runs that do not depend on each other, as the two directions of a BiLSTM."""
    make, graphs = CASES["ElmanRNN"]
    F, params = make()
    x = inputs_of("ElmanRNN", graphs)
    both = [cavs.schedule(g, scripts=True) for g in (CHAINS, CHAINS.reversed())]

    def loss(params: Any) -> Any:
        return sum((cavs.run(F, params, sched, x, engine=INTERPRETED) ** 2).sum() for sched in both)

    want, got = (jit(jax.value_and_grad(loss))(params) for jit in (jax.jit, cavs.concurrent_jit))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [True, False])
def test_independent_launches_on_the_card(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions of a BiLSTM: each on half of the chip, or as wide as the chip. At once, neither would then have all of
    its CTAs there."""
    if not pairs:
        monkeypatch.setattr(concurrent_jit, "halves_of", lambda jaxpr: [None] * 4)
    program = cavs.vertex_programs.BiLSTM(512, 64)
    params = program.init(jax.random.key(0))
    graphs = cavs.from_lengths(np.random.default_rng(0).integers(5, 60, 64))
    scheds = [cavs.schedule(g) for g in (graphs, graphs.reversed())]
    x = jax.random.normal(jax.random.key(1), (scheds[0].shape.vertices, 64), jnp.float32)

    def train(params: Any) -> Any:
        loss = lambda p: (program.run(p, *scheds, x) ** 2).mean()  # noqa: E731

        def one(params: Any, _: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return jax.lax.scan(one, params, length=100)[1]

    want, got = (np.asarray(jit(train)(params)) for jit in (jax.jit, cavs.concurrent_jit))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match="jit: fun: got a int; expected a function. Write cavs.concurrent_jit"):
        cavs.concurrent_jit(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='"persistent" has no second derivative. Write cavs.run.*engine="scan"'):
        jax.grad(persistent._not_differentiated)(1.0)
    with pytest.raises(ValueError, match="only be passed to top-level"):
        jax.grad(cavs.concurrent_jit(jnp.sin))(1.0)
    solve = lambda x: jax.lax.custom_linear_solve(lambda y: launch(y), x, lambda _, b: b, symmetric=True)  # noqa: E731
    with pytest.raises(NotImplementedError, match="inside `custom_linear_solve`.*Write jax.jit for this function"):
        cavs.concurrent_jit(solve)(jnp.float32(0))
