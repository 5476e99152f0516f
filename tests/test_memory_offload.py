"""Values that `recompute` keeps in the memory of the host (moDNN, section 5.2)."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cavs._jaxpr.jaxprs import is_var
from cavs._remat import forms, pareto
from cavs._remat.graph import with_derivative
from cavs.memory import Plan, recompute
from tests.lower_for_hopper import compile_for_hopper
from tests.slow import few
from tests.test_memory_echo import case
from tests.truth import assert_close


def search_of(fn: Any, *args: Any) -> Any:
    return recompute(fn).plan(*args)._search


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh((x - x.mean(0)) @ w)
    return jnp.sum(x**2)


def arrays(rows: int = 64, hidden: int = 16, count: int = 6) -> Any:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(hidden, hidden)) / 4) for _ in range(count)], jnp.asarray(
        rng.normal(size=(rows, hidden))
    )


@pytest.mark.parametrize("name", few(["nmt", "transformer", "resnet"], 1))
def test_gradients_do_not_change(name, monkeypatch, tmp_path):
    monkeypatch.setattr(forms, "_LEAST", 0)
    loss, params, batch = case(name)
    point = search_of(loss, params, batch).point(math.inf, host=0.5)
    assert sum(len(region.kept.host) for region in point.regions.values()) > 3
    (tmp_path / "plan.json").write_text(json.dumps(point.as_json()))
    ours = recompute(loss, plan=tmp_path / "plan.json")
    want = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert_close(jax.jit(jax.value_and_grad(ours))(params, batch), want, 1e-12)


def test_the_values_computed_first_are_on_the_host(monkeypatch):
    monkeypatch.setattr(forms, "_LEAST", 0)
    search = search_of(layers, *arrays())
    whole, half = search.cheap(), search.point(math.inf, host=0.5)
    kept = half.kept
    order = [v for e in kept.graph.forward for v in e.outvars]
    on_host = [order.index(v) for v in kept.keep if v in kept.host]
    others = [order.index(v) for v in kept.keep if v not in kept.host]
    assert on_host and max(on_host) < min(others)
    assert half.bytes <= whole.bytes / 2 and kept.keep == whole.kept.keep
    assert "on the host" in str(Plan("layers", search, half))


def test_copies_run_beside_one_product(monkeypatch):
    """A product waits for copies that began before the last one; a copy back begins a product before its value is read."""
    monkeypatch.setattr(forms, "_LEAST", 0)
    ws, x = arrays()
    search = search_of(layers, ws, x)
    kept = search.point(math.inf, host=1.0).kept
    planned = with_derivative(search.closed, lambda _: kept)
    eqns = jax.make_jaxpr(jax.grad(lambda *args: planned(*args)[0]))(*jax.tree.leaves((ws, x))).jaxpr.eqns
    products = [i for i, e in enumerate(eqns) if e.primitive.name == "dot_general"]
    copies = {
        v: (i, "Host" in str(e.params)) for i, e in enumerate(eqns) if e.primitive.name == "device_put" for v in e.outvars
    }
    is_copy = lambda v: is_var(v) and v in copies  # noqa: E731
    waits = [i for i, e in enumerate(eqns) if e.primitive.name == "optimization_barrier" and any(is_copy(v) for v in e.invars)]
    first = [i for i in waits if i < products[5]]
    assert len(first) >= 3
    for i in first:
        begun = [copies[v][0] for v in eqns[i].invars if is_copy(v)]
        assert begun and all(sum(at < p < i for p in products) >= 1 for at in begun)
    back = [v for v, (i, to_host) in copies.items() if not to_host and v.aval.shape == (64, 16)]
    between = []
    for v in back:
        read = next(i for i, e in enumerate(eqns) if any(x is v for x in e.invars))
        between.append(sum(copies[v][0] < p < read for p in products))
    assert back and sum(n >= 1 for n in between) >= len(back) - 2


@pytest.mark.parametrize(("seconds", "chosen"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_the_host_is_used_if_it_was_faster(seconds, chosen, monkeypatch):
    monkeypatch.setattr(forms, "_LEAST", 0)
    times = iter(seconds)

    def sized(jitted: Any, args: Any, options: Any) -> Any:  # a plan with products again needs more than one with the host
        text = str(jax.make_jaxpr(jitted)(*args))
        return None, 250 if "Host" in text else 500 if text.count(" dot_general") > 17 else 1000

    monkeypatch.setattr(pareto, "compiled_step", sized)
    monkeypatch.setattr(pareto, "seconds_of_step", lambda step, shapes: next(times))
    ws, x = arrays()
    assert not recompute(layers, 900).plan(ws, x)._point.kept.host
    ours = recompute(layers, 900, offload=True)
    assert bool(ours.plan(ws, x)._point.kept.host) == chosen
    assert_close(jax.jit(jax.grad(ours))(ws, x), jax.grad(layers)(ws, x), 1e-11)


def test_more_goes_to_the_host_if_the_first_share_does_not_fit(monkeypatch):
    """XLA's schedule of a plan with a few copies can need more memory than without any."""
    monkeypatch.setattr(forms, "_LEAST", 0)
    sizes, shares = iter([60_000, 30_000]), []

    def sized(jitted: Any, args: Any, options: Any) -> Any:
        text = str(jax.make_jaxpr(jitted)(*args))
        shares.append(text.count("Host"))
        return None, next(sizes) if shares[-1] else 40_000 if text.count(" dot_general") > 17 else 55_000

    monkeypatch.setattr(pareto, "compiled_step", sized)
    monkeypatch.setattr(pareto, "seconds_of_step", lambda step, shapes: 1.0)
    ws, x = arrays()
    assert recompute(layers, 50_000, offload=True).plan(ws, x)._point.kept.host
    few, more = filter(None, shares)
    assert few < more


