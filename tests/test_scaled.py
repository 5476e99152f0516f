"""Products in float16 of states that F bounds at vertices with children, but not at leaves: scaled by the largest leaf."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.persistent import lower
from cavs._engines.persistent.launch import leaf_exponent
from cavs._function import products
from cavs._run import plans
from cavs._schedule.batches import StackScheduler
from cavs._schedule.shape_choice import Options
from cavs.kernels import H200
from tests.odd_graphs import joined, random_binary_tree
from tests.persistent_programs import INTERPRETED, INTERPRETER, TREES, assert_near, values, with_gradients
from tests.random_gated import Cell, check, precision_of
from tests.slow import few

H = 32


def tree_fc(combine: Any) -> Any:
    """Leaves scatter their input; `combine(p, a, b)` makes what an inner vertex scatters of what its children did."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        h = v.pull() if v.is_leaf() else combine(p, v.gather(0), v.gather(1))
        v.scatter(h)
        v.push(h)

    return cavs.VertexFunction(fn, state=(H,), arity=2)


PROGRAMS = {
    "both children": lambda p, a, b: jnp.tanh(jnp.concatenate([a, b]) @ p["two"] + p["b"]),
    "their sum": lambda p, a, b: jnp.tanh((a + b) @ p["u"]) * jax.nn.sigmoid(a @ p["o"]),
}
OTHERS = {
    "a square before the product": lambda p, a, b: jnp.tanh((a * a) @ p["u"] + b),
    "no bound": lambda p, a, b: jax.nn.relu(jnp.concatenate([a, b]) @ p["two"]),
}


def params_of() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"two": (2 * H, H), "u": (H, H), "o": (H, H), "b": (H,)}
    return {k: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for k, s in shapes.items()}


def scaled_forward(F: Any) -> Any:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params_of())
    plan = plans.plan_of(F, shapes, jax.ShapeDtypeStruct((H,), jnp.float32))
    return lower.scaled_forward_of(plan, None, True, True, H200)


def test_which_functions() -> None:
    for combine in PROGRAMS.values():
        made = scaled_forward(tree_fc(combine))
        assert made.precision == "f16" and made.scaled == {0}
    for combine in OTHERS.values():
        assert scaled_forward(tree_fc(combine)) is None


@pytest.mark.parametrize(
    ("hidden", "batch", "scaled"), [(1024, 64, True), (2048, 16, True), (512, 16, False), (512, 256, False)]
)
def test_launches_that_take_long(hidden: int, batch: int, scaled: bool) -> None:
    """Of batch 256, wide levels have a launch of their own, which multiplies in tf32."""
    model = vp.TreeFC(hidden)
    params = jax.eval_shape(model.init, jax.random.key(0))
    plan = plans.plan_of(model.vertex_function(), params, jax.ShapeDtypeStruct((hidden,), jnp.float32))
    shape = cavs.schedule(joined([random_binary_tree(64, seed=0)] * batch), scripts=True).shape
    assert bool(lower.forward_of(plan, None, shape, True, H200).scaled) == scaled


