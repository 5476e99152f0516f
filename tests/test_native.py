"""Engine `native`: its library in C++ computes what engine `scan` does, refuses what it lacks, checks indices."""

import contextlib
import functools
import importlib.metadata
import platform
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs.kernels import native_unavailable
from cavs.kernels._cpu import library
from tests.odd_graphs import BATCHES
from tests.programs import CASES, IN_FORESTS, PROGRAMS
from tests.slow import few
from tests.truth import batch_inputs, call, gradients, sched, truth
from tests.vertex_functions import COPYING, copying

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))


def attention(params: Any, v: cavs.Vertex) -> None:
    """All children, weighted by scores; a maximum, a comparison and their number besides."""
    x = v.pull() @ params["w"]
    a = v.gather_all(lambda h: (jnp.sum(x * h), jnp.tanh(h @ params["u"])), reduce="softmax")
    b = v.gather_all(lambda h: h * 2, reduce="max")
    h = jnp.tanh(jnp.where(v.num_children() > 1, a, jnp.exp(-b)) + x[::-1] / (1 + v.num_children()))
    v.scatter(h)
    v.push({"h": h, "more": jnp.concatenate([a, b[:1]])})


F = cavs.VertexFunction(attention, state=(6,))
# Programs that pass states on as they are; half of those that overwrite states (`test_run` runs the others); edges; a matrix
# whose rows are states.
COPIES = tuple(step.__name__ for step in COPYING)
TABLE = [case for case in IN_FORESTS if not case[0].startswith(COPIES)][1::2] + [
    case for case in CASES if case[0].startswith(COPIES)
]
TABLE += [("matrix states", "binary"), ("attention", "wide"), ("edge messages", "wide"), ("edge messages", "three kinds")]
UNDER_DISABLE_JIT = [("copying kinds", "forest of three kinds", jax.disable_jit), ("attention", "wide", jax.disable_jit)]
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((3, 6)).astype(np.float32), "u": RNG.standard_normal((6, 6)).astype(np.float32) / 3}


def loss(params: Any, x: Any, sched: cavs.Schedule, engine: str, function: cavs.VertexFunction = F) -> Any:
    pushes = cavs.run(function, params, sched, x, engine=engine)
    return sum(jnp.sum(jnp.sin(y) * jnp.arange(y.shape[-1])) for y in jax.tree.leaves(pushes))


def value_and_gradients(params: Any, x: Any, sched: cavs.Schedule, engine: str, function: cavs.VertexFunction = F) -> Any:
    return jax.jit(jax.value_and_grad(lambda p, x: loss(p, x, sched, engine, function), (0, 1)))(params, x)


def rows(sched: cavs.Schedule) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((int(sched.num_vertices), 3)).astype(np.float32)


