"""Engine `native` computes the eager part of F in its library, or XLA does; results are those of engine `scan`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs.kernels import native_unavailable
from tests.odd_graphs import BATCHES
from tests.slow import few
from tests.test_native_leaves import PARAMS, assert_engines_agree, assert_same, inputs, loss

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))


def _product(params: Any, v: cavs.Vertex) -> jax.Array:
    return v.pull()["x"] @ params["w"] + params["b"]


def _of_children(params: Any, v: cavs.Vertex) -> jax.Array:
    return jnp.tanh(_product(params, v)) * (1 + v.num_children())


def _of_a_table(params: Any, v: cavs.Vertex) -> jax.Array:
    return _product(params, v) + params["table"][v.pull()["word"]]


# With whether the library computes it.
EAGER: dict[str, tuple[Callable[..., jax.Array], bool]] = {
    "product": (_product, True),
    "number of children": (_of_children, True),
    "a table": (_of_a_table, False),
}


def function(name: str) -> cavs.VertexFunction:
    def f(params: Any, v: cavs.Vertex) -> None:
        z = EAGER[name][0](params, v)
        h = jnp.tanh(v.gather_all(lambda h: h) @ params["u"] + z)
        v.scatter(h)
        # Where there is no vertex, z must not be zero: the norm's derivative there would reach the gradient of "b".
        v.push({"y": jnp.linalg.norm(z * params["b"] * (1 + h * h)) * h, "x": v.pull()["x"]})

    return cavs.VertexFunction(f, state=(7,))


@pytest.mark.parametrize("name", few(reversed(EAGER), 1))
def test_the_eager_part_is_that_of_engine_scan(name: str) -> None:
    F, sched = function(name), cavs.schedule(BATCHES["forest"])
    assert sched.shape.inner[0] > int(sched.inner_count[0])
    shapes = {"x": np.zeros(5, np.float32), "word": np.int32(0)}
    count = int(sched.inner_count[0])
    exact = f"in the eager part: {count} of {count if EAGER[name][1] else sched.shape.inner[0]} rows"
    assert exact in cavs.explain(F, PARAMS, shapes, sched=sched)
    assert_engines_agree(F, sched, derivatives=name == "number of children")


@pytest.mark.parametrize("name", few(reversed(EAGER), 1))
def test_wide_levels_run_the_eager_part(name: str) -> None:
    wide, narrow = cavs.schedule(cavs.from_lengths([12] * 64)), cavs.schedule(BATCHES["forest"])
    of, F = {"x": np.zeros(5, np.float32), "word": np.int32(0)}, function(name)
    assert wide.shape.inner[0] > int(wide.inner_count[0])
    found = ["the levels run what is eager" in cavs.explain(F, PARAMS, of, sched=sched) for sched in (wide, narrow)]
    assert found == [EAGER[name][1], False]
    assert_engines_agree(F, wide, derivatives=name == "product")


def test_the_eager_part_of_kinds() -> None:
    sched = cavs.schedule(BATCHES["three kinds"])
    one = next(iter(function("product").fns.values()))
    assert_engines_agree(cavs.VertexFunction(dict.fromkeys(sched.shape.kinds, one), state=(7,)), sched)


def test_xla_computes_no_product_of_the_eager_part() -> None:
    """So no padding is computed, and the gradients of its weight are in the library, too."""
    sched = cavs.schedule(BATCHES["forest"])
    rows = inputs(sched)

    def f(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather_all(lambda h: h) @ params["u"] + _product(params, v))
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(f, state=(7,))

    def text(engine: str) -> str:
        step = jax.jit(jax.grad(lambda p, x: loss(p, x, rows["word"], sched, F, engine), (0, 1)))
        return step.lower(PARAMS, rows["x"]).as_text()

    products = {
        e: [line for line in text(e).splitlines() if "dot_general" in line and "5x7" in line] for e in ("native", "scan")
    }
    assert products["scan"] and not products["native"]


@pytest.mark.parametrize("chains", [1, 64])  # with 64, the levels run the eager part
def test_padding_adds_nothing_in_a_batch_without_vertices_with_children(chains: int) -> None:
    """What the library leaves in the rows of the eager part is then no vertex's, and z = 0 makes the gradient of "b" NaN."""
    chains_and_leaves = cavs.from_parents([*[[*range(1, 12), -1]] * chains, *[[-1]] * max(chains, 6)])
    given = [range(chains), range(chains, chains + max(chains, 6))]
    _, sched = cavs.data.Loader(chains_and_leaves, given, seed=None, steps=1, shapes=1)
    assert sched.shape.inner[0] and not int(sched.inner_count[0])

    def f(params: Any, v: cavs.Vertex) -> None:
        z = _product(params, v)
        h = jnp.tanh(v.gather_all(lambda h: h) @ params["u"] + z)
        v.scatter(h)
        v.push(jnp.log((z * (params["b"] + h * h)) ** 2) * h)

    F, rows = cavs.VertexFunction(f, state=(7,)), jax.tree.map(sched.pad, inputs(sched))
    gradient = jax.jit(jax.grad(lambda p, engine: loss(p, rows["x"], rows["word"], sched, F, engine)), static_argnums=1)
    wide = "the levels run what is eager" in cavs.explain(F, PARAMS, {"x": np.zeros(5, np.float32)}, sched=sched)
    assert wide == (chains == 64)
    got, want = gradient(PARAMS, "native"), gradient(PARAMS, "scan")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    assert_same(got, want, 4e-4)  # where z is near 0, the logarithm's derivative is large: either engine is 1e-4 from float64
