"""Zeros keep their sign, and infinity and NaN times zero stay NaN: in what leaves gather, in literals, in equal equations."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cavs
from cavs._function.common_subexpressions import merge_common_subexpressions
from cavs._function.unroll import trace
from cavs._jaxpr.equal_jaxprs import equal_jaxprs, same_parameters
from cavs.kernels import native_unavailable
from tests.programs import PROGRAMS
from tests.slow import few

VALUES = np.array([-2, -1, -0.5, -0.0, 0.0, 0.5, 3, np.inf, -np.inf, np.nan], np.float32)

# Functions of what a leaf gathers, and of the values.
OF_ZERO: dict[str, Any] = {
    "negated": lambda g, x: -g,
    "negated reciprocal": lambda g, x: -(1 / -g),
    "product": lambda g, x: g * x,
    "product, the other way": lambda g, x: x * g,
    "negated product": lambda g, x: -(g * x),
    "product with tanh": lambda g, x: g * jnp.tanh(x),
    "product with a gate": lambda g, x: g * jax.nn.sigmoid(x),
    "product with the rest of a gate": lambda g, x: g * (1 - jax.nn.sigmoid(x)),
    "product with a negative gate": lambda g, x: g * (jax.nn.sigmoid(x) - 1),
    "product with a mask": lambda g, x: g * (x > 0),
    "product with a constant": lambda g, x: g * -3.0,
    "product with infinity": lambda g, x: g * jnp.inf,
    "square": lambda g, x: g * g,
    "sum": lambda g, x: x + g,
    "difference": lambda g, x: x - g,
    "difference, the other way": lambda g, x: g - x,
    "quotient": lambda g, x: g / x,
    "quotient, the other way": lambda g, x: x / g,
    "angle": lambda g, x: jnp.arctan2(-g, x),
    "selected": lambda g, x: jnp.where(x > 0, g, -g),
    "absolute": lambda g, x: jnp.abs(-g),
    "sign": lambda g, x: jnp.sign(g) * x,
}
# Functions of the values, with literals.
OF_LITERALS: dict[str, Any] = {
    "zeros times": lambda g, x: jnp.zeros_like(x) * x,
    "negative zeros times": lambda g, x: jnp.full_like(x, -0.0) * x,
    "negative zeros": lambda g, x: jnp.full_like(x, -0.0),
    "zeros": lambda g, x: jnp.zeros_like(x),
    "angle of zero": lambda g, x: jnp.arctan2(jnp.full_like(x, 0.0), x),
    "angle of negative zero": lambda g, x: jnp.arctan2(jnp.full_like(x, -0.0), x),
    "zeros times infinity": lambda g, x: jnp.zeros_like(x) * jnp.inf * x,
    "parameter that is pushed": lambda g, x: jnp.float32(-0.0) * (x == x),
}
HIDES_NAN = ("product with a gate", "product with the rest of a gate")  # the gate of a leaf's zero is not computed


def probes(fns: dict[str, Any], g: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    """Each result, and its reciprocal, which shows the sign of a zero."""
    return {name: jnp.stack([y := fn(g, x), 1 / y]) for name, fn in fns.items()}


@pytest.mark.parametrize("engine", ["scan", "native"])
@pytest.mark.parametrize("gathered", few(["one child", "all children"], 1))
@pytest.mark.parametrize("fns", [OF_ZERO, OF_LITERALS], ids=["zero", "literals"])
def test_leaves(engine: str, gathered: str, fns: dict[str, Any]) -> None:
    if engine == "native" and (reason := native_unavailable()):
        pytest.skip(reason)

    def cell(p: Any, v: Any) -> None:
        g = v.gather(0) if gathered == "one child" else v.gather_all(lambda s: s)
        found = probes(fns, g, v.pull())
        v.scatter(jnp.tanh(v.pull() * p + g))
        v.push(found)

    F = cavs.VertexFunction(cell, state=(1,), arity=1)
    leaves = cavs.schedule(cavs.from_lengths([1] * len(VALUES)))
    got = cavs.run(F, jnp.float32([1]), leaves, VALUES[:, None], engine=engine)
    want = jax.jit(jax.vmap(lambda x: probes(fns, jnp.zeros(1, jnp.float32), x)))(VALUES[:, None])
    for name in fns:
        rows = ~np.isnan(VALUES) if name in HIDES_NAN else slice(None)
        np.testing.assert_allclose(got[name][rows], want[name][rows], rtol=1e-6, err_msg=name)


def test_a_negative_zero_that_is_scattered() -> None:
    """A parameter becomes a value of each vertex without a change."""

    def cell(p: Any, v: Any) -> None:
        v.scatter(p)
        v.push(1 / v.gather_all(lambda s: s, reduce="max"))

    F = cavs.VertexFunction(cell, state=(1,))
    pushed = cavs.run(F, jnp.float32([-0.0]), cavs.schedule(cavs.from_lengths([2])), engine="scan")
    assert pushed[1, 0] == -np.inf


# --- literals
NAN, OTHER_NAN = np.float32(np.nan), np.array(0x7FC00001, np.uint32).view(np.float32)[()]
LITERALS = [
    0.0,
    -0.0,
    1.0,
    1,
    True,
    np.float32(0),
    np.float32(-0.0),
    NAN,
    OTHER_NAN,
    -NAN,
    np.float16(0),
    np.float64(0),
    np.inf,
]


def alike(a: Any, b: Any) -> bool:
    (x, y), (of, other) = (jnp.asarray(a), jnp.asarray(b)), (jax.typeof(jnp.asarray(a)), jax.typeof(jnp.asarray(b)))
    return of == other and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations_with_replacement(LITERALS, 2)))
def test_literals_are_equal_if_their_bytes_are(a: Any, b: Any) -> None:
    def made(c: Any) -> Any:
        return jax.make_jaxpr(lambda x: lax.select_n(x, jnp.asarray(c), jnp.asarray(c)))(True)

    assert equal_jaxprs(made(a), made(b)) == alike(a, b)
    both, _, _ = trace(lambda x: [jnp.broadcast_to(jnp.asarray(c), (2,)) for c in (a, b)], jnp.zeros(()))
    assert (len(merge_common_subexpressions(both).eqns) == 1) == (alike(a, b) or len(both.eqns) == 1)


@pytest.mark.parametrize(("a", "b", "same"), [(0.0, -0.0, False), (0.0, 0.0, True), (np.nan, np.nan, True), (1, True, False)])
def test_parameters_are_equal_if_their_bytes_are(a: Any, b: Any, same: bool) -> None:
    eqn = jax.make_jaxpr(jnp.sin)(1.0).eqns[0]
    assert same_parameters(eqn.replace(params={"c": a}), eqn.replace(params={"c": b})) == same


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize(("first", "second"), few([(0.0, -0.0), (-0.0, 0.0), (1.0, np.nan), (np.nan, np.nan)], 1))
def test_two_loops_of_one_line_that_differ_in_a_literal(first: float, second: float, budget: str | None) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        out = 0.0
        for weight, c in ((1, first), (10, second)):
            h, _ = lax.scan(lambda h, _, c=c: (jnp.sin(h @ w) + lax.atan2(jnp.full_like(h, c), h), None), x, None, length=3)
            out += weight * jnp.sum(h**2)
        return out

    w, x = jnp.eye(3) * 0.7, -jnp.ones((4, 3))
    got = jax.jit(jax.value_and_grad(cavs.memory.recompute(loss, budget)))(w, x)
    want = jax.jit(jax.value_and_grad(loss))(w, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "NaryTreeLSTM", "GRU", "ChildSumTreeLSTM"])
def test_leaves_of_gated_cells_compute_no_product_with_zero(name: str) -> None:
    """What multiplies the state of no child is between 0 and 1, so it is not computed."""
    from cavs._run.plans import plan_of

    program = PROGRAMS[name]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (program.params, program.rows))
    plan = plan_of(program.function, *shapes)
    (leaf,) = plan.leaf.values()
    products = [e for e in leaf.program.eqns if e.primitive.name == "dot_general"]
    gates = [e for e in leaf.program.eqns if e.primitive.name == "logistic"]
    assert (len(products), len(gates)) == (1, 2)
