"""`cavs.conv`, the algorithm of Winograd, and the task mapping of MegaKernels."""

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src.interpreters import partial_eval as pe
from jax.sharding import Mesh, PartitionSpec

import cavs
from bench import convolution as bench, networks
from cavs._convolution import choice as choice_module, conv as conv_module, layouts, primitives
from cavs.kernels import H200, ConvolutionSizes, Distances, Target, convolve
from cavs.kernels._tasks.mapping import FILTER, INPUT, OUTPUT, PRODUCT, TaskCounts, task_mapping
from cavs.kernels._tasks.winograd import matrices
from tests.slow import few
from tests.staged_convolution import staged, staged_gradient

needs_jax_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the launch needs jax 0.11")
SAME = ((1, 1), (1, 1))
ODD = {  # (N, H, W, C, K) and padding
    "one pixel": ((1, 1, 1, 1, 1), SAME),
    "odd sides": ((2, 5, 7, 3, 4), SAME),
    "no padding": ((1, 3, 3, 2, 2), ((0, 0), (0, 0))),
    "wide padding": ((2, 8, 6, 5, 3), ((2, 2), (0, 3))),
    "channels": ((3, 9, 9, 33, 65), ((0, 0), (2, 1))),
    "groups": ((4, 28, 28, 64, 64), SAME),
    "1000 channels": ((1, 3, 60, 1000, 2), SAME),
}


def draw(sizes: tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    n, h, w, c, k = sizes
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, h, w, c)).astype(dtype), rng.standard_normal((3, 3, c, k)).astype(dtype)


def loss(f: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(f(x, w)))


