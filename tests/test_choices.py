"""`lax.cond` and `lax.switch` in F, by what each vertex has: every engine runs them, as the loop over vertices does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cavs
from tests.odd_graphs import joined, random_binary_tree
from tests.persistent_programs import INTERPRETED, INTERPRETER, assert_near, plan_of
from tests.truth import gradients

H = 8
GRAPHS = joined([random_binary_tree(4, seed=n) for n in range(3)])


def poles(p: Any, h: Any, x: Any, children: Any) -> Any:
    """Each branch and its derivative are infinite, or NaN, where the other one is taken."""
    n = children.astype(x.dtype)  # 2, or 0 for leaves
    branches = lambda a: jnp.tanh(a) * p["b"] / n, lambda a: jnp.sqrt(a * a - n) * p["b"] / (2 - n)
    return lax.cond(children > 1, *branches, h + x)


def never(p: Any, h: Any, x: Any, children: Any) -> Any:
    return lax.cond(h.sum() > 1e9, lambda a: (a * p["b"]) @ p["w"] / 0, lambda a: a * p["b"], h + x)


def products(p: Any, h: Any, x: Any, children: Any) -> Any:
    branches = [lambda a, b: jnp.tanh(a @ p["u"] + b), lambda a, b: jnp.sin(a) * b, lambda a, b: (a - a.mean()) @ p["w"]]
    return lax.switch((3 * h.sum()).astype(jnp.int32), branches, h, x)


def nested(p: Any, h: Any, x: Any, children: Any) -> Any:
    def inner(a: Any) -> Any:
        return lax.cond(a.max() > 0.5, lambda a: (a * p["b"], a), lambda a: (a, 2 * a), a)[0]

    return lax.cond(children > 1, inner, lambda a: jnp.full_like(a, 2.0), h + x)


def passed_on(p: Any, h: Any, x: Any, children: Any) -> Any:
    """Operands and constants are results; one of them twice."""
    a, b, c = lax.cond(h.sum() > 0, lambda: (h, h, p["b"]), lambda: (x, jnp.ones_like(x), p["b"]))
    return a * b + c


def by_a_parameter(p: Any, h: Any, x: Any, children: Any) -> Any:
    return lax.cond(p["b"].sum() > 0, lambda: h @ p["u"], lambda: x / jnp.maximum(p["b"].sum(), 0.0))


FUNCTIONS = [poles, never, products, nested, passed_on, by_a_parameter]


def of_sum(fn: Any, hidden: int) -> cavs.VertexFunction:
    def f(p: Any, v: cavs.Vertex) -> None:
        x = v.pull()
        h = jnp.tanh(fn(p, v.gather(0) + v.gather(1), x, v.num_children()) @ p["u"] + x @ p["w"])
        v.scatter(h)
        v.push(h)

    return cavs.VertexFunction(f, state=(hidden,), arity=2)


def of_children(p: Any, v: cavs.Vertex) -> None:
    s = v.gather_all(lambda c: lax.cond(c.sum() > 0, lambda c: c @ p["u"], lambda c: 1 / (2 + jnp.abs(c)), c))
    h = jnp.tanh(s + v.pull() @ p["w"])
    v.scatter(h)
    v.push(h)


def cases(hidden: int) -> dict[str, cavs.VertexFunction]:
    return {fn.__name__: of_sum(fn, hidden) for fn in FUNCTIONS} | {
        "of_children": cavs.VertexFunction(of_children, state=(hidden,))
    }


CASES = cases(H)


def params_and_inputs(hidden: int = H) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    u, w = rng.standard_normal((2, hidden, hidden)) / hidden**0.5
    params = {"u": u, "w": w, "b": rng.uniform(0.5, 1, hidden)}
    return jax.tree.map(np.float32, params), rng.standard_normal((GRAPHS.num_vertices, hidden)).astype(np.float32)


@pytest.mark.parametrize(
    ("engine", "hidden"),
    [
        ("scan", H),
        ("native", H),
        pytest.param(INTERPRETED, H, id="persistent", marks=INTERPRETER),
        pytest.param("persistent", 64, id="persistent on the card", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_loop(name: str, engine: Any, hidden: int) -> None:
    F, (params, x) = cases(hidden)[name], params_and_inputs(hidden)
    sched = cavs.schedule(GRAPHS, scripts=True)
    with jax.default_matmul_precision("highest"):
        got = gradients(lambda p, x: cavs.run(F, p, sched, x, engine=engine), params, x, GRAPHS.num_vertices)
    params, x = jax.tree.map(np.float64, (params, x))
    want = gradients(lambda p, x: cavs.interpret(F, p, GRAPHS, x), params, x, GRAPHS.num_vertices)
    assert_near(got, want, 1e-4)


def test_vertices_have_no_weights_of_their_own() -> None:
    """JAX returns a weight from a `cond` if its derivative reads it: the backward reads the parameter instead."""
    params, x = params_and_inputs()
    part = plan_of(CASES["products"], params, x).inner[None]
    results = [v.aval for e in part.joint.program.eqns if e.primitive.name == "cond" for v in e.outvars]
    assert results
    assert all(len(aval.shape) < 2 for aval in results)


@pytest.mark.parametrize("engine", ["scan", "native"])
@pytest.mark.parametrize("name", ["of_children", "products", "never"])
def test_no_part_has_weights_for_each_vertex(name: str, engine: str) -> None:
    (params, x), sched = params_and_inputs(), cavs.schedule(GRAPHS)
    text = jax.jit(jax.grad(lambda p: cavs.run(CASES[name], p, sched, x, engine=engine).sum())).lower(params).as_text()
    assert "x8x8xf32>" not in text