@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: jax.jit(jax.vmap(fn, (None, 0)))], ids=["jit", "vmap"])
def test_steps_are_timed_while_the_caller_traces(wrap, monkeypatch):
    monkeypatch.setattr(forms, "_LEAST", 0)
    compiled_step, timed, seconds_of_step = pareto.compiled_step, [], pareto.seconds_of_step

    def sized(jitted: Any, args: Any, options: Any) -> Any:  # as if the host's memory were another one
        text = str(jax.make_jaxpr(jitted)(*args))
        return compiled_step(jitted, args, options)[0], 250 if "Host" in text else 500 if text.count(
            " dot_general"
        ) > 17 else 1000

    monkeypatch.setattr(pareto, "compiled_step", sized)
    monkeypatch.setattr(pareto, "seconds_of_step", lambda *args: timed.append(seconds_of_step(*args)) or timed[-1])
    ws, x = arrays()
    xs = x if wrap is jax.jit else jnp.stack([x, -x])
    assert_close(wrap(jax.grad(recompute(layers, 900, offload=True)))(ws, xs), wrap(jax.grad(layers))(ws, xs), 1e-11)
    assert len(timed) == 2 and min(timed) > 0


def test_a_plan_that_runs_for_random_numbers():
    """The step that is timed takes keys and integers, too."""
    loss, params, batch = case("transformer", np.float32)
    search = pareto.ParetoSearch(*_closed(loss, params, batch), offload=True)
    point = search.cheap()
    search.measure(point)
    assert pareto.seconds_of_step(search.steps[point], [v.aval for v in search.closed.jaxpr.invars]) > 0


def _closed(loss: Any, params: Any, batch: Any) -> Any:
    search = search_of(loss, params, batch)
    return search.closed, search.diff


def test_copies_run_beside_products_on_a_gpu():
    """Compiled for an H200: the memory of the device falls, and each copy begins before kernels that run beside it."""
    found = compile_for_hopper("tests.offload_for_hopper")
    for way in ("layers", "loop"):
        kept, host = found[way]["kept"], found[way]["host"]
        assert host["temp"] < 0.75 * kept["temp"] and host["on_host"] > 0 and not kept["copies"]
        assert host["copies"] and sum(n > 0 for n in host["copies"]) >= len(host["copies"]) / 2