def direct(x: Any, w: Any, pads: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest")


def in_float64(x: np.ndarray, w: np.ndarray, pads: Any) -> np.ndarray:
    """The reference: nine shifted products, in NumPy."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    height, width = x.shape[1] - 2, x.shape[2] - 2
    return sum(x[:, i : i + height, j : j + width] @ w[i, j] for i in range(3) for j in range(3))  # type: ignore


@pytest.mark.parametrize("m", [2, 4])
def test_the_matrices_multiply_polynomials(m: int) -> None:
    a, g, b = matrices(m)
    rng = np.random.default_rng(m)
    d, f = rng.standard_normal(m + 2), rng.standard_normal(3)
    np.testing.assert_allclose(a @ ((g @ f) * (b @ d)), np.correlate(d, f), rtol=1e-12)


@pytest.mark.parametrize("name", few(ODD, 4))
@pytest.mark.parametrize("m", [2, 4])
def test_the_stages_equal_a_direct_convolution(m: int, name: str) -> None:
    sizes, pads = ODD[name]
    with jax.enable_x64(True):
        x, w = draw(sizes, np.float64)
        y, of_w = jax.vjp(lambda w: direct(x, w, pads), w)
        np.testing.assert_allclose(staged(jnp.asarray(x), jnp.asarray(w), pads, m), in_float64(x, w, pads), atol=1e-11)
        dy = jnp.asarray(np.random.default_rng(1).standard_normal(y.shape))
        np.testing.assert_allclose(staged_gradient(jnp.asarray(x), dy, pads, m), of_w(dy)[0], atol=1e-10)


@pytest.mark.parametrize("counts", [TaskCounts(3, 7, 2, 4, 3), TaskCounts(1, 20, 4, 16, 8), TaskCounts(2, 5, 1, 2, 1)])
@pytest.mark.parametrize("distances", [(1, 1, 1), (2, 3, 1), (4, 4, 2), (3, 8, 3), (8, 8, 1)])
def test_a_task_comes_after_those_it_needs_and_those_it_overwrites(counts: TaskCounts, distances: Any) -> None:
    found = Distances(*distances)
    tasks = task_mapping(counts, found)
    each = {INPUT: counts.inputs, PRODUCT: counts.products, OUTPUT: counts.outputs}
    expected = {(FILTER, 0, n) for n in range(counts.filters)}
    expected |= {(kind, g, n) for kind, count in each.items() for g in range(counts.groups) for n in range(count)}
    assert sorted(map(tuple, tasks.tolist())) == sorted(expected)

    def places(kind: int, g: int) -> np.ndarray:
        return np.flatnonzero((tasks[:, 0] == kind) & (tasks[:, 1] == g)) if g >= 0 else np.array([-1])

    for g in range(counts.groups):
        assert places(INPUT, g).min() > places(PRODUCT, g - found.input_slots).max()
        before = (INPUT, g), (FILTER, 0), (OUTPUT, g - found.output_slots)
        assert places(PRODUCT, g).min() > max(places(*group).max() for group in before)
        assert places(OUTPUT, g).min() > places(PRODUCT, g).max()


@pytest.mark.parametrize("name", ODD)
def test_layouts_fit_the_chip(name: str) -> None:
    sizes, pads = ODD[name]
    s = ConvolutionSizes.of(sizes[:4], sizes[4], pads, 4)
    for layout in (*layouts.of_convolution(s, H200).values(), *layouts.of_filters(s, H200).values()):
        copying, transforming, multiplying = layout.registers
        warpgroups = layout.transformers + 3
        # The registers that a launch begins with are all that its warpgroups can share.
        held = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
        assert copying + layout.transformers * transforming + 2 * multiplying <= held
        right = 3 * 64 * layout.columns * (2 if layout.rows > 128 and sizes[3] <= 64 else 1)
        assert 2 <= layout.stages and layout.stages * (16 * 1024 + right) <= H200.shared_memory
        assert layout.blocks <= H200.multiprocessors
        assert layout.rows % layout.input_tiles == layout.rows % layout.output_tiles == 0


def test_conv_is_a_convolution_on_any_device() -> None:
    x, w = draw((2, 6, 5, 3, 4))
    for padding, pads in (("SAME", SAME), ("VALID", ((0, 0), (0, 0))), (((2, 0), (1, 3)), ((2, 0), (1, 3)))):
        for precision in (None, "highest"):
            y = cavs.conv(jnp.asarray(x), jnp.asarray(w), padding, precision=precision)
            np.testing.assert_allclose(y, in_float64(x, w, pads), atol=1e-4)


WRONG = {
    "no channels": (dict(x=np.ones((4, 4, 3))), ValueError, r"conv: x: got shape \(4, 4, 3\); expected \(N, H, W, C\)"),
    "filters": (dict(w=np.ones((5, 5, 3, 2))), ValueError, r"conv: w: got shape \(5, 5, 3, 2\); expected \(3, 3, 3, K\)"),
    "integers": (dict(x=np.ones((1, 4, 4, 3), np.int32)), TypeError, "conv: x: got int32; expected an array of floats"),
    "list": (dict(x=[1.0]), TypeError, "conv: x: got list"),
    "two dtypes": (dict(w=np.ones((3, 3, 3, 2), np.float16)), TypeError, r"conv: w: got float16.*w.astype\(x.dtype\)"),
    "padding": (dict(padding="FULL"), ValueError, "conv: padding: got 'FULL'; expected"),
    "half a zero": (dict(padding=((1, 1), (1, 0.5))), ValueError, r"conv: padding: got \(\(1, 1\), \(1, 0.5\)\); expected"),
    "algorithm": (dict(algorithm="fft"), ValueError, 'conv: algorithm: got \'fft\'; expected None, "xla" or "winograd"'),
    "winograd in any precision": (dict(algorithm="winograd"), ValueError, 'got "winograd", but its kernels need'),
    "winograd here": (dict(algorithm="winograd", precision="highest"), ValueError, 'got "winograd", but its kernels need'),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    given, kind, text = WRONG[name]
    if name == "winograd here" and Target.here().is_hopper:
        pytest.skip("this is a Hopper GPU")
    ready = {"x": np.ones((1, 4, 4, 3), np.float32), "w": np.ones((3, 3, 3, 2), np.float32)}
    with pytest.raises(kind, match=text):
        cavs.conv(**(ready | given))


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Runs the logic of `conv` as on a Hopper GPU, with `staged` for the launch. Returns a record of what was asked."""
    asked: list[str] = []
    found = next(iter(layouts.of_convolution(ConvolutionSizes.of((2, 6, 6, 4), 4, SAME, 4), H200).values()))

    def choose(of: choice_module.Operation, sizes: ConvolutionSizes, target: Target) -> choice_module.ConvolutionChoice:
        asked.append(f"{of.name} {sizes.images} x {sizes.height} x {sizes.width}")
        return choice_module.ConvolutionChoice(found if sizes.height > 2 else None, {"a": 1.0, "xla": 2.0})

    monkeypatch.setattr(primitives, "convolve", lambda x, w, padding, layout: staged(x, w, padding, layout.m))
    monkeypatch.setattr(primitives, "filters_gradient", lambda x, dy, padding, of: staged_gradient(x, dy, padding, of.m))
    monkeypatch.setattr(primitives, "choose", choose)
    monkeypatch.setattr(conv_module.persistent, "unsupported", lambda target: None)
    for compiled in primitives.RUNNING.values():
        compiled.clear_cache()  # what was traced before, with other functions
    yield asked
    for compiled in primitives.RUNNING.values():
        compiled.clear_cache()


def test_conv_composes_with_transformations(as_on_a_card: list[str]) -> None:
    x, w = map(jnp.asarray, draw((2, 6, 6, 4, 4)))
    conv = functools.partial(cavs.conv, precision="highest")
    for pads in (SAME, ((2, 1), (0, 2)), ((3, 0), (1, 1))):
        ours, theirs = functools.partial(conv, padding=pads), functools.partial(direct, pads=pads)
        for wrap in (lambda f: f, jax.jit, jax.checkpoint):
            got, expected = (jax.grad(functools.partial(loss, wrap(f)), (0, 1))(x, w) for f in (ours, theirs))
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), got, expected)
        second = [jax.grad(lambda w, f=f: jnp.sum(jax.grad(functools.partial(loss, f))(x, w) ** 2))(w) for f in (ours, theirs)]
        np.testing.assert_allclose(*second, rtol=2e-3, atol=2e-3)
        forward = [
            jax.jvp(jax.grad(functools.partial(loss, f), (0, 1)), (x, w), (w[0, 0, 0, 0] * x, -w)) for f in (ours, theirs)
        ]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3), *forward)
    xs, ws = jnp.stack([x, 2 * x, -x]), jnp.stack([w, w + 1, -w])
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [a if axis == 0 else a[0] for a, axis in zip((xs, ws), axes, strict=True)]
        got = jax.vmap(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), (0, 1)), axes)(*args)
        expected = jax.vmap(jax.grad(lambda x, w: jnp.sum(direct(x, w, SAME) ** 2), (0, 1)), axes)(*args)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), got, expected)
    empty = jax.vmap(jax.grad(lambda x: jnp.sum(primitives.conv(x, w, SAME, True))))(xs[:0])
    assert empty.shape == (0, *x.shape)
    assert "convolution 6 x 6 x 6" in as_on_a_card  # images of jax.vmap run as one batch
    assert "Winograd's algorithm F(4x4,3x3)" in cavs.explain_conv(x, w, precision="highest")
    assert "XLA's convolution, which was fastest" in cavs.explain_conv(x[:, :2], w, precision="highest")
    assert 'write precision="highest"' in cavs.explain_conv(x, w)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8, 8, 5000), (3, 3, 5000, 5000)))
    assert "transformed filters would have 5," in cavs.explain_conv(*shapes, precision="highest")
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((900, 900, 900, 8), (3, 3, 8, 256)))
    assert "a launch at most 2,097,152; fewer images" in cavs.explain_conv(*shapes, precision="highest")


