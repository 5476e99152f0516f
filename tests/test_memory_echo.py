"""`cavs.memory.recompute`: gradients of any function of JAX from less memory."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bench import models
from cavs._jaxpr.equal_jaxprs import equal_jaxprs
from cavs._jaxpr.jaxprs import is_var
from cavs._jaxpr.minimum_cut import minimum_cut
from cavs._memory.bytes import text_of
from cavs._memory.fit import MOST_COMPILED
from cavs._remat.graph import with_derivative
from cavs._remat.pareto import ParetoSearch
from cavs.memory import BudgetError, bytes_of, recompute
from tests import random_jax
from tests.slow import few
from tests.truth import assert_close

SMALL = {
    "nmt": {"hidden": 16, "batch": 4, "length": 12, "words": (20, 15)},
    "deepspeech2": {"hidden": 16, "batch": 4, "length": 20, "layers": 2, "bands": 6, "channels": 2, "letters": 4},
    "transformer": {"hidden": 16, "batch": 2, "length": 8, "layers": 2, "words": 20},
    "resnet": {"width": 4, "batch": 2, "pixels": 16, "blocks": 1, "stages": 2},
}


def case(name: str, dtype: Any = np.float64) -> tuple[Any, Any, Any]:
    found = models.CASES[name]
    params, batch = found.init(jax.random.key(0), **SMALL[name])
    params, batch = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, (params, batch))
    return found.loss, params, batch


def temp(fn: Any, *args: Any) -> int:
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", few(SMALL, 1))
def test_gradients_are_those_of_the_function(name):
    loss, params, batch = case(name)
    want = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert_close(jax.jit(jax.value_and_grad(recompute(loss, "min")))(params, batch), want, 1e-12)


@pytest.mark.slow
def test_the_attention_of_a_decoder_is_computed_again():
    loss = models.nmt_loss
    sizes = SMALL["nmt"] | {"length": 40, "hidden": 32}
    params, batch = jax.eval_shape(partial(models.nmt_init, **sizes), jax.random.key(0))
    plain, ours, least = (temp(jax.grad(f), params, batch) for f in (loss, recompute(loss), recompute(loss, "min")))
    assert plain > 3 * ours and least < ours
    plan = recompute(loss).plan(params, batch)
    assert plan.plain_bytes > 3 * plan.bytes and plan.flops == 0
    # Each step of the decoder attended to 40 words of 32 numbers: none of those matrices is kept.
    assert all("40,4,32" not in row.shape for row in plan.rows() if row.times == 40)


@pytest.mark.slow
def test_budgets_down_to_the_floor_fit_in_at_most_five_compilations(monkeypatch):
    found = models.CASES["nmt"]
    sizes = SMALL["nmt"] | {"hidden": 64, "length": 24}
    params, batch = jax.eval_shape(partial(found.init, **sizes), jax.random.key(0))
    whole, floor = recompute(found.loss).verify(params, batch).compiled, recompute(found.loss, "min").plan(params, batch).peak
    measure, compiled = ParetoSearch.measure, set()
    monkeypatch.setattr(ParetoSearch, "measure", lambda self, point: compiled.add(point) or measure(self, point))
    for budget in np.geomspace(whole, floor, 3)[1:]:
        compiled.clear()
        small = recompute(found.loss, budget := int(np.ceil(budget)))
        plan = small.plan(params, batch)
        assert len(compiled) <= MOST_COMPILED and plan.peak <= budget and f"peak {text_of(plan.peak)} (compiled)" in str(plan)
        assert temp(jax.value_and_grad(small), params, batch) <= budget
        assert small.plan(params, batch).peak == plan.peak
    with pytest.raises(BudgetError, match=r"budget: got .*; expected at least .*Write budget=\d+, or 'min'") as error:
        recompute(found.loss, floor // 2).plan(params, batch)
    assert f"budget={floor}" in str(error.value)


@pytest.mark.slow
def test_every_budget_above_the_floor_is_kept():
    """Plans that are tried for one budget do not change which one is the smallest."""
    loss, params, batch, _ = models.resnet_with_group_norm(4, 8)
    params, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    free, floor = (recompute(loss, budget).plan(params, batch).peak for budget in (None, "min"))
    for budget in map(int, np.ceil(np.geomspace(free, floor, 6)[1:])):
        small = recompute(loss, budget)
        assert small.plan(params, batch).peak == temp(jax.value_and_grad(small), params, batch) <= budget
    with pytest.raises(BudgetError, match=f"Write budget={floor}, "):
        recompute(loss, floor - 1).plan(params, batch)


def test_a_plan_prints_a_saving_only_if_both_numbers_were_compiled():
    loss, params, batch = case("nmt")
    ours = recompute(loss)
    plan = ours.plan(params, batch)
    head = str(plan).splitlines()[0]
    assert re.fullmatch(r"The derivative of nmt_loss: peak \S+ \w+ \(modelled\), kept .* backward \S+ \w+ \(modelled\)", head)
    assert "jax.grad" not in str(plan)
    assert plan.plain_peak == temp(jax.value_and_grad(loss), params, batch)
    assert str(plan).splitlines()[0] == head  # the plan itself was not compiled
    assert plan.peak == temp(jax.value_and_grad(ours), params, batch) < plan.plain_peak
    want = f"peak {text_of(plan.peak)} (compiled), of jax.grad {text_of(plan.plain_peak)} (compiled), kept"
    assert want in str(plan)


def test_a_plan_says_what_is_kept_and_what_is_run_again():
    loss, params, batch = case("nmt")
    text = str(recompute(loss).plan(params, batch))
    assert "state of the loop" in text and "in _lstm_step" in text and "products run twice" not in text
    assert sum(row.bytes for row in recompute(loss).plan(params, batch).rows()) == recompute(loss).plan(params, batch).bytes
    least = recompute(loss, "min").plan(params, batch)
    assert "products run twice" in str(least) and least.flops > 0
    frontier = least.frontier()
    assert [p for p, _ in frontier] == sorted({p for p, _ in frontier}, reverse=True)
    assert [f for _, f in frontier] == sorted(f for _, f in frontier)


def test_masks_are_the_same_when_they_are_computed_again():
    def loss(w, x, key):
        for i in range(3):
            x = jax.nn.relu(x @ w)
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape), x * 2, 0)
        return (x**2).sum()

    args = jnp.eye(8) + 0.1, jnp.ones((4, 8)), jax.random.key(3)
    want = jax.jit(jax.value_and_grad(loss))(*args)
    for budget in (None, "min"):
        assert_close(jax.jit(jax.value_and_grad(recompute(loss, budget)))(*args), want, 1e-12)


def test_auxiliary_results_pytrees_closures_keywords_and_donation():
    def loss(params, x, *, scale=1.0):
        y = jnp.tanh(x @ params["w"] + params["b"][0])
        return scale * (y**2).sum(), {"y": y, "n": jnp.int32(3)}

    params = {"w": jnp.ones((3, 3)) * 0.3, "b": [jnp.zeros(3)]}
    x = jnp.arange(6.0).reshape(2, 3)
    ours = recompute(loss, "min")
    want = jax.value_and_grad(loss, has_aux=True)(params, x, scale=2.0)
    assert_close(jax.value_and_grad(ours, has_aux=True)(params, x, scale=2.0), want, 1e-12)
    step = jax.jit(lambda p, x: jax.tree.map(jnp.subtract, p, jax.grad(ours, has_aux=True)(p, x)[0]), donate_argnums=0)
    assert_close(
        step(jax.tree.map(jnp.copy, params), x),
        jax.tree.map(jnp.subtract, params, jax.grad(loss, has_aux=True)(params, x)[0]),
        1e-12,
    )

    def closed_over(w):
        return recompute(lambda x: jnp.sin(x @ w).sum())(x)

    assert_close(jax.grad(closed_over)(params["w"]), jax.grad(lambda w: jnp.sin(x @ w).sum())(params["w"]), 1e-12)
    for number in (1, -1):
        static = recompute(lambda x, name: jnp.sin(x).sum() if name == "sin" else x.sum(), static_argnums=number)
        assert_close(jax.grad(static)(x, "sin"), jnp.cos(x), 1e-12)
    assert recompute(loss).__name__ == "loss"


@pytest.mark.slow
def test_vmap_second_derivatives_and_nested_loops():
    def f(w, x):
        def outer(h, row):
            h, ys = lax.scan(lambda h, r: (jnp.tanh(h @ w + r), jnp.sin(h)), h, jnp.stack([row, row * 2]))
            return h, ys.sum()

        h, ys = lax.scan(outer, jnp.zeros(3), x)
        return (h * ys.sum()).sum() + jax.checkpoint(lambda h: jnp.tanh(h @ w).sum())(h)

    w, x = jnp.eye(3) * 0.4 + 0.05, jnp.arange(12.0).reshape(4, 3) / 10
    for budget in (None, "min"):
        g = recompute(f, budget)
        assert_close(jax.grad(g, (0, 1))(w, x), jax.grad(f, (0, 1))(w, x), 1e-12)
        assert_close(jax.vmap(jax.grad(g), (None, 0))(w, x[:, None]), jax.vmap(jax.grad(f), (None, 0))(w, x[:, None]), 1e-12)
    hessian = jax.grad(lambda w: (jax.grad(recompute(f, "min"))(w, x) ** 2).sum())(w)
    assert_close(hessian, jax.grad(lambda w: (jax.grad(f)(w, x) ** 2).sum())(w), 1e-12)


@pytest.mark.parametrize("length", [60, 61])  # 61 steps are chunks and a rest
@pytest.mark.parametrize("reverse", [False, True])
def test_long_loops_run_in_chunks(length, reverse):
    def f(w, x):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            return h, jnp.sin(h @ w)

        h, ys = lax.scan(step, jnp.zeros((2, 3)), x, reverse=reverse)
        return (ys * jnp.arange(length)[:, None, None]).sum() + (h**2).sum()

    w, x = jnp.eye(3) * 0.4 + 0.05, jnp.cos(jnp.arange(length * 6.0)).reshape(length, 2, 3)
    search = ParetoSearch(jax.make_jaxpr(f)(w, x), [0, 1])
    point = search.point(0, chunks={"/0": 4})
    planned = with_derivative(search.closed, lambda diff: point.kept)
    want = jax.jit(jax.value_and_grad(f, (0, 1)))(w, x)
    assert_close(jax.jit(jax.value_and_grad(lambda *args: planned(*args)[0], (0, 1)))(w, x), want, 1e-12)
    assert point.bytes < 0.6 * x.nbytes  # less than the states of all steps


@pytest.mark.slow
def test_what_is_compiled_is_the_derivative():
    loss, params, batch = case("nmt")
    for budget in (None, "min"):
        found = recompute(loss, budget).verify(params, batch)
        assert found.compiled == temp(jax.value_and_grad(recompute(loss, budget)), params, batch)


def test_the_smallest_plan_needs_no_more_than_the_plan_without_a_budget():
    """Products that run again may need more memory than they save."""
    loss, params, batch, _ = models.mixer(4, 16)
    least, free = (recompute(loss, budget).plan(params, batch).peak for budget in ("min", None))
    assert least <= free


def test_constants_are_not_kept():
    """An array that is known when the function is traced: it is there anyway."""
    index = np.arange(5, dtype=np.int32)[:, None]
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    plan = recompute(lambda x: jnp.sum(lax.gather(x, index, numbers, (1,)))).plan(jnp.ones(7))
    assert plan.plain_bytes == 0 and not plan.rows()


def test_the_smallest_plan_of_a_long_loop_runs_in_chunks():
    def f(w, x):
        return (lax.scan(lambda h, x: (jnp.tanh(jnp.tanh(h @ w + x) @ w), None), jnp.zeros((2, 3)), x)[0] ** 2).sum()

    args = jnp.eye(3), jnp.ones((60, 1, 1))
    state = 2 * 3 * 8
    assert recompute(f, "min").plan(*args).bytes == 60 // 4 * state + state  # before each chunk of 4 steps, and the last one
    assert temp(jax.grad(recompute(f, "min")), *args) < temp(jax.grad(recompute(f)), *args) / 3


@pytest.mark.parametrize("seed", few(range(2), 1))
def test_random_functions_keep_no_more_than_jax_does(seed):
    rng = np.random.default_rng(seed)
    ops = [jnp.tanh, jax.nn.gelu, jax.nn.softmax, jnp.sin, lambda x: x * x, jax.nn.relu, lambda x: x / (1 + x * x)]
    chosen = [(int(rng.integers(3)), int(rng.integers(len(ops))), int(rng.integers(i + 1))) for i in range(12)]

    def f(ws, x):
        values = [x]
        for kind, op, at in chosen:
            x = values[-1]
            values.append([lambda x: ops[op](x), lambda x: x @ ws[at % 3], lambda x: ops[op](x) + values[at]][kind](x))  # noqa: B023
        return values[-1].sum()

    ws, x = [jnp.asarray(rng.normal(size=(6, 6)) / 3) for _ in range(3)], jnp.asarray(rng.normal(size=(5, 6)))
    plan = recompute(f).plan(ws, x, argnums=(0, 1))
    assert plan.bytes <= plan.plain_bytes and plan._point.peak <= plan._search.plain().peak
    want = jax.grad(f, (0, 1))(ws, x)
    for budget in (None, "min", plan.floor):
        assert_close(jax.grad(recompute(f, budget), (0, 1))(ws, x), want, 1e-10)


@pytest.mark.parametrize("seed", few([74, 2, 15], 1))  # in 74 nothing is differentiated in its loop
def test_random_functions_with_loops_branches_and_keys(seed):
    random_jax.check(seed)


def test_equal_bodies_of_loops_share_a_trace():
    loss, params, batch = case("deepspeech2")
    graphs = [r.kept.graph for r in recompute(loss).plan(params, batch)._point.regions.values() if r.name]
    assert len(graphs) == 5 and len(set(map(id, graphs))) == 3  # two layers, in two directions, and CTC


def test_jaxprs_are_equal_up_to_names():
    def traced(scale, fn=jnp.sin):
        return jax.make_jaxpr(lambda x: lax.scan(lambda c, y: (fn(c) * y, scale * c), x[0], x))(jnp.ones(3))

    assert equal_jaxprs(traced(2.0), traced(2.0))
    assert not equal_jaxprs(traced(2.0), traced(3.0)) and not equal_jaxprs(traced(2.0), traced(2.0, jnp.cos))


def test_if_nothing_is_gained_everything_is_kept():
    # Echo's figure 7: tanh(x + y) of two products. Its result alone is needed, not the two operands.
    def f(w, v, x):
        return (jnp.tanh(x @ w + x @ v) @ w).sum()

    w = jnp.eye(4)
    plan = recompute(f).plan(w, w, jnp.ones((3, 4)), argnums=(0, 1))
    assert plan.bytes == 3 * 4 * 8


def test_the_cut_counts_a_shared_operand_once():
    # Echo's figure 8: T rows that are added to one matrix of T rows, through tanh.
    t, n = 6, 4

    def f(w, rows, matrix):
        matrix, rows = matrix @ w, rows @ w
        return sum(jnp.tanh(matrix + rows[i]).sum() for i in range(t))

    plan = recompute(f).plan(jnp.eye(n), jnp.ones((t, n)), jnp.ones((t, n)))
    assert plan.bytes == 2 * t * n * 8
    assert plan.plain_bytes >= t * t * n * 8


def test_the_cut_on_a_small_graph():
    def f(x):
        y = jnp.sin(x)
        return jnp.exp(y), jnp.cos(y)

    jaxpr = jax.make_jaxpr(f)(jnp.ones(3)).jaxpr
    keep = minimum_cut(jaxpr.eqns, jaxpr.outvars, lambda i: None if i == 0 else 0.0, stored=jaxpr.invars)
    assert keep == jaxpr.eqns[0].outvars
    keep = minimum_cut(jaxpr.eqns, jaxpr.outvars, lambda i: 30.0)  # 90 bytes of prices against 48 of both results
    assert keep == jaxpr.outvars


@pytest.mark.parametrize(
    ("budget", "want"),
    [(5, 5), ("2GiB", 2**31), ("512 MB", 512 * 10**6), ("1.5 kib", 1536), ("100", 100), ("min", "min"), (None, None)],
)
def test_amounts_of_memory(budget, want):
    assert bytes_of(budget) == want


@pytest.mark.parametrize("budget", ["2 apples", 0, -3, 0.0, 1.5, True, "", [1], np.ones(2), "0", "0GiB", "1.5", "0.0001kb"])
def test_what_is_no_amount_of_memory(budget):
    with pytest.raises(ValueError, match="cavs.memory.recompute: budget: got .*; expected bytes .*Write budget='2GiB'"):
        recompute(jnp.sin, budget)


def test_a_fraction_of_the_memory():
    assert bytes_of(0.5) > 2**20  # of a CPU: half of the machine's
    assert bytes_of(np.int64(5)) == 5 and bytes_of(np.float32(0.5)) == bytes_of(0.5)
    assert bytes_of(0.5) == bytes_of("0.5") == bytes_of(" .5") and bytes_of("1.0") == bytes_of(1.0)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="recompute: fn: got 3"):
        recompute(3)
    with pytest.raises(TypeError, match="static_argnums: got 'a'; expected positions"):
        recompute(jnp.sin, static_argnums="a")
    with pytest.raises(TypeError, match="offload: got 'x'; expected True or False"):
        recompute(jnp.sin, offload="x")
    with pytest.raises(TypeError, match="static_argnums"):
        recompute(lambda x, name: x)(1.0, "name")
    for args in ((1.0,), ()):
        with pytest.raises(ValueError, match=f"argnums: got 5 with {len(args)} positional argument"):
            recompute(lambda x: x).plan(*args, argnums=5, **({} if args else {"x": 1.0}))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 needs the same memory for all of its plans on a CPU")
def test_blocks_without_loops_run_again_one_at_a_time():
    keys = jax.random.split(jax.random.key(0), 16)
    params = [jax.random.normal(key, (2, 32, 32)) / 6 for key in keys]
    x = jnp.ones((512, 32))

    def loss(params: Any) -> jax.Array:
        y = x
        for up, down in params:
            z = jnp.tanh(y @ up)
            y = y + jnp.sin(jnp.exp(z) @ down)
        return (y**2).sum()

    whole, least = recompute(loss).verify(params).compiled, recompute(loss, "min").plan(params)
    # Between two blocks one value is kept, inside of one there are several products: less than half remains.
    assert least.peak < whole / 2 and least.flops > 0
    assert_close(jax.jit(jax.grad(recompute(loss, "min")))(params), jax.jit(jax.grad(loss))(params), 1e-12)
    middle = recompute(loss, (whole + least.peak) // 2)
    assert 0 < middle.plan(params).flops < least.flops and middle.plan(params).peak <= (whole + least.peak) // 2
    assert_close(jax.jit(jax.grad(middle))(params), jax.jit(jax.grad(loss))(params), 1e-12)


def test_gradients_are_computed_before_the_cotangent_goes_on():
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    params, x = [jnp.ones((8, n)) for n in (8, 8, 3)], jnp.ones((64, 8))
    jaxpr = jax.make_jaxpr(jax.grad(recompute(loss)))(params, x)
    barriers = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    products = {v for e in jaxpr.jaxpr.eqns if e.primitive.name in ("dot_general", "transpose") for v in e.outvars}
    tied = [
        e for e in barriers if sum(is_var(v) and v in products for v in e.invars) >= 2
    ]  # dW of a layer with the cotangent of the next
    assert len(tied) >= 2


@pytest.mark.slow
def test_products_that_save_much_for_their_flops_run_twice_first():
    """Of a bottleneck block, 1 x 1 convolutions have a quarter of the FLOPs and most of the bytes."""
    params, batch = jax.eval_shape(partial(models.resnet_init, width=16, batch=8, pixels=64, blocks=3), jax.random.key(0))
    points = recompute(models.resnet_loss).plan(params, batch).frontier()
    (most, none), (_, all_products) = points[0], points[-1]
    assert none == 0 and any(peak < 0.9 * most and flops < all_products / 4 for peak, flops in points)