def assert_same(fn: Any) -> None:
    got, want = fn("native"), fn("scan")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def _complete(height: int) -> list[int]:
    """The parents of a complete binary tree, leaves first."""
    parents, begin = [], 0
    for level in range(height, 0, -1):
        begin += 2**level
        parents += [begin + i // 2 for i in range(2**level)]
    return [*parents, -1]


@pytest.mark.parametrize(
    ("name", "batch", "switch"), few([(*case, contextlib.nullcontext) for case in TABLE] + UNDER_DISABLE_JIT, 14)
)
def test_gradients_are_those_of_the_loop_over_vertices(name: str, batch: str, switch: Any) -> None:
    function, graphs = PROGRAMS[name].function, BATCHES[batch]

    def in_float32(x: Any) -> Any:
        return x.astype(np.float32) if x.dtype == np.float64 else x

    def run(params: Any, inputs: Any) -> Any:
        return call(functools.partial(cavs.run, engine="native"), function, params, sched(batch), inputs)

    params, inputs = jax.tree.map(in_float32, (PROGRAMS[name].params, batch_inputs(name, batch)))
    both = functools.partial(gradients, run, rows=graphs.num_vertices)
    with switch():  # jax.jit has no effect under jax.disable_jit
        grads, pushes = jax.jit(both)(params, inputs)
    for got, want in zip(jax.tree.leaves((pushes, grads)), jax.tree.leaves(truth(name, batch)), strict=True):
        if got.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("step", few(COPYING, 2), ids=lambda step: step.__name__)
def test_states_are_copied_in_levels_of_many_tiles(step: Any) -> None:
    function = cavs.VertexFunction(copying(step, "by number"), state={"c": (72,), "h": (72,)}, arity=2)
    params = {"w": RNG.standard_normal((3, 72)).astype(np.float32), "u": RNG.standard_normal((72, 72)).astype(np.float32) / 9}
    sched = cavs.schedule(cavs.from_parents([_complete(6)] * 40))
    assert_same(lambda engine: value_and_gradients(params, rows(sched), sched, engine, function))


@pytest.mark.parametrize("name", ["very wide", "of many levels"])
def test_gradients_are_those_of_engine_scan(name: str) -> None:
    trees = cavs.from_parents([_complete(6)] * 9)
    sched = cavs.schedule(BATCHES["wide"] + trees if name == "of many levels" else BATCHES[name])
    assert_same(lambda engine: value_and_gradients(PARAMS, rows(sched), sched, engine))


def test_complex_numbers_outside_of_the_levels() -> None:
    def spectrum(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() @ params["w"] + v.gather_all(lambda h: h) @ params["u"])
        v.scatter(h)
        v.push(jnp.fft.irfft(jnp.fft.rfft(h) ** 2, 6))

    sched = cavs.schedule(BATCHES["wide"])
    function = cavs.VertexFunction(spectrum, state=(6,))
    assert_same(lambda engine: value_and_gradients(PARAMS, rows(sched), sched, engine, function))


STRETCHED = {
    "a vector to all rows": lambda p, k, h: jnp.tanh(k + h @ p["u"]).sum(0),
    "a column": lambda p, k, h: (k * jnp.tanh(k @ p["u"])[:, :1]).sum(0) + h,
    "a weight": lambda p, k, h: jnp.tanh(k * p["s"] + h).max(0),
    "two of them": lambda p, k, h: (jnp.tanh(h)[None] * k[:, 2:3]).sum(0),
    "attention": lambda p, k, h: jax.nn.softmax(jnp.tanh(k + h @ p["u"]) @ p["s"]) @ k + h,
}


@pytest.mark.parametrize("name", few(STRETCHED, 3))
def test_axes_of_one_are_repeated(name: str) -> None:
    """Elementwise equations of JAX repeat axes of 1 without saying so."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(STRETCHED[name](p, v.pull(), v.gather(0) + v.gather(1)))
        v.scatter(h)
        v.push(h)

    function = cavs.VertexFunction(fn, state=(6,), arity=2)
    sched = cavs.schedule(cavs.from_parents([_complete(3), _complete(2)]))
    keys = RNG.standard_normal((int(sched.num_vertices), 5, 6)).astype(np.float32)
    params = PARAMS | {"s": RNG.standard_normal(6).astype(np.float32)}
    assert_same(lambda engine: value_and_gradients(params, keys, sched, engine, function))


@pytest.mark.slow
def test_vmap_and_second_derivatives_run_on_engine_scan() -> None:
    sched = cavs.schedule(cavs.from_parents([[2, 2, 3, -1], [1, -1]]))
    x = rows(sched)

    def product(engine: str) -> Any:
        return jax.jvp(lambda p: jax.grad(loss)(p, x, sched, engine), (PARAMS,), (PARAMS,))[1]

    def batched(engine: str) -> Any:
        each = jax.vmap(jax.jit(jax.value_and_grad(lambda p, x: loss(p, x, sched, engine))), (None, 0))
        return each(PARAMS, np.stack([x, 2 * x, -x]))

    assert_same(product)
    assert_same(batched)


def test_a_wide_program_runs_on_all_threads() -> None:
    """Products of several blocks and panels, in levels that the threads share."""
    program = vp.BinaryTreeLSTM(72, 3)
    params = program.init(jax.random.key(0))
    sched = cavs.schedule(cavs.from_parents([_complete(6)] * 40))
    fn = program.vertex_function()
    assert_same(lambda engine: value_and_gradients(params, rows(sched), sched, engine, fn))


def test_threads_add_the_cotangents_of_several_parents() -> None:
    """Layers of vertices with children in the layer before, which have many parents or none."""
    rng, layers, width = np.random.default_rng(2), 4, 300
    children: list[list[int]] = [[] for _ in range(width)]
    for k in range(1, layers):
        children += [(width * (k - 1) + rng.integers(0, width // 3, rng.integers(1, 5))).tolist() for _ in range(width)]
    graph = cavs.Graphs.build([len(children)], [len(c) for c in children], np.concatenate([np.array(c, int) for c in children]))
    sched = cavs.schedule(graph)
    x = rows(sched)
    assert_same(lambda engine: value_and_gradients(PARAMS, x, sched, engine))
    first, again = (jax.grad(loss)(PARAMS, x, sched, "native") for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first.values(), again.values(), strict=True))  # every sum has an order


@pytest.mark.parametrize(
    ("params", "how", "text"),
    [(jax.tree.map(np.float64, PARAMS), {}, "computes with float64"), (PARAMS, {"policy": "serial"}, "vertex by vertex")],
)
def test_it_says_why_it_cannot_run(params: Any, how: dict[str, Any], text: str) -> None:
    sched = cavs.schedule(BATCHES["wide"], **how)
    with pytest.raises(ValueError, match=f"engine: got 'native', but.*{text}.*Write engine='scan'"):
        cavs.run(F, params, sched, rows(sched).astype(params["w"].dtype), engine="native")


def test_explain_says_which_engine_runs() -> None:
    assert "Engine native: fits." in cavs.explain(F, PARAMS, np.zeros(3, np.float32))

    def odd(params: Any, v: cavs.Vertex) -> None:
        v.scatter(jax.lax.cumsum(v.gather(0)))
        v.push(v.gather(0))

    text = cavs.explain(cavs.VertexFunction(odd, state=(6,), arity=1), PARAMS)
    assert "Engine native: no: the recurrent part of F does not fit it: the library has no cumsum." in text


def test_an_index_out_of_range_is_an_error() -> None:
    sched = cavs.schedule(cavs.from_parents([[2, 2, 3, -1]]))
    broken = cavs.Schedule(np.where(sched.data == int(sched.edge_child.max()), 10**6, sched.data), sched.shape)
    step = jax.jit(lambda s, x: cavs.run(F, PARAMS, s, x, engine="native"))
    with pytest.raises(Exception, match="engine native.*out of range"):
        jax.block_until_ready(step(broken, sched.pad(rows(sched))))


def test_a_clone_that_hides_an_installation_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cavs" / "kernels" / "_cpu"
    folder.mkdir(parents=True)
    (folder / "levels-avx2.so").touch()
    monkeypatch.setattr(library, "VARIANTS", {platform.machine(): ("none",)})  # no library is here
    monkeypatch.setattr(library, "runs_here", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: mock.Mock(locate_file=lambda path: tmp_path / path))
    with pytest.warns(UserWarning, match="cavs is imported from .*not compiled, and not from .* Write pip install -e"):
        assert str(tmp_path) in str(library.native_unavailable.__wrapped__())


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda: "another")
    assert "compiled from other sources" in str(library.native_unavailable.__wrapped__())
