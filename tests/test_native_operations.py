"""Each operation of engine `native` returns what JAX does, for every dtype and all values, with every instruction set."""

import ctypes
import functools
import itertools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cavs
from cavs._engines.native import call as native_call, lower as native_lower
from cavs.kernels import NATIVE_OPERATIONS, native_unavailable
from cavs.kernels._cpu import build, library

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))

_OF_TANH = {e.primitive.name: e.primitive for e in jax.make_jaxpr(jax.grad(jnp.tanh))(1.0).eqns}
ULPS = 6  # from the result in float64; XLA's own functions are no better
WIDTH = 37  # two vectors of 16 floats, or four of 8, and a rest

# How JAX writes the operations. The second of a pair is for integers and booleans.
WRITTEN: dict[str, Callable[..., Any]] = {
    "one_minus_square": lambda x: _OF_TANH["one_minus_square"].bind(x),
    "integer_pow": lambda x: lax.integer_pow(x, 5),
    "copy": jnp.copy,
    "not": lax.bitwise_not,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "to_float": lambda x: x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32),
    "to_int": lambda x: x.astype(jnp.int32),
    "to_bool": lambda x: x.astype(jnp.bool_),
}
OTHERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "negative power": ("integer_pow", lambda x: lax.integer_pow(x, -3)),
    "power 0": ("integer_pow", lambda x: lax.integer_pow(x, 0)),
    "select by integers": ("select_n", lambda a, b, c: lax.select_n((a < b).astype(jnp.int32), b, c)),
}
CASES = [(name, kind) for name, operation in NATIVE_OPERATIONS.items() for kind in sorted(operation.types)]
CASES = [case for case in CASES if case[0] != "one_minus_square" or case[0] in _OF_TANH]  # JAX 0.10 has no such primitive
CASES += [(name, "f") for name in OTHERS]

FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.5,
    3.0,
    1e-3,
    -1e-7,
    9.0,
    -9.02,
    20.0,
    87.0,
    -87.0,
    88.8,
    -104.5,
    2.0**24 + 2,
    1e10,
    3.4e38,
]
FLOATS += [-3.4e38, 2.0**31, -(2.0**31), 2147483520.0, 1e-40, -1e-40, 1.2e-38, np.inf, -np.inf, np.nan]
INTS = [0, 1, -1, 2, -2, 3, 5, 31, 32, 46341, -46341, 65536, 2**24 + 1, 123456789, 2**31 - 1, -(2**31), -(2**31) + 1]
FEW = {"f": [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, np.inf, -np.inf, np.nan, 1e-40], "i": [0, 1, -1, 2, 2**31 - 1, -(2**31)]}
DTYPES = {"f": np.float32, "i": np.int32, "b": np.bool_}


def written(name: str) -> tuple[str, Callable[..., Any]]:
    """Returns an operation, and what JAX writes for it."""
    if name in OTHERS:
        return OTHERS[name]
    plain = name.removesuffix("_i")
    return name, WRITTEN.get(plain) or getattr(lax, plain)


def operands(name: str, kind: str, count: int) -> list[np.ndarray]:
    """Returns all tuples of special values, and random ones: `count` arrays of (n, WIDTH)."""
    if kind == "b":
        values = [False, True]
    elif count == 3:
        values = FEW[kind]
    else:
        values = FLOATS if kind == "f" else INTS
    of = [np.array(x, DTYPES[kind]) for x in zip(*itertools.product(values, repeat=count), strict=True)]
    rng = np.random.default_rng(0)
    more = (400 if count == 1 else 40) * WIDTH - len(of[0]) % WIDTH
    bits = rng.integers(-(2**31), 2**31, (count, more)).astype(np.int32)
    usual = rng.standard_normal((count, more)).astype(np.float32) * 4
    random = {"f": np.where(bits % 2, bits.view(np.float32), usual), "i": bits, "b": bits > 0}[kind]
    of = [np.concatenate([x, y.astype(x.dtype)]).reshape(-1, WIDTH) for x, y in zip(of, random, strict=True)]
    return [of[0].astype(np.bool_), *of[1:]] if name == "select_n" else of