@INTERPRETER
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of leaves of any size, one program."""
    asked = []
    monkeypatch.setattr(lower, "is_long", lambda *args: asked.append(args) or True)
    exact, ours = (jax.jit(with_gradients(tree_fc(PROGRAMS[name]), TREES, engine)) for engine in ("scan", INTERPRETED))
    for scale in (1e-30, 1e-3, 1.0, 127.0, 1e3, 1e6):
        x = (np.random.default_rng(1).standard_normal((TREES.num_vertices, H)) * scale).astype(np.float32)
        x[::7] = 0
        # Products of large leaves would only saturate tanh.
        params = {k: w / max(scale, 1) if k != "b" else w for k, w in params_of().items()}
        with jax.default_matmul_precision("highest"):
            want = exact(params, x)
        assert_near(ours(params, x), want, 2e-3)
    assert asked


@INTERPRETER
def test_numbers_that_are_not_finite_reach_their_ancestors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "is_long", lambda *args: True)
    F, params = tree_fc(PROGRAMS["both children"]), params_of()
    exact, ours = (jax.jit(with_gradients(F, TREES, engine)) for engine in ("scan", INTERPRETED))
    for number in (np.nan, np.inf, -np.inf):
        x = np.random.default_rng(1).standard_normal((TREES.num_vertices, H)).astype(np.float32)
        x[3, 5] = number
        want, got = (np.asarray(run(params, x)[0]) for run in (exact, ours))
        assert (np.isnan(want) == np.isnan(got)).all() and np.allclose(want, got, atol=2e-3, equal_nan=True)


@INTERPRETER
def test_leaves_of_a_kind_that_the_batch_lacks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of this kind computes 1e20 times a word."""
    monkeypatch.setattr(lower, "is_long", lambda *args: True)

    def fn(p: Any, v: cavs.Vertex, scale: float) -> None:
        h = v.pull() * scale if v.is_leaf() else PROGRAMS["both children"](p, v.gather(0), v.gather(1))
        v.scatter(h)
        v.push(h)

    fns = {"small": functools.partial(fn, scale=1.0), "large": functools.partial(fn, scale=1e20)}
    F, params = cavs.VertexFunction(fns, state=(H,), arity=2), params_of()
    small, large = (
        dataclasses.replace(TREES, kind=np.where(TREES.height > 0, 0, k).astype(np.int32), kind_names=tuple(fns))
        for k in (0, 1)
    )
    both = cavs.Graphs.concat([small, large])
    shape = cavs.schedule(both, scripts=True).shape
    batch = StackScheduler(both, Options(kinds=True, scripts=True)).stack([np.arange(len(small))], shape)[0]
    sched = cavs.Schedule(batch, shape)
    assert sched.leaf_count[1] == 0 < shape.leaves[1] and shape.levels
    x = sched.pad(np.random.default_rng(1).standard_normal((TREES.num_vertices, H)).astype(np.float32))
    want, got = (np.asarray(cavs.run(F, params, sched, x, engine=engine)) for engine in ("scan", INTERPRETED))
    assert_near(got, want, 2e-3)


def test_the_largest_leaf_is_one_of_the_batch() -> None:
    sched = cavs.schedule(TREES, scripts=True)
    first, rows = int(sched.task_row[0]), sched.shape.pad + sum(sched.shape.leaves)
    assert 0 < first <= rows
    state = jnp.full((rows + 5, 2, H), 1e20, jnp.float32).at[:first].set(-3.0)
    assert leaf_exponent(state, sched) == products.exponent_of(jnp.float32(3.0))
    assert leaf_exponent(state, sched, 100.0) == products.exponent_of(jnp.float32(100.0))


@pytest.mark.parametrize("largest", [2.0**-100, 1e-5, 1.0, 127.9, 128.0, 129.0, 65504.0, 3e38])
def test_scale(largest: float) -> None:
    exponent = products.exponent_of(jnp.array([0.0, -largest, jnp.nan, jnp.inf], jnp.float32))
    scale = float(products.scale_to(exponent, 128.0))
    assert largest * scale <= 128 and (scale == 1 or 32 <= largest * scale) and np.log2(scale) % 2 == 0


@pytest.mark.parametrize(("a", "b"), [(0, 0), (-14, 122), (114, 122), (-60, -60), (112, -112)])
def test_root_of_product(a: int, b: int) -> None:
    root = products.root_of_product(jnp.float32(2.0**a), jnp.float32(2.0**b))
    assert float(root) == 2.0 ** ((a + b) / 2)


@INTERPRETER
def test_random_cells_multiply_in_float16() -> None:
    found = [precision_of(Cell(seed)) for seed in range(7)]
    assert {"f16", "scaled f16"} <= set(found) and found.count("tf32") < 4, found


@INTERPRETER
@pytest.mark.parametrize("seed", few([2, 0, 1], 1))
def test_random_cells(seed: int) -> None:
    """More: `python -m tests.random_gated`."""
    check(Cell(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("hidden", [64, 96, 512])
def test_on_the_card(hidden: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "is_long", lambda *args: True)
    model = vp.TreeFC(hidden)
    params = jax.tree.map(lambda w: w / max(scale, 1), model.init(jax.random.key(0)))
    x = np.random.default_rng(1).standard_normal((TREES.num_vertices, hidden)).astype(np.float32) * np.float32(scale)
    F = cavs.VertexFunction(model, state=(hidden,), arity=2)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, TREES, x, "scan")
    got, again = (values(F, params, TREES, x, "persistent") for _ in range(2))
    assert_near(got, want, 2e-3)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))
