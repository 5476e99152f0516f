"""Engine `native` runs F at the leaves in its library, or XLA does if the library lacks something; results are the same."""

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

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))

RNG = np.random.default_rng(3)
PARAMS = {"w": (5, 7), "u": (7, 7), "b": (7,), "start": (7,), "table": (11, 7)}
PARAMS = {k: (RNG.standard_normal(v) / 2).astype(np.float32) for k, v in PARAMS.items()}


def _product(params: Any, v: cavs.Vertex) -> tuple[Any, Any]:
    z = v.pull()["x"] @ params["w"] + params["b"]
    return jnp.tanh(z), jax.nn.sigmoid(z[::-1])


def _as_pulled(params: Any, v: cavs.Vertex) -> tuple[Any, Any]:
    x = jnp.concatenate([v.pull()["x"], v.pull()["x"][:2]])
    return x, x


def _pushes_a_parameter(params: Any, v: cavs.Vertex) -> tuple[Any, Any]:
    return _product(params, v)[0], jnp.tanh(params["start"])


def _scatters_a_parameter(params: Any, v: cavs.Vertex) -> tuple[Any, Any]:
    return params["start"], jnp.zeros(7, jnp.float32)


def _of_a_table(params: Any, v: cavs.Vertex) -> tuple[Any, Any]:
    return params["table"][v.pull()["word"]], jnp.cumsum(v.pull()["x"])[0] * params["b"]


# Leaves return their state and what they push. With why XLA runs them.
LEAVES: dict[str, tuple[Callable[..., Any], str]] = {
    "product": (_product, ""),
    "as pulled": (_as_pulled, ""),
    "pushes a parameter": (_pushes_a_parameter, ""),
    "scatters a parameter": (_scatters_a_parameter, "XLA runs the leaves: it scatters what follows from parameters alone."),
    "a table": (_of_a_table, "XLA runs the leaves: the library has no"),
}


def function(name: str, pushes_state: bool) -> cavs.VertexFunction:
    def f(params: Any, v: cavs.Vertex) -> None:
        if v.is_leaf():
            h, y = LEAVES[name][0](params, v)
        else:
            h = jnp.tanh(v.gather_all(lambda h: h) @ params["u"] + params["b"])
            y = h * params["b"]
        v.scatter(h)
        v.push(h if pushes_state else {"y": y, "h": h})

    return cavs.VertexFunction(f, state=(7,))


def inputs(sched: cavs.Schedule) -> dict[str, np.ndarray]:
    rng, n = np.random.default_rng(4), int(sched.num_vertices)
    return {"x": rng.standard_normal((n, 5)).astype(np.float32), "word": rng.integers(0, 11, n)}


def loss(params: Any, x: Any, word: Any, sched: cavs.Schedule, F: cavs.VertexFunction, engine: str) -> jax.Array:
    pushes = cavs.run(F, params, sched, {"x": x, "word": word}, engine=engine)
    return jnp.stack([jnp.sum(jnp.sin(y + jnp.arange(y.shape[-1]))) for y in jax.tree.leaves(pushes)]).sum()


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def assert_engines_agree(F: cavs.VertexFunction, sched: cavs.Schedule, derivatives: bool = False) -> None:
    """Compares engine native with scan: values and gradients, and with `derivatives` also under `jax.vmap` and `jax.jvp`."""
    rows = inputs(sched)
    of = jax.value_and_grad(lambda p, x, engine: loss(p, x, rows["word"], sched, F, engine), (0, 1))

    def once(engine: str) -> Any:
        return of(PARAMS, rows["x"], engine)

    def batched(engine: str) -> Any:
        return jax.vmap(lambda x: of(PARAMS, x, engine))(np.stack([rows["x"], -rows["x"]]))

    def second(engine: str) -> Any:
        return jax.jvp(lambda x: of(PARAMS, x, engine)[1], (rows["x"],), (rows["x"],))

    for fn in (once, batched, second) if derivatives else (once,):
        assert_same(*(jax.jit(fn, static_argnums=0)(engine) for engine in ("native", "scan")))


@pytest.mark.parametrize(("name", "pushes_state"), few([("product", True), *((name, False) for name in LEAVES)], 2))
def test_leaves_in_the_library_are_those_of_engine_scan(name: str, pushes_state: bool) -> None:
    F, sched = function(name, pushes_state), cavs.schedule(BATCHES["forest"])
    text = cavs.explain(F, PARAMS, {"x": np.zeros(5, np.float32), "word": np.int32(0)})
    assert (LEAVES[name][1] or "It runs the leaves, too.") in text
    assert_engines_agree(F, sched, derivatives=pushes_state or name == "pushes a parameter")


def test_xla_computes_nothing_for_the_leaves() -> None:
    """So no padding of leaves is computed: the library runs the rows of vertices."""
    sched = cavs.schedule(BATCHES["wide"])
    rows = inputs(sched)

    def text(engine: str) -> str:
        F = function("product", pushes_state=True)
        step = jax.jit(jax.grad(lambda p, x: loss(p, x, rows["word"], sched, F, engine), (0, 1)))
        return step.lower(PARAMS, rows["x"]).as_text()

    for operation in ("tanh", "dot_general", "logistic"):
        assert operation not in text("native").replace("cavs", "")
    assert "tanh" in text("scan") and "dot_general" in text("scan")


def test_batches_of_leaves_alone_and_of_kinds_without_leaves() -> None:
    F = function("product", pushes_state=False)
    alone = cavs.schedule(cavs.from_parents([[-1], [-1], [-1]]))
    kinds = cavs.schedule(BATCHES["three kinds"])
    both = cavs.VertexFunction(dict.fromkeys(kinds.shape.kinds, next(iter(F.fns.values()))), state=(7,))
    for sched, fn in ((alone, F), (kinds, both)):
        rows = inputs(sched)
        of = jax.value_and_grad(
            lambda p, x, engine, rows=rows, sched=sched, fn=fn: loss(p, x, rows["word"], sched, fn, engine), (0, 1)
        )
        assert_same(*(jax.jit(of, static_argnums=2)(PARAMS, rows["x"], engine) for engine in ("native", "scan")))