@pytest.fixture(params=[name for name in build.VARIANTS.get(platform.machine(), ())])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with the library of one instruction set."""
    path = Path(library.__file__).with_name(f"levels-{request.param}.so")
    if not library.runs_here(request.param) or not path.exists():
        pytest.skip("this processor lacks it, or the library was not compiled for it")
    target = f"cavs_levels_{request.param}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(ctypes.CDLL(str(path)).cavs_levels), platform="cpu")
    monkeypatch.setattr(native_call, "NATIVE_LEVELS", target)
    return request.param


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collects the elementwise operations that the library is asked for."""
    found: set[str] = set()

    def spy(eqn: Any) -> str | None:
        operation = native_lower_elementwise(eqn)
        found.add(operation or "")
        return operation

    native_lower_elementwise = native_lower.elementwise
    monkeypatch.setattr(native_lower, "elementwise", spy)
    yield found


def in_levels(op: Callable[..., Any], of: list[np.ndarray], engine: str | None) -> np.ndarray:
    """Applies `op` in F, once for each row of the operands, to what a vertex gathers."""
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in of))

    def fn(p: Any, v: cavs.Vertex) -> None:
        y = op(*v.gather(0)["of"])
        v.scatter({"of": v.pull(), "out": y})
        v.push(y)

    state = {"of": [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in of], "out": out}
    F, n = cavs.VertexFunction(fn, state=state, arity=1), len(of[0])
    rows = [np.repeat(x, 2, 0) for x in of]  # of a leaf, and of its parent
    return np.asarray(cavs.run(F, {}, cavs.schedule(cavs.from_lengths([2] * n)), rows, engine=engine))[1::2]