@needs_jax_11
def test_a_program_for_another_device_runs_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", lambda: H200)
    x, w = map(jnp.asarray, draw((2, 6, 6, 4, 4)))
    run = functools.partial(cavs.conv, precision="highest", algorithm="winograd")  # on the CPU
    for f in (run, jax.jit(run)):
        np.testing.assert_allclose(f(x, w), direct(x, w, SAME), atol=1e-4)
        got, expected = (jax.grad(functools.partial(loss, g), (0, 1))(x, w) for g in (f, functools.partial(direct, pads=SAME)))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), got, expected)


def in_scan(f: Any, xs: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda total, x: (total + loss(f, x, w), None), 0.0, xs)[0]


def in_shard_map(f: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    mesh, one, none = Mesh(np.array(jax.devices()[:1]), "d"), PartitionSpec("d"), PartitionSpec()
    return jnp.sum(jax.shard_map(f, mesh=mesh, in_specs=(one, none), out_specs=one)(x, w) ** 2)


NESTED: dict[str, Any] = {
    "vmap of vmap of grad": lambda f, x, w: jax.vmap(jax.vmap(jax.grad(functools.partial(loss, f)), (0, None)), (0, None))(
        x, w
    ),
    "grad of vmap of scan": lambda f, x, w: jax.grad(lambda w: jax.vmap(lambda xs: in_scan(f, xs, w))(x).sum())(w),
    "grad of checkpoint of scan": lambda f, x, w: jax.grad(jax.checkpoint(lambda w: in_scan(f, x[0], w)))(w),
    "map of grad": lambda f, x, w: lax.map(lambda x: jax.grad(functools.partial(loss, f), 1)(x, w), x[0]),
    "grad of shard_map": lambda f, x, w: jax.grad(lambda w: in_shard_map(f, x[0, 0], w))(w),
}


@pytest.mark.parametrize("name", NESTED)
def test_transformations_nest(as_on_a_card: list[str], name: str) -> None:
    x, w = map(jnp.asarray, draw((12, 6, 6, 4, 4)))
    x = x.reshape(2, 3, 2, 6, 6, 4)
    got, expected = (
        NESTED[name](f, x, w) for f in (functools.partial(cavs.conv, precision="highest"), functools.partial(direct, pads=SAME))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert as_on_a_card


ON_FOUR_DEVICES = """
import functools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from cavs._convolution import primitives
primitives.choose = lambda of, sizes, target: primitives.ConvolutionChoice(None)
pads = ((1, 1), (1, 1))
conv = functools.partial(primitives.conv, pads=pads, forced=False)
plain = functools.partial(primitives.by_xla, pads=pads)
x, w = (jnp.asarray(np.random.default_rng(0).normal(size=s), jnp.float32) for s in ((8, 6, 6, 3), (3, 3, 3, 4)))
mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
for f in (conv, plain):
    of_w = lambda x, w, f=f: jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w))))(w)
    divided = jax.shard_map(of_w, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    for run in (divided, jax.jit(divided)):
        np.testing.assert_allclose(run(x, w), jax.grad(lambda w: jnp.sum(jnp.sin(plain(x, w))))(w), rtol=1e-4, atol=1e-4)
"""


def test_gradients_of_filters_add_up_over_devices() -> None:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], env=environment, check=True)


