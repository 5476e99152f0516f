"""The persistent kernels compute elementwise equations as JAX does, for all values and dtypes, and refuse the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import cavs
from cavs._engines.persistent.device_equations import rewritten
from cavs._engines.persistent.engine import Persistent
from cavs._function.domains import ROW
from cavs._function.unroll import trace
from cavs._jaxpr.equations import bind
from cavs._jaxpr.jaxprs import is_var
from cavs._schedule.schedule import ExportedSchedule
from cavs.kernels import ELEMENTWISE, H200, Target, Unfit, persistent
from cavs.kernels._body.primitives import elementwise
from tests.lower_for_hopper import DEVICE
from tests.odd_graphs import joined, random_binary_tree

FLOATS = np.array(
    [
        0.0,
        -0.0,
        1,
        -1,
        2,
        -2,
        0.5,
        -0.5,
        3,
        -3,
        1.49,
        1.51,
        1e-3,
        -1e-3,
        0.011,
        -0.011,
        1e-6,
        1e-20,
        -1e-20,
        5,
        -5,
        9.2,
        17,
        -17,
    ]
    + [100, -100, 2**24 - 1, 1 - 2**24, 2**24 + 2, 1e10, -1e10, 3e38, -3e38, np.inf, -np.inf, np.nan],
    np.float32,
)
INTS = np.array([0, 1, -1, 2, -2, 3, 7, -7, 100, 2**31 - 1, -(2**31), 1 - 2**31], np.int32)
F = lambda x: x.astype(jnp.float32)  # noqa: E731
I = lambda x: x.astype(jnp.int32)  # noqa: E731, E741

# Of two vectors of float32, a float32 with derivatives. For the kernels of Mosaic GPU, each is another case.
MATHS: dict[str, Callable[[Any, Any], Any]] = {
    "power 0, a power of 0": lambda x, y: x**0 + 0 * y,
    "power 1, whose derivative has power 0": lambda x, y: x**1,
    "power 5": lambda x, y: x**5,
    "power -3": lambda x, y: x**-3,
    "power 2.0": lambda x, y: x**2.0,
    "power -3.0": lambda x, y: x**-3.0,
    "power 17.0": lambda x, y: x**17.0,
    "power 0.5": lambda x, y: x**0.5,
    "any power": lax.pow,
    "powers that are integers": lambda x, y: lax.pow(x, I(y)),
    "number to any power": lambda x, y: lax.pow(jnp.full_like(x, 2.0), y),
    "exp": lambda x, y: jnp.exp(x) + jnp.exp2(y),
    "expm1": lambda x, y: jnp.expm1(x),
    "log": lambda x, y: jnp.log(x) + jnp.log2(y),
    "log1p": lambda x, y: jnp.log1p(x),
    "erf": lambda x, y: lax.erf(x),
    "erfc": lambda x, y: lax.erfc(x),
    "sigmoid": lambda x, y: jax.nn.sigmoid(x) + jnp.tanh(y),
    "sin, cos, tan": lambda x, y: jnp.sin(x) + jnp.cos(x) + jnp.tan(x),
    "atan2": jnp.arctan2,
    "roots": lambda x, y: jnp.sqrt(x) + lax.rsqrt(x),
    "cbrt": lambda x, y: jnp.cbrt(x),
    "sign": lambda x, y: jnp.sign(x),
    "sign of integers": lambda x, y: F(jnp.sign(I(x)) + jnp.abs(I(y)) - I(x) * I(y)),
    "clamp": lambda x, y: lax.clamp(jnp.float32(-1), x, jnp.float32(1)) + jnp.maximum(x, y) + jnp.minimum(x, y),
    "is_finite": lambda x, y: jnp.where(jnp.isfinite(x), x, y),
    "float to bool": lambda x, y: F(x.astype(bool)),
    "int to bool": lambda x, y: F(I(x).astype(bool)),
    "bool to int": lambda x, y: F(I(x > y)) + F(x <= y),
    "bits": lambda x, y: F((~I(x) & I(y)) | 3),
    "truth values": lambda x, y: F(~(x > 0) & (y > 0) | ((x == y) != (x < y))),
    "comparisons of integers": lambda x, y: F((I(x) < I(y)) | (I(x) >= 3)),
    "select": lambda x, y: jnp.where(x < y, x, jnp.where(x >= 0.5, 3 * y, x != 2)),
    "select by integers": lambda x, y: lax.select_n(I(x), x, y, -x),
    "sums and maxima of vectors": lambda x, y: jnp.stack([x, y, 2 * x]).sum(0) - jnp.stack([jnp.stack([x, y])] * 2).max((0, 1)),
    "minima": lambda x, y: jnp.stack([x, y]).min(0) + F(jnp.stack([I(x), I(y)]).max(0)),
}
# Of two vectors of int32.
OF_INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "division": lax.div,
    "remainder": lax.rem,
    "division and remainder of Python": lambda x, y: x // y + x % y,
    "by numbers": lambda x, y: lax.div(x, jnp.int32(3)) + lax.rem(x, jnp.int32(-4)) - lax.div(x, jnp.int32(-1)) + y % 7,
    "powers": lambda x, y: x**3 + y**0,
    "sign": lambda x, y: jnp.sign(x) + jnp.abs(y) - x * y,
    "bool": lambda x, y: x.astype(bool) & (y > x) | (y == 3),
    "bits": lambda x, y: (~x & y) | 3,
    "clamp": lambda x, y: lax.clamp(jnp.int32(-5), x, jnp.int32(7)) + jnp.maximum(x, y) + jnp.minimum(x, 2),
    "select": lambda x, y: lax.select_n(x, y, x, 3 * y) + jnp.where(x < y, x, -y),
}


def of_kernels(fn: Callable[..., Any], *args: np.ndarray) -> np.ndarray:
    """What the body of a kernel computes for `fn`."""
    program, _, _ = trace(fn, *args)
    domain = dict.fromkeys([*program.invars, *(v for e in program.eqns for v in e.outvars)], ROW)
    env: dict[Any, Any] = dict(zip(program.invars, map(jnp.asarray, args), strict=True))
    for e in rewritten(program.eqns, domain)[0]:
        values = [env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype) for x in e.invars]
        if e.primitive.name in ELEMENTWISE:
            env[e.outvars[0]] = elementwise(e, [jnp.broadcast_to(x, e.outvars[0].aval.shape) for x in values])
        else:
            assert e.primitive.name in ("broadcast_in_dim", "slice", "squeeze", "stack", "concatenate", "reshape")
            (env[e.outvars[0]],) = bind(e, values)
    return np.asarray(env[program.outs[0]])


@pytest.mark.parametrize("name", MATHS)
def test_floats_are_those_of_jax(name: str) -> None:
    x, y = np.meshgrid(FLOATS, FLOATS)
    want, got = np.asarray(jax.jit(MATHS[name])(x, y)), of_kernels(MATHS[name], x, y)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-3 if "any power" in name else 2e-5, atol=1e-37)


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_are_those_of_jax(name: str) -> None:
    x, y = np.meshgrid(INTS, INTS)
    want, got = np.asarray(jax.jit(OF_INTEGERS[name])(x, y)), of_kernels(OF_INTEGERS[name], x, y)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_remainders_of_floats_have_no_device_code() -> None:
    with pytest.raises(Unfit, match="rem of floats has no device code"):
        of_kernels(lambda x, y: jnp.fmod(x, y), FLOATS, FLOATS)


def attention(p: Any, v: cavs.Vertex) -> None:
    """Attention of each unit over two children, and powers of negative numbers."""
    children = jnp.stack([v.gather(0), v.gather(1), v.gather(0) ** 2.0 - 0.3 * jnp.abs(v.gather(1)) ** 1.5])
    mixed = (jax.nn.softmax(children, axis=0) * children).sum(0)
    x = jnp.tanh(v.pull() + mixed @ p) ** 3.0 + mixed**1 - mixed.max() ** 0
    v.scatter(x)
    v.push(jax.nn.logsumexp(jnp.stack([x, mixed]), axis=0))


@pytest.mark.skipif(persistent.unsupported(H200) is not None, reason=str(persistent.unsupported(H200)))
def test_kernels_compute_what_was_rewritten() -> None:
    vertex, rng = cavs.VertexFunction(attention, state=(16,), arity=2), np.random.default_rng(0)
    graphs = joined([random_binary_tree(5, seed=n) for n in range(3)])
    sched, x = cavs.schedule(graphs, scripts=True), rng.normal(size=(graphs.num_vertices, 16)).astype(np.float32)
    p, weights = (rng.normal(0, 0.3, s).astype(np.float32) for s in ((16, 16), x.shape))
    got, want = (
        jax.value_and_grad(lambda p, x, e=e: (cavs.run(vertex, p, sched, x, engine=e) * weights).sum(), (0, 1))(p, x)
        for e in (Persistent(interpret="tests.pallas_device"), "scan")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def counting(p: Any, v: cavs.Vertex) -> None:
    """A tree that also counts in integers. A number of `p` and a vector of `p` are constants of its kernels."""
    below, more = v.gather(0), v.pull()["more"]
    count = below["count"] * 3 + p["number"] - p["vector"]
    h = jnp.tanh(v.pull()["x"] + below["h"] @ p["w"]) * jnp.where(p["flag"], jnp.sin(count.astype(jnp.float32)), 1)
    v.scatter({"h": h, "count": count + more.astype(jnp.int32)})
    v.push((h, count))


def counted(dtype: Any) -> tuple[cavs.VertexFunction, Any, cavs.Schedule, Any]:
    state = {"h": (16,), "count": jax.ShapeDtypeStruct((16,), np.int32)}
    graphs, rng = joined([random_binary_tree(5, seed=n) for n in range(3)]), np.random.default_rng(0)
    number, vector = np.int32(2**24 + 1), np.arange(2**24 - 3, 2**24 + 13, dtype=np.int32)
    p = {"w": rng.normal(0, 0.3, (16, 16)).astype(np.float32), "number": number, "vector": vector, "flag": vector % 3 == 0}
    x = rng.normal(size=(graphs.num_vertices, 16)).astype(np.float32)
    sched = cavs.schedule(graphs, scripts=True)
    return cavs.VertexFunction(counting, state=state, arity=2), p, sched, {"x": x, "more": np.ones(x.shape, dtype)}


@pytest.mark.skipif(persistent.unsupported(H200) is not None, reason=str(persistent.unsupported(H200)))
def test_integers_and_booleans_among_parameters_are_exact() -> None:
    """Above 2**24, float32 does not hold all integers."""
    vertex, p, sched, x = counted(np.int32)
    (h, count), want = (cavs.run(vertex, p, sched, x, engine=e) for e in (Persistent(interpret="tests.pallas_device"), "scan"))
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_allclose(h, want[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32", "float16", "bfloat16"])
@pytest.mark.skipif(persistent.unsupported(H200) is not None, reason=str(persistent.unsupported(H200)))
def test_states_of_other_dtypes_do_not_fit(dtype: str) -> None:
    def passing_on(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull()["x"] + v.gather(0)["h"] @ p["w"] + v.gather(0)["more"].astype(jnp.float32))
        v.scatter({"h": h, "more": v.pull()["more"]})
        v.push(h)

    _, p, sched, x = counted(dtype)
    vertex = cavs.VertexFunction(passing_on, state={"h": (16,), "more": jax.ShapeDtypeStruct((16,), dtype)}, arity=2)
    with pytest.raises(ValueError, match=f"float32 values are needed, with int32 and bool beside them, not {dtype}"):
        cavs.run(vertex, p, sched, x, engine=Persistent(interpret="tests.pallas_device"))


@pytest.mark.skipif(persistent.unsupported(H200) is not None, reason=str(persistent.unsupported(H200)))
def test_what_fits_the_kernels_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """All maths of this module, in one F: Pallas lowers the kernels of its forward and backward."""
    monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))
    maths = [*MATHS.values(), *(lambda x, y, fn=fn: F(fn(I(x), I(y))) for fn in OF_INTEGERS.values())]

    def cell(p: Any, v: cavs.Vertex) -> None:
        x = jnp.tanh(v.pull() + v.gather(0) @ p)
        v.scatter(sum((fn(x, v.gather(0)) for fn in maths), x))
        v.push(x)

    sched = cavs.schedule(cavs.from_parents([[1, 2, -1], [1, -1]]), scripts=True)
    vertex = cavs.VertexFunction(cell, state=(16,), arity=1)

    def loss(p: Any, x: Any, data: Any) -> Any:
        return cavs.run(vertex, p, ExportedSchedule(data, sched.shape), x, engine="persistent").sum()

    given = (16, 16), (sched.shape.vertices, 16)
    shapes = [*(jax.ShapeDtypeStruct(s, jnp.float32) for s in given), jax.ShapeDtypeStruct(sched.data.shape, jnp.int32)]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**DEVICE))):
        text = jax.jit(jax.grad(loss, (0, 1))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "cavs_forward" in text and "cavs_backward" in text