def flushed(x: np.ndarray) -> np.ndarray:
    """XLA's threads take numbers below the smallest normal one as 0."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x).astype(x.dtype) if x.dtype.kind == "f" else x


@np.errstate(all="ignore")
def assert_as_jax(op: Callable[..., Any], of: list[np.ndarray], got: np.ndarray, exact: Any = None, terms: Any = 0) -> None:
    """Compares with XLA, and, as XLA rewrites some equations, with the result in float64.

    Args:
        op: The operation.
        of: Its operands.
        got: Its result in the library.
        exact: The result in float64; `None` for that of JAX.
        terms: The size of what is rounded before the result is, if it is larger than that.
    """
    want = np.asarray(jax.jit(op)(*of))
    assert got.dtype == want.dtype
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    if exact is None:
        exact = op(*(jnp.asarray(flushed(x).astype(np.float64) if x.dtype.kind == "f" else x) for x in of))
    exact, got, want = np.asarray(exact), flushed(got), flushed(want)
    size = np.maximum(np.maximum(np.abs(exact), terms), np.finfo(np.float32).tiny)
    near = np.isfinite(want) & (want != 0) & (np.abs(got - exact) <= ULPS * np.spacing(size.astype(np.float32)))
    wrong = np.argwhere(~(near | _equal(got, want) | _equal(got, flushed(exact.astype(np.float32)))))[:8]
    assert not len(wrong), [(*(x[i[0]].tolist() for x in of), i, "got", got[tuple(i)], "want", want[tuple(i)]) for i in wrong]


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_operation_is_that_of_jax(name: str, kind: str, instructions: str, computed: set[str]) -> None:
    operation, op = written(name)
    of = operands(name, kind, NATIVE_OPERATIONS[operation].operands)
    got = in_levels(op, of, "native")
    assert operation in computed
    terms = np.nan_to_num(np.clip(of[0], -1e19, 1e19)) ** 2 if name == "one_minus_square" else 0
    assert_as_jax(op, of, got, terms=terms)


@pytest.mark.parametrize(
    ("name", "kind"), [("sub", "f"), ("lt", "f"), ("clamp", "f"), ("select_n", "i"), ("sub_i", "i"), ("or", "b")]
)
def test_an_operand_of_one_element_is_repeated(name: str, kind: str, instructions: str) -> None:
    operation, op = written(name)
    of = operands(name, kind, NATIVE_OPERATIONS[operation].operands)
    for one in range(len(of)):

        def repeated(*x: Any, one: int = one) -> Any:
            return op(*(jnp.broadcast_to(y[3], y.shape) if i == one else y for i, y in enumerate(x)))

        assert_as_jax(jax.vmap(repeated), of, in_levels(repeated, of, "native"))


# What NumPy calls them, with the dtypes.
REDUCED: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "sum": ("fi", lambda x, axis: lax.reduce_sum(x, axis), np.sum),
    "max": ("fib", jnp.max, np.max),
    "min": ("fib", jnp.min, np.min),
    "and": ("ib", lambda x, axis: lax.reduce_and(x, axis), np.bitwise_and.reduce),
    "or": ("ib", lambda x, axis: lax.reduce_or(x, axis), np.bitwise_or.reduce),
}


def summed(kind: str, name: str, x: np.ndarray) -> np.ndarray:
    """Returns `x` with terms of one size for sums of floats, whose order is not that of JAX."""
    return np.nan_to_num(x, nan=0.5, posinf=2, neginf=-2).clip(-9, 9) if name == "sum" and kind == "f" else x


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (kinds, _, _) in REDUCED.items() for kind in kinds])
def test_a_reduction_is_that_of_jax(name: str, kind: str, axes: tuple[int, ...], instructions: str) -> None:
    _, op, of_numpy = REDUCED[name]
    x = summed(kind, name, operands("neg", kind, 1)[0][:39]).reshape(-1, 3, WIDTH)
    if name == "sum" and kind == "f":  # a special one among others
        x[:6, 1, 5] = np.inf, -np.inf, np.nan, 3e38, 1e-40, -0.0
    got = in_levels(functools.partial(op, axis=axes), [x], "native")
    exact = of_numpy(x.astype(np.float64) if kind == "f" else x, axis=tuple(i + 1 for i in axes))
    assert_as_jax(jax.vmap(functools.partial(op, axis=axes)), [x], got, exact, terms=200 if name == "sum" else 0)


@pytest.mark.parametrize(("name", "kind"), [("sum", "f"), ("sum", "i"), ("max", "f"), ("max", "i")])
def test_a_reduction_of_children_is_that_of_jax(name: str, kind: str, instructions: str) -> None:
    _, op, of_numpy = REDUCED[name]
    x = summed(kind, name, operands("neg", kind, 1)[0][:39])

    def fn(p: Any, v: cavs.Vertex) -> None:
        y = v.gather_all(lambda h: h, reduce=name)  # type: ignore[arg-type]
        v.scatter(jnp.where(v.num_children() > 0, y, v.pull()))
        v.push(y)

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((WIDTH,), x.dtype))
    x = x.reshape(-1, 3, WIDTH)
    graphs = cavs.from_parents([[3, 3, 3, -1]] * len(x))
    rows = np.concatenate([x, np.zeros_like(x[:, :1])], 1).reshape(-1, WIDTH)
    got = np.asarray(cavs.run(F, {}, cavs.schedule(graphs), rows, engine="native"))[3::4]
    exact = of_numpy(x.astype(np.float64) if kind == "f" else x, axis=1)
    assert_as_jax(functools.partial(op, axis=(1,)), [x], got, exact, terms=9 if name == "sum" else 0)


def test_saturated_units_have_no_gradient(instructions: str) -> None:
    """However many children a vertex has: 1 - t * t is 0 from where float32 rounds tanh to 1."""
    n = 100_000
    graphs = cavs.Graphs.build([n + 1], [0] * n + [n], np.arange(n))

    def fn(p: Any, v: cavs.Vertex) -> None:
        s = v.gather_all(lambda h: jnp.tanh(h + p["b"]))
        v.scatter(v.pull() + 0 * s)
        v.push(s)

    F = cavs.VertexFunction(fn, state=(2,))
    sched = cavs.schedule(graphs)
    x = np.random.default_rng(0).uniform(0, 90, (n + 1, 2)).astype(np.float32)
    for sign in (1, -1):
        gradient = jax.grad(lambda p, sign=sign: cavs.run(F, p, sched, sign * x, engine="native")[-1].sum())
        assert gradient({"b": np.float32(sign * 9.02)})["b"] == 0


LACKED = ["div", "rem", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"]


@pytest.mark.parametrize(("name", "kind"), [*((name, "i") for name in LACKED), ("rem", "f"), ("atan2", "f"), ("round", "f")])
def test_an_operation_that_the_library_lacks_runs_on_engine_scan(name: str, kind: str) -> None:
    of = operands("add", kind, 1 if name in ("population_count", "clz", "round") else 2)

    def op(x: Any, *y: Any) -> Any:  # XLA of JAX 0.10 ends the process if it divides the integers of a constant by 0
        return getattr(lax, name)(x, *(y[0] | 1 if kind == "i" else y[0] for _ in y))

    with pytest.raises(ValueError, match="engine: got 'native', but the recurrent part of F does not fit it"):
        in_levels(op, of, "native")
    got, want = in_levels(op, of, None), np.asarray(jax.jit(op)(*of))
    np.testing.assert_array_equal(got, want)