def test_the_convolutions_of_all_leaves_run_as_one(as_on_a_card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = cavs.vertex_programs.GlyphTreeLSTM(hidden=8, inputs=8, channels=2)
    graphs, x, _ = formulas(5)
    sched, params = cavs.schedule(graphs), program.init(jax.random.key(0))

    def total(params: Any) -> jax.Array:
        F = cavs.VertexFunction(program, state={"c": (8,), "h": (8,)}, arity=2)
        return cavs.run(F, params, sched, x, select=sched.roots, engine="scan").sum()

    plain = jax.value_and_grad(total)(params)
    with jax.default_matmul_precision("highest"):
        got = jax.value_and_grad(total)(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, plain)
    leaves = sched.shape.leaves
    assert any(asked == f"convolution {sum(leaves)} x 8 x 8" for asked in as_on_a_card), as_on_a_card


def test_a_choice_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(primitives, "convolve", lambda x, w, padding, layout: staged(x, w, padding, layout.m))
    monkeypatch.setattr(primitives, "filters_gradient", lambda x, dy, padding, of: staged_gradient(x, dy, padding, of.m))
    measured = itertools.count()
    monkeypatch.setattr(choice_module, "_microseconds", lambda *args: 100.0 - next(measured))
    choice_module._records.cache_clear()
    sizes, target = ConvolutionSizes.of((1, 4, 4, 2), 2, SAME, 4), Target("gpu", "a card", "9.0")
    choices = []
    for operation in (primitives.CONVOLUTION, primitives.FILTERS) * 2:
        choices.append(choice_module.choose(operation, sizes, target))
        choice_module._records.cache_clear()  # as in the next process
    for first, second in (choices[::2], choices[1::2]):
        assert first.times == second.times and first.layout == second.layout is not None
    assert next(measured) == len(choices[0].times) + len(choices[1].times)
    assert (tmp_path / "cavs" / "convolutions-a-card.json").exists()
    choice_module._records.cache_clear()


# Glyphs of 0 to 3, five rows of three pixels each.
GLYPHS = ("111101101101111", "010110010010111", "111001111100111", "111001011001111")


def formulas(count: int) -> tuple[cavs.Graphs, np.ndarray, np.ndarray]:
    """Trees max(max(a, b), c) over glyphs that are shifted and noisy. Returns them, a picture a vertex, and the results."""
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 4, (count, 3))
    pictures = 0.1 * rng.standard_normal((count, 5, 8, 8))
    font = np.array([[int(pixel) for pixel in glyph] for glyph in GLYPHS]).reshape(4, 5, 3)
    for g, leaf in np.ndindex(digits.shape):
        y, x = rng.integers(0, 4, 2)
        pictures[g, leaf, y : y + 5, x : x + 3] += font[digits[g, leaf]]
    return cavs.from_parents([[3, 3, 4, 4, -1]] * count), pictures.reshape(-1, 8, 8).astype(np.float32), digits.max(1)


@pytest.mark.slow
def test_a_tree_lstm_learns_to_read_glyphs() -> None:
    program = cavs.vertex_programs.GlyphTreeLSTM(hidden=16, inputs=8)
    F, (graphs, x, results) = program.vertex_function(), formulas(200)
    sched = cavs.schedule(graphs)
    params = {"tree": program.init(jax.random.key(0)), "out": jnp.zeros((16, 4))}
    optimizer = optax.adam(1e-2)

    def loss_of(params: Any) -> jax.Array:
        h = cavs.run(F, params["tree"], sched, sched.pad(x), select=sched.roots)
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], results).mean()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(240):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    _, counts = np.unique(results, return_counts=True)
    share = counts / counts.sum()
    assert losses[-1] < -0.5 * np.sum(share * np.log(share))  # half of what is possible without reading glyphs


def test_without_memory_for_measuring_xla_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def measured(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice_module, "_measured", measured)
    monkeypatch.setattr(conv_module.persistent, "unsupported", lambda target: None)
    choice_module._records.cache_clear()
    x, w = map(jnp.asarray, draw((1, 4, 4, 2, 2)))
    np.testing.assert_allclose(cavs.conv(x, w, precision="highest"), direct(x, w, SAME), atol=1e-5)
    assert "did not fit in the free memory" in cavs.explain_conv(x, w, precision="highest")
    assert not list(tmp_path.rglob("*.json"))  # the next process measures again
    choice_module._records.cache_clear()


@pytest.mark.slow
def test_the_bench_measures_every_part(as_on_a_card: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def in_stages(x: jax.Array, w: jax.Array, padding: Any, layout: Any) -> jax.Array:
        return staged(x, w, padding, layout.m)

    monkeypatch.setattr(bench, "BATCH", 3)
    monkeypatch.setattr(bench, "LAYERS", {"VGG-2": (3, 2, 5)})
    monkeypatch.setattr(bench, "convolve_in_stages", in_stages)
    monkeypatch.setattr(bench, "launches", lambda run, *operands: [float(run(*operands).ndim)])
    monkeypatch.setattr(bench, "seconds", lambda run, finish, times=1: float(finish(run()) is not None))
    monkeypatch.setattr(Target, "here", lambda: H200)
    chosen = choice_module.ConvolutionChoice(None, dict.fromkeys(named_layouts(), 1.0) | {"xla": 2.0})
    monkeypatch.setattr(bench, "chosen", lambda *args: chosen)
    monkeypatch.setattr(bench, "NETWORKS", {"resnet50": lambda: replace(networks.resnet((1, 1), width=16), side=16)})
    bench.main(tmp_path, 100, ["layers:VGG-2", "filters:VGG-2"])
    bench.main(tmp_path, 100, ["networks:resnet50"])
    found = json.loads(next(tmp_path.glob("convolution-*.json")).read_text())
    for part in ("layers", "filters"):
        errors = found[part]["VGG-2"]["errors"]
        assert 0 < errors["F(2x2)"] <= 4 * errors["direct"] and 0 < errors["F(4x4)"] <= 10 * errors["direct"]
    assert found["layers"]["VGG-2"]["stages"] == [4.0]
    assert found["networks"]["resnet50"]["difference"] < 1e-3
    with pytest.raises(SystemExit, match="bench convolution: got 'layer'; expected a part, or part:name, of layers"):
        bench.main(tmp_path, 100, ["layer"])


def named_layouts() -> set[str]:
    s = ConvolutionSizes(3, 5, 5, 2, 3, SAME, 4)
    return {*layouts.of_convolution(s, H200), *layouts.of_filters(s, H200)}


@needs_jax_11
def test_launches_are_marked_so_that_they_run_in_turn() -> None:
    sizes, pads = ODD["groups"]
    s = ConvolutionSizes.of(sizes[:4], sizes[4], pads, 4)
    layout = layouts.layout(s, 4, H200)
    traced = jax.make_jaxpr(jax.jit(functools.partial(convolve, padding=pads, layout=layout)))(*draw(sizes))
    kept, _ = pe.dce_jaxpr(traced.jaxpr.eqns[0].params["jaxpr"].jaxpr, [True])
    assert "cavs_begin" in str(kept) and "cavs_end" in str(kept)
